"""Memory over the step as plain columns: every op, every storage, before and under a plan.

Columns of numbers and one table of texts, since a page holds thousands of each. What is alive at
an op is left to the reader of the columns: a storage is there at position p when
`birth < p <= death`, and under a plan the shifts that cover p are added to it. An op that runs
again comes before what it brings back: gains that begin at p are not there yet, and losses that end
at p still are; what it has rebuilt so far is the rest of the level.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from leanstep.chunks import as_planned, resized
from leanstep.effects import Shift
from leanstep.ir import Category, Graph, Phase, Plan, Profile
from leanstep.simulator import memory_curve, plan_effects, simulate

# From what stays, at the bottom, to what moves; the rest is seldom worth a colour of its own.
GROUPS: tuple[tuple[str, tuple[Category, ...]], ...] = (
    ("parameters", (Category.PARAMETER,)),
    ("optimizer state", (Category.OPTIMIZER_STATE,)),
    ("inputs, buffers, other", (Category.INPUT, Category.BUFFER, Category.OTHER)),
    ("gradients", (Category.GRADIENT,)),
    ("activations", (Category.ACTIVATION, Category.GENERATOR)),
    ("temporaries", (Category.TEMPORARY,)),
)
GROUP_OF = {category: place for place, (_, own) in enumerate(GROUPS) for category in own}
_PHASES = tuple(Phase)


@dataclass(frozen=True, slots=True)
class OpColumns:
    """Every op of the recorded step; names, modules and sources are places in `texts`."""

    texts: tuple[str, ...]
    names: tuple[int, ...]
    modules: tuple[int, ...]
    sources: tuple[int, ...]
    phases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageColumns:
    """Every storage of the recorded step; `ops` names each by its maker or its first reader."""

    nbytes: tuple[int, ...]
    groups: tuple[int, ...]
    births: tuple[int, ...]
    deaths: tuple[int, ...]
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CurveColumns:
    """One step op by op; `layers` has a row for each of `GROUPS`, and they add up to the level.

    Point i runs op `ops[i]` before (or as) op `positions[i]` of the recorded step, from `starts[i]`
    to `starts[i + 1]` seconds; an op that runs again comes before the op that needs it.
    """

    starts: tuple[float, ...]
    ops: tuple[int, ...]
    positions: tuple[int, ...]
    live: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    peak: int


@dataclass(frozen=True, slots=True)
class Steps:
    """The recorded step, and the same under a plan.

    `shifts` are what the plan changes about storages: start, stop, bytes, storage (-1: what an
    engine holds for itself).
    """

    groups: tuple[str, ...]
    phases: tuple[str, ...]
    ops: OpColumns
    storages: StorageColumns
    before: CurveColumns
    after: CurveColumns | None
    shifts: tuple[tuple[int, int, int, int], ...]


def steps_of(profile: Profile, plan: Plan | None) -> Steps:
    """Turn a profile, and a plan of it, into columns."""
    effects = [] if plan is None else plan_effects(profile, plan)
    return Steps(
        groups=tuple(name for name, _ in GROUPS),
        phases=tuple(phase.value for phase in _PHASES),
        ops=_op_columns(profile.graph),
        storages=_storage_columns(profile.graph),
        before=_curve(profile, None),
        after=None if plan is None else _curve(profile, plan),
        shifts=tuple(
            (shift.start, shift.stop, shift.nbytes, shift.storage)
            for shift in (*_loss_shifts(profile, plan), *(s for e in effects for s in e.shifts))
            if shift.start < shift.stop and shift.nbytes
        ),
    )


def _loss_shifts(profile: Profile, plan: Plan | None) -> Iterator[Shift]:
    """What becomes of storages where the loss is computed in chunks."""
    for number, old, new in resized(profile.graph, as_planned(profile, plan).graph):
        yield Shift(old.birth + 1, old.death + 1, -old.nbytes, old.category, number)
        yield Shift(new.birth + 1, new.death + 1, new.nbytes, new.category, number)


def _op_columns(graph: Graph) -> OpColumns:
    places: dict[str, int] = {}

    def column(texts: Iterable[str]) -> tuple[int, ...]:
        return tuple(places.setdefault(text, len(places)) for text in texts)

    return OpColumns(
        names=column(op.name for op in graph.ops),
        modules=column(graph.path(op) for op in graph.ops),
        sources=column(op.source for op in graph.ops),
        phases=tuple(_PHASES.index(op.phase) for op in graph.ops),
        texts=tuple(places),
    )


def _storage_columns(graph: Graph) -> StorageColumns:
    readers: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.reads:
            readers.setdefault(value.storage, index)
    return StorageColumns(
        nbytes=tuple(storage.nbytes for storage in graph.storages),
        groups=tuple(GROUP_OF[storage.category] for storage in graph.storages),
        births=tuple(storage.birth for storage in graph.storages),
        deaths=tuple(storage.death for storage in graph.storages),
        ops=tuple(
            storage.birth if storage.birth >= 0 else readers.get(number, -1)
            for number, storage in enumerate(graph.storages)
        ),
    )


def _curve(profile: Profile, plan: Plan | None) -> CurveColumns:
    curve, line = memory_curve(profile, plan), simulate(profile, plan)
    layers = dict(curve.layers)
    none = (0,) * len(line.points)
    return CurveColumns(
        # To the nanosecond: more digits only make the page larger.
        starts=tuple(round(start, 9) for start in curve.starts),
        ops=tuple(point.op for point in line.points),
        positions=tuple(point.position for point in line.points),
        live=tuple(point.live_bytes for point in line.points),
        layers=tuple(_sum([layers.get(key, none) for key in own]) for _, own in GROUPS),
        peak=line.peak,
    )


def _sum(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*rows, strict=True)))
