"""One rank of a test with real processes: `python ranks.py SCENARIO,... WORLD RANK FOLDER`.

What a scenario returns is saved for the test that started it; so is the error it raised.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from encoders import Encoder, encoding
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import leanstep
from leanstep.ir import Category, Fact
from leanstep.recorder import record
from leanstep.recorder.signatures import Signatures
from leanstep.step.training import make_step
from leanstep.torch_private.tensors import local_tensor, memory_event_bytes
from leanstep.truth import _cpu_changes, resident_bytes

WIDTH = 64
WIDE = 512
PIECE_BYTES = 64 << 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a batch norm, a parameter used on even ranks alone, one never, and a shared one."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        if dist.get_rank() % 2 == 0:
            x = self.sometimes(x)
        return self.last(x)


def make(depth: int = 4):
    torch.manual_seed(1)
    model = Net(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model, optimizer, batch


def squares(model, batch):
    return model(batch).square().mean()


def train(called, model, optimizer, batch, *, accumulate: int = 1, no_sync=None, steps: int = 4):
    torch.manual_seed(10 + dist.get_rank())
    seen = []
    for _ in range(steps):
        for micro in range(accumulate):
            is_last = micro == accumulate - 1
            with nullcontext() if is_last or no_sync is None else no_sync():
                squares(called, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [buffer.clone() for buffer in model.buffers()]
    return seen


def ddp(accumulate: int = 1):
    model, optimizer, batch = make()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return train(wrapped, model, optimizer, batch, accumulate=accumulate, no_sync=wrapped.no_sync)


def ddp_accumulated():
    return ddp(3)


def by_hand(accumulate: int = 1):
    model, optimizer, batch = make()
    if dist.get_rank():
        # What rank 0 has is what counts.
        nn.init.zeros_(model.first.bias)
    reduction = leanstep.reduce_gradients(model, piece="20KiB")
    return train(model, model, optimizer, batch, accumulate=accumulate, no_sync=reduction.no_sync)


def by_hand_accumulated():
    return by_hand(3)


def ddp_fitted():
    model, optimizer, batch = make()
    fitted = leanstep.fit(model, batch, squares, optimizer=optimizer, budget="80%")
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return fitted.plan, train(wrapped, model, optimizer, batch, no_sync=wrapped.no_sync)


def ddp_lean():
    model, optimizer, batch = make()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    lean = leanstep.lean(wrapped, optimizer, budget="85%")
    seen = train(wrapped, model, optimizer, batch, no_sync=wrapped.no_sync)
    return lean.plan, seen


class Plain(Net):
    """The same without the parameters that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        del self.sometimes, self.never

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def fsdp_lean(budget: str = "85%", *, has_bias: bool = True):
    """Sharded parameters: untouched, and lean."""

    def shard(model: Plain) -> None:
        for block in model.blocks:
            if not has_bias:
                block.up.bias = block.down.bias = None
            fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    return both(shard, dist.get_rank(), budget)


def fsdp_lean_tight():
    """Products with gathered parameters run again: autograd saves all that they start from."""
    return fsdp_lean("65%", has_bias=False)


def wide():
    """A model whose parameters outweigh what it saves, with its loss and optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(*(WideBlock() for _ in range(4)), nn.Linear(WIDE, WIDE))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return model, torch.randn(256, WIDE), squares, optimizer


def fsdp_memory():
    """The peak of a step that FSDP2 shards, by the allocator and by the account of that step."""
    model, batch, loss, _ = wide()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step = make_step(model, batch, loss, optimizer)
    step.run()
    resident = resident_bytes(step)

    def run() -> None:
        step.run()
        # Threads of gloo's let go of something after the step has ended.
        time.sleep(0.05)

    # As often on every rank; a reading whose level does not come back is none.
    readings = [_cpu_changes(run) for _ in range(5)]
    measured = [resident + max(itertools.accumulate(one)) for one in readings if sum(one) == 0]
    return {"measured": measured, "recorded": recorded_peak(record(step, Signatures()))}


def recorded_peak(graph) -> int:
    """The most that is live inside an op."""
    return max(
        op.rise_bytes + sum(s.nbytes for s in graph.storages if s.is_live(position))
        for position, op in enumerate(graph.ops)
    )


def tensor_parallel_lean():
    """Modules whose tensors are spread over the ranks: untouched, and lean."""

    def spread(model: Plain) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            block.drop = nn.Identity()
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return both(spread, seed=0)


def both(distribute, seed: int, budget: str = "85%"):
    found = {}
    for is_lean in (False, True):
        torch.manual_seed(1)
        model = Plain()
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(seed))
        lean = leanstep.lean(model, optimizer, budget=budget) if is_lean else None
        torch.manual_seed(10 + seed)
        found[is_lean] = []
        for _ in range(4):
            squares(model, batch).backward()
            found[is_lean] += [local_tensor(p.grad).clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            found[is_lean] += [local_tensor(p.detach()).clone() for p in model.parameters()]
    rerun = [key for d in lean.plan.decisions for key in d.drop]
    collectives = [op.name for op in lean.profile.graph.ops if Fact.COLLECTIVE in op.facts]
    shards = sum(s.nbytes for s in lean.profile.graph.storages if s.category is Category.PARAMETER)
    whole = sum(p.nbytes for p in Plain().parameters())
    return {
        "untouched": found[False],
        "lean": found[True],
        "dropped": rerun,
        "collectives": collectives,
        "share": shards / whole,
    }


def ddp_loss():
    """A language model whose loss lean computes in chunks: untouched, and lean."""
    return talking(DistributedDataParallel)


def fsdp_loss():
    """The same with sharded parameters."""

    def shard(model: Encoder) -> Encoder:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return talking(shard)


def talking(distribute):
    found = {}
    for is_lean in (False, True):
        model, _ = encoding()
        called = distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(
            1024, (8, 64), generator=torch.Generator().manual_seed(dist.get_rank())
        )
        lean = leanstep.lean(called, optimizer, budget="70%") if is_lean else None
        torch.manual_seed(10 + dist.get_rank())
        found[is_lean] = []
        for _ in range(3):
            loss = called(tokens, tokens.roll(1, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            parameters = [local_tensor(p.detach()).clone() for p in model.parameters()]
            found[is_lean] += [loss.detach(), *parameters]
    return {"untouched": found[False], "lean": found[True], "loss": str(lean.plan.loss)}


def other_model():
    model, optimizer, batch = make()
    if dist.get_rank() == 1:
        model.last = nn.Linear(WIDTH, WIDTH + 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leanstep.fit(model, batch, squares, optimizer=optimizer, budget="80%")


def other_model_lean():
    model, optimizer, batch = make(4 + (dist.get_rank() == 1))
    leanstep.lean(model, optimizer, budget="80%")
    squares(model, batch).backward()


def too_small():
    model, optimizer, batch = make()
    leanstep.fit(model, batch, squares, optimizer=optimizer, budget=1000)


def wrapped_first():
    model, optimizer, batch = make()
    leanstep.fit(DistributedDataParallel(model), batch, squares, optimizer=optimizer)


def memory():
    """The bytes of the gradients, and the peak of two steps under DDP (both kinds) and by hand."""
    # A thread of gloo's lets go of a piece in its own time: for ours that can only add to what is
    # counted, and DDP's peak is mostly the same, but at times lower by one.
    tries = {name: [peak_of(name) for _ in range(9)] for name in ("copies", "views", "by hand")}
    found = {name: statistics.median_high(peaks) for name, peaks in tries.items()}
    found["by hand"] = min(tries["by hand"])
    model, *_ = make()
    return {**found, "gradients": sum(p.nbytes for p in model.parameters())}


def peak_of(name: str) -> int:
    """The most that was allocated at once, from before the model is made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model, _, batch = make()
        if name == "by hand":
            called = model
            leanstep.reduce_gradients(model, piece=PIECE_BYTES)
        else:
            called = DistributedDataParallel(
                model, find_unused_parameters=True, gradient_as_bucket_view=name == "views"
            )
        for _ in range(2):
            squares(called, batch[:4]).backward()
            model.zero_grad()
    return highest(profiler)


def highest(profiler) -> int:
    """The most that was allocated at once while a profiler looked on."""
    return max(itertools.accumulate(memory_event_bytes(profiler)))


def run(scenarios: list[str], world: int, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    results = {scenario: outcome(globals()[scenario]) for scenario in scenarios}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def outcome(scenario):
    start = time.monotonic()
    try:
        result = scenario()
    except Exception as error:
        seconds = time.monotonic() - start
        return {"error": type(error).__name__, "message": str(error), "seconds": seconds}
    if isinstance(result, tuple):
        plan, seen = result
        return {"decisions": dataclasses.asdict(plan)["decisions"], "seen": seen}
    return result


if __name__ == "__main__":
    run(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
