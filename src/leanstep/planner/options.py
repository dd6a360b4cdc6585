"""The options of each block call: what it may drop, and what each of these does to the step.

They are worked out once for equal calls and moved along to the others.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from leanstep.effects import form_effect, module_effect
from leanstep.errors import InputError, unknown_name
from leanstep.ir import Category, Engine, Profile
from leanstep.planner.fingerprint import Frame, fingerprint, frame_of, turning_point
from leanstep.planner.option import UNTOUCHED, CallOptions, Option, alone, in_grains, option_of
from leanstep.planner.overrides import Rule, Wishes, wishes
from leanstep.planner.replay_options import by_replay
from leanstep.rebuild.block import BlockGraph

ENGINES = ("auto", "replay", "module", "inductor")


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
            return alone(UNTOUCHED)
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
        for number in view.read:
            if owner.get(number, index) != index:
                readers.setdefault(number, set()).add(index)
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
        found = by_replay(profile, view, droppable, wished, is_joined=is_joined)
        if len(found.options) > 1 or found.forced:
            return found
    if engine == "replay":
        return alone(UNTOUCHED)
    return _by_module(profile, view, borders, wished)


def _by_module(
    profile: Profile, view: BlockGraph, borders: frozenset[int], wished: Wishes
) -> CallOptions:
    may_run_again = borders.isdisjoint(view.saved) and wished.keep.isdisjoint(view.saved)
    if not view.saved or not may_run_again or _writes_outside(view) or view.reads_what_changes:
        return alone(UNTOUCHED)
    whole = option_of(profile, Engine.MODULE, view.saved, module_effect(view))
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
    spent = in_grains(unplanned.seconds - fastest, profile.step_seconds, least=0)
    options = [
        replace(
            option_of(profile, Engine.INDUCTOR, (), form_effect(view, unplanned, form)),
            seconds=in_grains(form.seconds - fastest, profile.step_seconds, least=0),
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
