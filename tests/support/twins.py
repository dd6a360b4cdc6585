"""Train a model twice, untouched and with values dropped, and compare every number.

On a machine with a GPU the twins live there; else on the CPU.
"""

import dataclasses
import random
from collections.abc import Callable, Collection, Sequence

import numpy
import torch
from torch import nn

from leanstep.engines.apply import Applied, apply
from leanstep.ir import Cost, Decision, Engine, Identity, Offload, Plan, Profile
from leanstep.ir.decision import INPUT
from leanstep.rebuild.block import BlockGraph
from leanstep.recorder import record
from leanstep.recorder.blocks import find_blocks
from leanstep.recorder.signatures import Signatures
from leanstep.simulator import simulate, static_bytes
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep
from leanstep.torch_private.tensors import tree_map
from leanstep.truth import peak_rise_bytes, resident_bytes

WIDTH = 48
ROWS = 64
Pick = Callable[[Sequence[int]], Sequence[int]]


class Block(nn.Module):
    """A block whose forward is a function of two layers and the input."""

    def __init__(self, body: Callable) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.body = body

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def stack_of(body: Callable, count: int = 2, change: Callable = lambda block: None) -> Stack:
    blocks = [Block(body) for _ in range(count)]
    for block in blocks:
        change(block)
    return Stack(blocks)


def everything(candidates: Sequence[int]) -> Sequence[int]:
    return candidates


def some(seed: int) -> Pick:
    chance = random.Random(seed)
    return lambda candidates: [c for c in candidates if chance.random() < 0.5]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def bits(value):
    """Something that two equal values share, bit for bit."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.is_sparse:
        value = value.coalesce()
        return bits(value.indices()), bits(value.values())
    raw = value.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    return value.shape, value.dtype, raw.numpy().tobytes()


def host(value):
    """A copy in host memory, of what is a tensor."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def different(expected: list[dict], got: list[dict]) -> list[str]:
    """What two trainings do not share, bit for bit."""
    return [
        f"step {step}: {name}"
        for step, (old, new) in enumerate(zip(expected, got, strict=True))
        for name in old.keys() | new.keys()
        if name not in old or name not in new or bits(old[name]) != bits(new[name])
    ]


def close(expected: list[dict], got: list[dict], names: Collection[str]) -> bool:
    """Whether what need not be equal is as near as another order of a sum brings it."""
    pairs = [
        (old[name], new[name])
        for step, (old, new) in enumerate(zip(expected, got, strict=True))
        for name in old
        if f"step {step}: {name}" in names
    ]
    return all(torch.allclose(old, new, rtol=1e-3, atol=1e-5) for old, new in pairs)


def profile(step: TrainingStep) -> Profile:
    """A profile without times: no test here looks at them."""
    signatures = Signatures()
    with untouched(step):
        step.run()
        graph = record(step, signatures)
    return Profile(
        graph=graph,
        blocks=find_blocks(step.model, graph),
        costs=tuple(Cost(str(spec.func), 1e-6) for spec in signatures.specs),
        step_seconds=1.0,
        other_bytes=0,
        peak_bytes=0,
        device=str(step.device),
        torch_version=torch.__version__,
        model=Identity(""),
    )


def plan_of(profile: Profile, engine: Engine, pick: Pick, *, offloads: bool = False) -> Plan:
    """A plan that drops what is picked; with `offloads` the rest waits on the host."""
    decisions = []
    for number, block in enumerate(profile.blocks):
        view = BlockGraph(profile.graph, block)
        picked = pick(view.candidates)
        drop = [view.storage_key(s) for s in picked]
        drop = tuple(drop) if engine is Engine.REPLAY else ()
        storages = profile.graph.storages
        rest = {s: view.storage_key(s) for s in view.settled if s not in picked}
        rest.update({} if view.input is None else {view.input: INPUT})
        is_last = number == len(profile.blocks) - 1
        offload = tuple(
            Offload(key, storages[s].nbytes, release=0, fetch=1)
            for s, key in rest.items()
            if offloads and not is_last and storages[s].nbytes
        )
        place = block.path, block.occurrence, block.children
        decisions.append(Decision(*place, engine, drop, 0, 0, 0.0, "", offload=offload))
    draft = Plan("test", 1 << 40, 0, 0, 0, 1.0, 0.0, 0.0, tuple(decisions), Identity(""), "")
    return dataclasses.replace(draft, peak_bytes=simulate(profile, draft).peak_bytes)


def mean_square(model: nn.Module, batch):
    return model(batch).pow(2).mean()


def rows(seed: int = 0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Case:
    """A model, how it is called, and what one training step of it is.

    `step` runs forward and backward and returns what to compare; `whole_step` runs the optimizer
    too, for scalers, clipping and several batches.
    """

    make: Callable[[], nn.Module]
    loss: Callable = mean_square
    batch: object = None
    step: Callable | None = None
    rate: float = 0.05
    whole_step: Callable | None = None
    optimizer: Callable = torch.optim.SGD
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.batch = tree_map(self._moved, rows() if self.batch is None else self.batch)

    def _moved(self, leaf):
        return leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf

    def fresh(self) -> nn.Module:
        seed_all(1)
        return self.make().to(self.device)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trained = [p for p in model.parameters() if p.requires_grad]
        return self.optimizer(trained, lr=self.rate)

    def profile(self, model: nn.Module | None = None) -> Profile:
        model = model or self.fresh()
        return profile(TrainingStep(model, self.batch, self.loss, self.make_optimizer(model)))

    def fitted(
        self, engine=Engine.REPLAY, pick: Pick = everything, *, offloads: bool = False
    ) -> tuple[nn.Module, Applied]:
        plan = plan_of(self.profile(), engine, pick, offloads=offloads)
        model = self.fresh()
        return model, apply(model, plan)

    def train(self, model: nn.Module, steps: int) -> list[dict]:
        """What each of a few steps leaves behind, in host memory."""
        optimizer = self.make_optimizer(model)
        seed_all(2)
        seen = []
        for index in range(steps):
            results = self._run(model, optimizer, index)
            seen.append({f"result {i}": host(result) for i, result in enumerate(results)})
            seen[-1]["random state"] = torch.get_rng_state()
            seen[-1]["Python's random state"] = (random.getstate(), str(numpy.random.get_state()))
            if self.device != "cpu":
                seen[-1]["random state on the device"] = torch.cuda.get_rng_state()
            for name, parameter in model.named_parameters():
                seen[-1][f"gradient of {name}"] = host(parameter.grad)
                seen[-1][f"parameter {name}"] = host(parameter)
            for name, buffer in model.named_buffers():
                seen[-1][f"buffer {name}"] = host(buffer)
            if self.whole_step is None:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return seen

    def _run(self, model: nn.Module, optimizer: torch.optim.Optimizer, index: int):
        if self.whole_step is not None:
            return self.whole_step(model, optimizer, self.batch, index)
        if self.step is not None:
            return self.step(model, self.batch)
        loss = self.loss(model, self.batch)
        loss.backward()
        return [loss]

    def differences(self, engine=Engine.REPLAY, pick: Pick = everything, steps: int = 9):
        """What differs between the untouched model and the fitted one."""
        expected = self.train(self.fresh(), steps)
        model, applied = self.fitted(engine, pick)
        try:
            got = self.train(model, steps)
        finally:
            applied.remove()
        return different(expected, got)

    def peaks(self, engine=Engine.REPLAY, pick: Pick = everything) -> tuple[int, int]:
        """The predicted and the measured peak."""
        known = self.profile()
        plan = plan_of(known, engine, pick)
        model = self.fresh()
        applied = apply(model, plan)
        step = TrainingStep(model, self.batch, self.loss, self.make_optimizer(model))
        # Whole modules run again from the third call on; replays go op by op in the third, and
        # are programs of the interpreter in the fifth.
        step.run()
        step.run()
        rise = peak_rise_bytes(step.run, step.device)
        step.run()
        rise = max(rise, peak_rise_bytes(step.run, step.device))
        applied.remove()
        return plan.peak_bytes, rise + max(resident_bytes(step), static_bytes(known))
