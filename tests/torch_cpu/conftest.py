"""Train a model twice, untouched and with values dropped, and compare every number."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from leanstep.blockgraph import BlockGraph  # noqa: E402
from leanstep.engines.apply import Applied, apply  # noqa: E402
from leanstep.ir import Cost, Decision, Engine, Identity, Plan, Profile  # noqa: E402
from leanstep.recorder import record  # noqa: E402
from leanstep.recorder.blocks import find_blocks  # noqa: E402
from leanstep.recorder.signatures import Signatures  # noqa: E402
from leanstep.simulator import simulate, static_bytes  # noqa: E402
from leanstep.state import untouched  # noqa: E402
from leanstep.step import TrainingStep  # noqa: E402
from leanstep.truth import peak_rise_bytes, resident_bytes  # noqa: E402

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
        device="cpu",
        torch_version=torch.__version__,
        model=Identity(""),
    )


def plan_of(profile: Profile, engine: Engine, pick: Pick) -> Plan:
    decisions = []
    for block in profile.blocks:
        view = BlockGraph(profile.graph, block)
        drop = [view.storage_key(s) for s in pick(view.candidates)]
        drop = tuple(drop) if engine is Engine.REPLAY else ()
        decisions.append(
            Decision(block.path, block.occurrence, block.children, engine, drop, 0, 0, 0.0, "")
        )
    draft = Plan("test", 1 << 40, 0, 0, 0, 1.0, 0.0, 0.0, tuple(decisions), Identity(""), "")
    return dataclasses.replace(draft, peak_bytes=simulate(profile, draft).peak_bytes)


def mean_square(model: nn.Module, batch):
    return model(batch).pow(2).mean()


def rows(seed: int = 0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Case:
    """A model, how it is called, and what one training step of it is."""

    make: Callable[[], nn.Module]
    loss: Callable = mean_square
    batch: object = None
    step: Callable | None = None
    rate: float = 0.05

    def __post_init__(self) -> None:
        if self.batch is None:
            self.batch = rows()

    def fresh(self) -> nn.Module:
        seed_all(1)
        return self.make()

    def profile(self, model: nn.Module | None = None) -> Profile:
        model = model or self.fresh()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        return profile(TrainingStep(model, self.batch, self.loss, optimizer))

    def fitted(self, engine=Engine.REPLAY, pick: Pick = everything) -> tuple[nn.Module, Applied]:
        plan = plan_of(self.profile(), engine, pick)
        model = self.fresh()
        return model, apply(model, plan)

    def train(self, model: nn.Module, steps: int) -> list[dict]:
        """What each of a few steps leaves behind, as bits."""
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        seed_all(2)
        seen = []
        for _ in range(steps):
            results = self.step(model, self.batch) if self.step else self._plain(model)
            seen.append({f"result {i}": bits(result) for i, result in enumerate(results)})
            seen[-1]["random state"] = bits(torch.get_rng_state())
            for name, parameter in model.named_parameters():
                seen[-1][f"gradient of {name}"] = bits(parameter.grad)
            for name, buffer in model.named_buffers():
                seen[-1][f"buffer {name}"] = bits(buffer)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return seen

    def _plain(self, model: nn.Module):
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
        return [
            f"step {step}: {name}"
            for step, (old, new) in enumerate(zip(expected, got, strict=True))
            for name in old
            if old[name] != new.get(name)
        ]

    def peaks(self, engine=Engine.REPLAY, pick: Pick = everything) -> tuple[int, int]:
        """The predicted and the measured peak."""
        known = self.profile()
        plan = plan_of(known, engine, pick)
        model = self.fresh()
        applied = apply(model, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate)
        step = TrainingStep(model, self.batch, self.loss, optimizer)
        step.run()
        rise = peak_rise_bytes(step.run, step.device)
        applied.remove()
        return plan.peak_bytes, rise + max(resident_bytes(step), static_bytes(known))


@pytest.fixture
def lab() -> Iterator[SimpleNamespace]:
    """The helpers of this file: test files cannot import one another."""
    # Ops this small are faster on one thread, much faster where the machine is busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(
        Case=Case,
        Block=Block,
        Stack=Stack,
        stack_of=stack_of,
        everything=everything,
        some=some,
        rows=rows,
        bits=bits,
        mean_square=mean_square,
        REPLAY=Engine.REPLAY,
        MODULE=Engine.MODULE,
        BlockGraph=BlockGraph,
        WIDTH=WIDTH,
        ROWS=ROWS,
    )
    torch.set_num_threads(threads)
