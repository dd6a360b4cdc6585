"""The options of each block call: what it may drop, and what each of these does to the step.

The sets come from the cut inside the block, found once for equal blocks; their effect on the step
comes from the simulator, for every call.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from leanstep.blockgraph import BlockGraph
from leanstep.effects import Effect, module_effect, replay_effect
from leanstep.errors import InputError
from leanstep.ir import Category, Engine, Profile
from leanstep.planner.cut import drop_sets
from leanstep.planner.fingerprint import fingerprint
from leanstep.rebuild import UnreachableError

ENGINES = ("auto", "replay", "module")

# Python between two kernels of backward: hooks, the schedule, and looking up the sources. Without
# it a plan would drop a kilobyte to save a kilobyte.
REGION_SECONDS = 20e-6


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block call; `seconds` is what it adds to the step."""

    engine: Engine
    dropped: tuple[int, ...]
    seconds: float
    effect: Effect

    @property
    def num_replays(self) -> int:
        """How many ops run again."""
        return len(self.effect.replays)


UNTOUCHED = Option(Engine.UNTOUCHED, (), 0.0, Effect())


def check_engine(engine: str) -> None:
    """Raise InputError unless there is such an engine."""
    if engine not in ENGINES:
        raise InputError(f"no engine is called {engine!r}; there are {', '.join(ENGINES)}")


def find_options(
    profile: Profile, views: Sequence[BlockGraph], engine: str
) -> tuple[tuple[Option, ...], ...]:
    """The options of every call: the first keeps everything, the last drops all it can."""
    check_engine(engine)
    borders = read_by_others(views)
    if engine == "module":
        return tuple((UNTOUCHED, *_by_module(profile, view, borders)) for view in views)
    known: dict[Hashable, tuple[tuple[str, ...], ...]] = {}
    found = []
    for view in views:
        key = (fingerprint(view), _border_keys(view, borders))
        if key not in known:
            known[key] = _named_sets(profile, view, borders)
        options = [*_by_replay(profile, view, known[key])]
        if not options and engine == "auto":
            options = [*_by_module(profile, view, borders)]
        found.append((UNTOUCHED, *options))
    return tuple(found)


def read_by_others(views: Sequence[BlockGraph]) -> frozenset[int]:
    """The storages that an op of another block call reads.

    Such a block may start its replays from them and then holds them, whoever drops them: dropping
    one frees nothing for sure.
    """
    owner = {number: index for index, view in enumerate(views) for number in view.own_storages}
    return frozenset(
        value.storage
        for index, view in enumerate(views)
        for op in view.graph.ops[view.block.start : view.block.stop]
        for value in op.reads
        if owner.get(value.storage, index) != index
    )


def _border_keys(view: BlockGraph, borders: frozenset[int]) -> tuple[str, ...]:
    return tuple(sorted(view.storage_key(number) for number in borders.intersection(view.saved)))


def _named_sets(
    profile: Profile, view: BlockGraph, borders: frozenset[int]
) -> tuple[tuple[str, ...], ...]:
    """The sets worth dropping, by names that hold in every equal call."""
    droppable = frozenset(view.candidates) - borders
    if not droppable:
        return ()
    sets = drop_sets(profile, view, droppable)
    return tuple(tuple(view.storage_key(number) for number in sorted(chosen)) for chosen in sets)


def _by_replay(
    profile: Profile, view: BlockGraph, sets: Iterable[tuple[str, ...]]
) -> Iterable[Option]:
    for names in sets:
        dropped = view.storages_named(names)
        try:
            effect = replay_effect(view, dropped)
        except UnreachableError:
            continue
        yield _option(profile, Engine.REPLAY, dropped, effect)


def _by_module(profile: Profile, view: BlockGraph, borders: frozenset[int]) -> Iterable[Option]:
    if view.saved and borders.isdisjoint(view.saved) and not _writes_outside(view):
        yield _option(profile, Engine.MODULE, view.saved, module_effect(view))


def _writes_outside(view: BlockGraph) -> bool:
    """Whether a call changes what belongs to others; only buffers are put back for a second run."""
    ops = view.graph.ops[view.block.start : view.block.stop]
    may_move = (Category.BUFFER, Category.GENERATOR)
    return any(
        view.graph.storages[value.storage].category not in may_move
        for op in ops
        for value in op.writes
        if value.storage not in view.own_storages
    )


def _option(profile: Profile, engine: Engine, dropped: Collection[int], effect: Effect) -> Option:
    num_regions = max(1, len({replay.position for replay in effect.replays}))
    seconds = effect.seconds(profile) + num_regions * REGION_SECONDS
    return Option(engine, tuple(sorted(dropped)), seconds, effect)
