"""The options of each block call: what it may drop, and what each of these does to the step.

The sets come from the search inside the block, their effects from the simulator; both are worked
out once for equal calls and moved along to the others.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from leanstep.blockgraph import BlockGraph
from leanstep.effects import Effect, form_effect, module_effect, replay_effect
from leanstep.errors import InputError, unknown_name
from leanstep.ir import Category, Engine, Form, Profile
from leanstep.planner.fingerprint import Frame, Positions, fingerprint, frame_of, turning_point
from leanstep.planner.inside import drop_sets
from leanstep.planner.overrides import Rule, Wishes, wishes
from leanstep.rebuild import UnreachableError
from leanstep.simulator import base_levels, rises
from leanstep.solvers.base import PICOSECONDS

ENGINES = ("auto", "replay", "module", "inductor")

# Python between two kernels of backward: hooks, the schedule, and looking up the sources. Without
# it a plan would drop a kilobyte to save a kilobyte.
REGION_SECONDS = 20e-6

# Times of options are rounded to this share of the step. No op's time is known that well, and
# plans of equal time are seen to be equal: else the search has far more of them to tell apart.
GRAIN = 2e-5

# Sets of a second kind in one call: every one costs planning time in all calls.
FEW_SETS = 16

# Simulations of one call times the storages in each, while looking for calmer replays: a scan over
# time has hundreds of storages, and trying all of them again and again takes minutes. A call with
# up to 64 of them is searched whole for eight rounds.
MOST_WORK = 1 << 15
LEAST_ROUNDS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to run a block call; `seconds` is what it adds to the step.

    The arrays are its effect in numbers: bytes that are added from one position to another, and
    the tops of replays above the level at their positions. A compiled call has a form, beside the
    unplanned one. That need not be the fastest: `seconds` count from the fastest form, for which
    the unplanned one takes `unplanned_seconds`.
    """

    engine: Engine
    dropped: frozenset[int]
    seconds: float
    num_replays: int = 0
    drops_border: bool = False
    reads_border_early: bool = False
    forms: tuple[Form, ...] = ()
    unplanned_seconds: float = 0.0
    shift_starts: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    shift_stops: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    shift_bytes: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    replay_positions: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    replay_bytes: Positions = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def extra_seconds(self) -> float:
        """What it adds to the unplanned step; less than nothing where it is faster."""
        return self.seconds - self.unplanned_seconds

    def effect(self, view: BlockGraph) -> Effect:
        """What the option does to the step, op by op."""
        match self.engine:
            case Engine.UNTOUCHED:
                return Effect()
            case Engine.REPLAY:
                return replay_effect(view, self.dropped, border_in=not self.dropped)
            case Engine.MODULE:
                return module_effect(view)
            case Engine.INDUCTOR:
                return form_effect(view, *self.forms)


UNTOUCHED = Option(Engine.UNTOUCHED, frozenset(), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class CallOptions:
    """The options of one call: the first keeps all it may, the last drops all it may.

    `droppable` may be dropped in any combination that contains `forced`; `drop` simulates one.
    `border_options` drop the call's output too, or nothing but take a dropped input.
    """

    options: tuple[Option, ...]
    droppable: frozenset[int]
    forced: frozenset[int]
    drop: Callable[[frozenset[int]], Option | None]
    border_options: tuple[Option, ...] = ()


def check_engine(engine: str) -> None:
    """Raise InputError unless there is such an engine."""
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)


def check_profiled(profile: Profile, engine: str) -> None:
    """Raise InputError unless the profiled step is one that the engine runs."""
    if engine == "inductor" and not profile.is_compiled:
        raise InputError(
            "this is the profile of an eager step, engine='inductor' plans compiled ones: "
            "profile with engine='inductor'"
        )
    if profile.is_compiled and engine not in ("auto", "inductor"):
        raise InputError(
            f"this is the profile of a compiled step, which engine={engine!r} does not run: "
            "profile without engine='inductor'"
        )


class OptionFinder:
    """Find the options of calls, one after the other; equal ones are worked out once."""

    def __init__(
        self,
        profile: Profile,
        views: Sequence[BlockGraph],
        engine: str,
        rules: Sequence[Rule] = (),
        *,
        exact: bool = True,
    ) -> None:
        check_engine(engine)
        self.profile, self.engine, self.rules, self._exact = profile, engine, rules, exact
        self._readers = foreign_readers(views)
        self._turn = turning_point(profile.graph.ops)
        self._behind = min(self._turn, max((view.block.stop for view in views), default=0))
        self._known: dict[Hashable, tuple[BlockGraph, Frame, CallOptions]] = {}

    def find(self, view: BlockGraph, members: Collection[int]) -> CallOptions:
        """The options of a call, or of one that stands for several: these are its `members`.

        Several made one have two options: to keep all, and to drop all.
        """
        if view.block.is_compiled:
            return _by_form(self.profile, view, wishes(view, self.rules), exact=self._exact)
        engine = None if self.profile.is_compiled else self._engine(view)
        if engine is None:
            return _alone(UNTOUCHED)
        wished = wishes(view, self.rules)
        frame = frame_of(view, self._behind, self._turn)
        borders = self._borders(view, members)
        is_joined = len(members) > 1
        key = is_joined, engine, _key(view, frame, borders, wished)
        if key in self._known:
            return _moved(self.profile, *self._known[key], view, frame)
        found = _call_options(self.profile, view, borders, wished, engine, is_joined)
        self._known[key] = view, frame, found
        return found

    def _engine(self, view: BlockGraph) -> str | None:
        """The engines that may run a call, in the words of `ENGINES`; None where none may."""
        excluded = {e for e in Engine if self.profile.excludes(view.block, e)}
        if not excluded:
            return self.engine
        both = {Engine.REPLAY, Engine.MODULE}
        allowed = {"auto": both, "replay": {Engine.REPLAY}, "module": {Engine.MODULE}}
        left = allowed[self.engine] - excluded
        return left.pop().value if left else None

    def _borders(self, view: BlockGraph, members: Collection[int]) -> frozenset[int]:
        """What a call saved that an op of another call reads.

        The other may start its replays from it and then holds it, whoever drops it: dropping it
        frees nothing for sure.
        """
        readers = ((number, self._readers.get(number, set())) for number in view.saved)
        return frozenset(number for number, others in readers if others.difference(members))


def foreign_readers(views: Sequence[BlockGraph]) -> dict[int, set[int]]:
    """For each storage that a call made, the other calls with an op that reads it."""
    owner = {number: index for index, view in enumerate(views) for number in view.own_storages}
    readers: dict[int, set[int]] = {}
    for index, view in enumerate(views):
        for op in view.graph.ops[view.block.start : view.block.stop]:
            for value in op.reads:
                if owner.get(value.storage, index) != index:
                    readers.setdefault(value.storage, set()).add(index)
    return readers


def _key(view: BlockGraph, frame: Frame, borders: frozenset[int], wished: Wishes) -> Hashable:
    named = (borders, wished.keep, wished.recompute)
    names = tuple(tuple(sorted(view.storage_key(n) for n in numbers)) for numbers in named)
    return fingerprint(view, frame), names


def _call_options(
    profile: Profile,
    view: BlockGraph,
    borders: frozenset[int],
    wished: Wishes,
    engine: str,
    is_joined: bool,
) -> CallOptions:
    droppable = frozenset(view.candidates) - borders - wished.keep
    if engine != "module" and droppable:
        sets = [droppable] if is_joined else _sets(profile, view, droppable)
        found = _by_replay(profile, view, droppable, droppable & wished.recompute, sets)
        if len(found.options) > 1 or found.forced:
            if is_joined:
                return found
            return _with_borders(profile, view, _with_calmer(profile, view, found), wished)
    if engine == "replay":
        return _alone(UNTOUCHED)
    return _by_module(profile, view, borders, wished)


def _sets(profile: Profile, view: BlockGraph, droppable: frozenset[int]) -> list[frozenset[int]]:
    """The sets worth dropping: by all bytes, and by those that come free as soon as forward ends.

    What autocast holds until it ends frees nothing for a peak in the loss.
    """
    sets = drop_sets(profile, view, droppable)
    storages = view.graph.storages
    # An output of the call lives a little longer too, while the next ops read it.
    after = view.block.stop + (view.block.stop - view.block.start)
    late = {number for number in droppable if storages[number].natural_death > after}
    if late and late != droppable:
        sets[-1:-1] = drop_sets(profile, view, droppable - late, FEW_SETS)
    return sets


def _alone(option: Option) -> CallOptions:
    return CallOptions((option,), frozenset(), frozenset(), lambda dropped: option)


def _by_replay(
    profile: Profile,
    view: BlockGraph,
    droppable: frozenset[int],
    forced: frozenset[int],
    sets: Iterable[frozenset[int]],
) -> CallOptions:
    # Equal calls ask for the same sets, and so does one solver after the other.
    @functools.cache
    def simulated(dropped: frozenset[int]) -> Option | None:
        return _replayed(profile, view, dropped)

    def drop(dropped: frozenset[int]) -> Option | None:
        return simulated((dropped & droppable) | forced)

    every = [forced, *(chosen | forced for chosen in sets)]
    options = filter(None, (drop(chosen) for chosen in dict.fromkeys(every)))
    return CallOptions(tuple(options) or (UNTOUCHED,), droppable, forced, drop)


def _with_calmer(profile: Profile, view: BlockGraph, known: CallOptions) -> CallOptions:
    """Add options whose replays need less memory at a time than those that drop all.

    Dropping everything rebuilds everything inside the call's backward pass, and what is rebuilt
    early waits there. Keep storages, one by one, while the highest level in that pass falls.
    """
    bases, tops = base_levels(profile), base_levels(profile) + rises(profile.graph)
    *options, everything = known.options
    current, level = everything, _inner_level(view, bases, tops, everything)
    tries = MOST_WORK // max(1, len(everything.dropped))
    most = max(1, tries // LEAST_ROUNDS)
    while tries > 0:
        fewer = _one_less(current.dropped, known.forced, most=most)
        tries -= len(fewer)
        tried = filter(None, map(known.drop, fewer))
        levels = [(_inner_level(view, bases, tops, o), o.seconds, o) for o in tried]
        best = min(levels, key=lambda one: one[:2], default=None)
        if best is None or best[0] >= level:
            break
        level, _, current = best
        options.append(current)
    # What drops all it may stays the last one.
    return replace(known, options=(*options, everything))


def _with_borders(
    profile: Profile, view: BlockGraph, known: CallOptions, wished: Wishes
) -> CallOptions:
    """Add options that drop the call's output, and one that keeps all but takes a dropped input.

    The output is rebuilt before anything else of the call, from what is kept: what it starts from
    is not dropped with it.
    """
    borders = [number for number in view.borders if number not in wished.keep | known.droppable]
    found = [hooked(profile, view)] if not known.forced else []
    if borders:
        border = max(borders, key=lambda number: view.graph.storages[number].nbytes)
        program = view.program([border])
        used = {value.storage for value in program.all_sources}
        used.update(value.storage for op in program.reruns.values() for value in op.writes)
        if not used & known.forced:
            sets = dict.fromkeys((option.dropped - used) | {border} for option in known.options)
            stride = -(-len(sets) // FEW_SETS)
            # Every so manieth, and the one that drops most.
            few = [*list(sets)[:-1:stride], list(sets)[-1]]
            found.extend(_bordered(profile, view, chosen) for chosen in few)
    return replace(known, border_options=tuple(found))


def hooked(profile: Profile, view: BlockGraph) -> Option:
    """The option that keeps everything with hooks in place."""
    return _option(profile, Engine.REPLAY, (), replay_effect(view, (), border_in=True))


def _bordered(profile: Profile, view: BlockGraph, dropped: frozenset[int]) -> Option:
    option = _option(profile, Engine.REPLAY, dropped, replay_effect(view, dropped))
    early = bool(view.reads_input_early(dropped))
    return replace(option, drops_border=True, reads_border_early=early)


def _one_less(
    dropped: frozenset[int], forced: frozenset[int], *, most: int
) -> list[frozenset[int]]:
    """The set without one of its storages, for each of them or for so many of them, spread out."""
    numbers = sorted(dropped - forced) if len(dropped) > 1 else []
    stride = -(-len(numbers) // most)
    return [dropped - {number} for number in numbers[:: max(1, stride)]]


def _inner_level(view: BlockGraph, bases: Positions, tops: Positions, option: Option) -> int:
    """The highest level of the step while backward is in the call, with an option alone."""
    start, stop = view.first_request, view.last_release
    changes = np.zeros(len(bases) + 1, dtype=np.int64)
    np.add.at(changes, np.minimum(option.shift_starts, len(bases)), option.shift_bytes)
    np.subtract.at(changes, np.minimum(option.shift_stops, len(bases)), option.shift_bytes)
    added = np.cumsum(changes)[:-1]
    highest = int((tops + added)[start:stop].max(initial=0))
    replays = (bases + added)[option.replay_positions] + option.replay_bytes
    return max(highest, int(replays.max(initial=0)))


def _replayed(profile: Profile, view: BlockGraph, dropped: frozenset[int]) -> Option | None:
    if not dropped:
        return UNTOUCHED
    try:
        effect = replay_effect(view, dropped)
    except UnreachableError:
        return None
    return _option(profile, Engine.REPLAY, dropped, effect)


def _by_module(
    profile: Profile, view: BlockGraph, borders: frozenset[int], wished: Wishes
) -> CallOptions:
    may_run_again = borders.isdisjoint(view.saved) and wished.keep.isdisjoint(view.saved)
    if not view.saved or not may_run_again or _writes_outside(view) or view.reads_what_changes:
        return _alone(UNTOUCHED)
    whole = _option(profile, Engine.MODULE, view.saved, module_effect(view))
    everything = frozenset(view.saved)
    if wished.recompute.intersection(view.saved):
        return CallOptions((whole,), everything, everything, lambda dropped: whole)

    def drop(dropped: frozenset[int]) -> Option | None:
        return {frozenset(): UNTOUCHED, everything: whole}.get(dropped)

    return CallOptions((UNTOUCHED, whole), everything, frozenset(), drop)


def _by_form(profile: Profile, view: BlockGraph, wished: Wishes, *, exact: bool) -> CallOptions:
    """One option for each form of a compiled call; the last one keeps least."""
    kind = profile.kinds[view.block.kind]
    unplanned, *others = (form for form in kind.forms if form.exact or not exact)
    others.sort(key=lambda form: -form.kept_bytes)
    fastest = min(form.seconds for form in (unplanned, *others))
    spent = _in_grains(unplanned.seconds - fastest, profile.step_seconds, least=0)
    options = [
        replace(
            _option(profile, Engine.INDUCTOR, (), form_effect(view, unplanned, form)),
            seconds=_in_grains(form.seconds - fastest, profile.step_seconds, least=0),
            unplanned_seconds=spent,
            forms=(unplanned, form),
        )
        for form in (unplanned, *others)
    ]
    first = options[0]
    if wished.keep:
        options = [first]
    if wished.recompute:
        options = options[-1:]
    droppable = frozenset(view.saved) if options[-1] is not first else frozenset[int]()
    return CallOptions(tuple(options), droppable, frozenset(), lambda dropped: options[0])


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


def _option(profile: Profile, engine: Engine, dropped: Iterable[int], effect: Effect) -> Option:
    num_regions = max(1, len({replay.position for replay in effect.replays}))
    seconds = effect.seconds(profile) + num_regions * REGION_SECONDS
    return Option(
        engine=engine,
        dropped=frozenset(dropped),
        seconds=_in_grains(seconds, profile.step_seconds),
        num_replays=len(effect.replays),
        shift_starts=_numbers(shift.start for shift in effect.shifts),
        shift_stops=_numbers(shift.stop for shift in effect.shifts),
        shift_bytes=_numbers(shift.nbytes for shift in effect.shifts),
        replay_positions=_numbers(replay.position for replay in effect.replays),
        replay_bytes=_numbers(replay.peak_bytes for replay in effect.replays),
    )


def _in_grains(seconds: float, step_seconds: float, least: int = 1) -> float:
    """The time in whole grains, one at least; a grain is a whole number of picoseconds."""
    grain = max(1, round(GRAIN * step_seconds * PICOSECONDS))
    return max(least, round(seconds * PICOSECONDS / grain)) * grain / PICOSECONDS


def _numbers(numbers: Iterable[int]) -> Positions:
    return np.array(list(numbers), dtype=np.int64)


def _moved(
    profile: Profile,
    origin: BlockGraph,
    frame: Frame,
    known: CallOptions,
    view: BlockGraph,
    to: Frame,
) -> CallOptions:
    """The options of a call for another one that is equal."""
    # By order of birth: equal calls may run in modules of other names.
    twins = dict(zip(origin.births, view.births, strict=True))

    def there(dropped: Collection[int]) -> frozenset[int]:
        return frozenset(twins[number] for number in dropped)

    def moved(option: Option) -> Option:
        return replace(
            option,
            dropped=there(option.dropped),
            shift_starts=frame.moved(option.shift_starts, to),
            shift_stops=frame.moved(option.shift_stops, to),
            replay_positions=frame.moved(option.replay_positions, to),
        )

    droppable, forced = there(known.droppable), there(known.forced)
    back = {number: other for other in known.droppable for number in there([other])}

    def drop(dropped: frozenset[int]) -> Option | None:
        option = known.drop(frozenset(back[number] for number in dropped if number in back))
        return None if option is None else moved(option)

    return CallOptions(
        tuple(moved(option) for option in known.options),
        droppable,
        forced,
        drop,
        tuple(moved(option) for option in known.border_options),
    )
