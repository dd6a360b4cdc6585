"""The one model of memory and time: what a step under a plan needs at every op.

The recorded step gives the level at each op; a plan is the sum of the effects of its decisions
(`effects.py`).
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from leanstep.chunks import as_planned
from leanstep.effects import Effect, Replay, Shift, decision_effect, with_offload
from leanstep.errors import PlanError
from leanstep.ir import (
    Category,
    Decision,
    Engine,
    Graph,
    MemoryCurve,
    Op,
    Phase,
    Plan,
    Point,
    Profile,
    Timeline,
)
from leanstep.ir.blocks import find_block
from leanstep.ir.codec import check_kind
from leanstep.rebuild.block import BlockGraph, views_of


def simulate(profile: Profile, plan: Plan | None = None) -> Timeline:
    """Say what the step needs at every op, under a plan or untouched."""
    check_kind(profile, Profile)
    if plan is not None:
        check_kind(plan, Plan)
    effects = [] if plan is None else plan_effects(profile, plan)
    return timeline(as_planned(profile, plan), effects)


def plan_effects(profile: Profile, plan: Plan) -> list[Effect]:
    """The effect of each decision that changes something, on the step as its loss is planned."""
    profile = as_planned(profile, plan)
    blocks = [find_block(profile.graph, profile.blocks, decision) for decision in plan.decisions]
    views = views_of(profile.graph, blocks)
    effects = []
    gone: frozenset[int] = frozenset()
    for place, (view, (decision, after)) in enumerate(zip(views, plan.pairs, strict=True)):
        if after is None or not after.takes_border:
            view = view.without_border()
        view = _with_recipes(profile, view, decision)
        dropped = view.storages_named(decision.drop) if decision.drop else frozenset[int]()
        gone = _check_borders(view, dropped, gone) if dropped else dropped
        if decision.engine is not Engine.UNTOUCHED:
            effect = decision_effect(profile, view, decision)
            effects.append(with_offload(effect, views, place, decision.offload))
    if plan.loss is not None:
        effects.append(Effect(added_seconds=plan.loss.extra_seconds))
    return effects


def _check_borders(
    view: BlockGraph, dropped: frozenset[int], gone: frozenset[int]
) -> frozenset[int]:
    """Raise unless what is dropped can go; `gone` are the borders that the call before drops."""
    if held := dropped.difference(view.saved, view.borders):
        key = view.storage_key(min(held))
        raise PlanError(
            f"{view.block.name} drops {key}, which others hold: "
            "an output can go if the next call takes it (border_in)"
        )
    borders = dropped.intersection(view.borders)
    if borders and not gone.isdisjoint(view.reads_input_early(dropped)):
        raise PlanError(
            f"{view.block.name} drops its input and its output, and rebuilding the output reads "
            "the input before it is there: drop one of them"
        )
    return borders


def _with_recipes(profile: Profile, view: BlockGraph, decision: Decision) -> BlockGraph:
    """A block call with the recipes that a decision names, and no others."""
    named = view.storages_named(decision.recipes)
    ops = (profile.graph.storages[storage].birth for storage in named)
    recipes = ((index, profile.costs[profile.graph.ops[index].cost].recipe) for index in ops)
    known = {index: recipe for index, recipe in recipes if recipe is not None}
    return view.with_recipes(known) if known else view


def timeline(profile: Profile, effects: Sequence[Effect]) -> Timeline:
    """Put the recorded step and the effects together."""
    levels = shifted(base_levels(profile), (s for effect in effects for s in effect.shifts))
    points = _points(profile, levels.tolist(), effects)
    peak = max(range(len(points)), key=lambda index: points[index].peak_bytes)
    extra_seconds = sum(effect.seconds(profile) for effect in effects)
    return Timeline(
        points=tuple(points),
        peak=peak,
        at_peak=_breakdown(profile, effects, points[peak]),
        seconds=profile.step_seconds + extra_seconds,
        extra_seconds=extra_seconds,
    )


def _points(profile: Profile, levels: Sequence[int], effects: Sequence[Effect]) -> list[Point]:
    """What happens at every position: the replays before its op, then the op itself."""
    before: dict[int, list[Replay]] = {}
    for effect in effects:
        for replay in effect.replays:
            before.setdefault(replay.position, []).append(replay)
    seconds = [cost.seconds for cost in profile.costs]
    points: list[Point] = []
    for at, (op, level) in enumerate(zip((*profile.graph.ops, None), levels, strict=True)):
        points += [_replay_point(profile, replay, level) for replay in before.get(at, ())]
        if op is not None:
            peak = level + op.rise_bytes
            points.append(Point(at, False, level, peak, seconds[op.cost], at))
    return points


def _replay_point(profile: Profile, replay: Replay, level: int) -> Point:
    return Point(
        replay.op,
        True,
        level + replay.live_bytes,
        level + replay.peak_bytes,
        replay.seconds(profile),
        replay.position,
    )


def base_levels(profile: Profile) -> npt.NDArray[np.int64]:
    """The live bytes at the start of each op of the untouched step, and at its end."""
    # Columns, not shifts: planning asks for it again and again.
    storages, num_levels = profile.graph.storages, len(profile.graph.ops) + 1
    births, deaths, nbytes = map(_numbers, profile.graph.columns[-3:])
    changes = np.zeros(num_levels + 1, dtype=np.int64)
    np.add.at(changes, np.minimum(births + 1, num_levels), nbytes)
    np.subtract.at(changes, np.minimum(deaths + 1, num_levels), nbytes)
    for storage in storages:
        for start, stop in storage.absences:
            changes[start] -= storage.nbytes
            changes[stop] += storage.nbytes
    levels: npt.NDArray[np.int64] = np.cumsum(changes[:-1])
    return levels + profile.other_bytes + profile.slack_bytes


def _lives(profile: Profile) -> Iterator[Shift]:
    """Every storage of the untouched step, with its life."""
    for storage in profile.graph.storages:
        yield Shift(storage.birth + 1, storage.death + 1, storage.nbytes, storage.category)
        for start, stop in storage.absences:
            yield Shift(start, stop, -storage.nbytes, storage.category)


def shifted(levels: npt.NDArray[np.int64], shifts: Iterable[Shift]) -> npt.NDArray[np.int64]:
    """Add shifts to levels."""
    changes = np.zeros(len(levels) + 1, dtype=np.int64)
    for shift in shifts:
        if shift.start < shift.stop:
            changes[min(shift.start, len(levels))] += shift.nbytes
            changes[min(shift.stop, len(levels))] -= shift.nbytes
    added: npt.NDArray[np.int64] = levels + np.cumsum(changes[:-1])
    return added


def rises(graph: Graph) -> npt.NDArray[np.int64]:
    """How far the level rises inside each op."""
    return np.append(_numbers(graph.columns.rises), 0)


def op_seconds(profile: Profile) -> npt.NDArray[np.float64]:
    """What each op of the untouched step takes."""
    costs = np.array([cost.seconds for cost in profile.costs])
    return costs[_numbers(profile.graph.columns.costs)]


def _numbers(column: "array[int]") -> npt.NDArray[np.int64]:
    return np.frombuffer(column, dtype=np.int64) if column else np.zeros(0, dtype=np.int64)


def by_position(
    profile: Profile, effects: Sequence[Effect]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The highest level at each position, and the seconds there: a timeline's points in short.

    At the end of the step only what runs again counts.
    """
    levels = shifted(base_levels(profile), (s for effect in effects for s in effect.shifts))
    tops, seconds = levels + rises(profile.graph), np.append(op_seconds(profile), 0.0)
    tops[-1] = 0
    for replay in (replay for effect in effects for replay in effect.replays):
        at = replay.position
        tops[at] = max(tops[at], levels[at] + replay.peak_bytes)
        seconds[at] += replay.seconds(profile)
    return tops, seconds


def _breakdown(
    profile: Profile, effects: Sequence[Effect], point: Point
) -> tuple[tuple[Category, int], ...]:
    """The bytes of each category at one point; what its op adds counts as temporary."""
    position = point.position
    totals = dict.fromkeys(Category, 0)
    # Slack is below zero where the account was seen to be too high.
    totals[Category.OTHER] = max(0, profile.other_bytes + profile.slack_bytes)
    births, deaths, _ = map(_numbers, profile.graph.columns[-3:])
    for number in np.flatnonzero((births < position) & (position <= deaths)).tolist():
        storage = profile.graph.storages[number]
        # It may be emptied there.
        totals[storage.category] += storage.nbytes if storage.is_live(position) else 0
    for effect in effects:
        for shift in effect.shifts:
            if shift.start <= position < shift.stop:
                totals[shift.category] += shift.nbytes
    # An op that runs again comes before all that the position counts as rebuilt is back.
    totals[Category.ACTIVATION] += point.live_bytes - sum(totals.values())
    totals[Category.TEMPORARY] += point.peak_bytes - point.live_bytes
    return tuple((category, nbytes) for category, nbytes in totals.items() if nbytes)


def memory_curve(profile: Profile, plan: Plan | None = None) -> MemoryCurve:
    """The bytes of each category at every op of the step, under a plan or untouched."""
    effects = [] if plan is None else plan_effects(profile, plan)
    profile = as_planned(profile, plan)
    line = timeline(profile, effects)
    places = np.array([point.position for point in line.points])
    by_category: dict[Category, list[Shift]] = {category: [] for category in Category}
    for shift in (*_lives(profile), *(s for effect in effects for s in effect.shifts)):
        by_category[shift.category].append(shift)
    empty = np.zeros(len(profile.graph.ops) + 1, dtype=np.int64)
    levels = {key: shifted(empty, shifts)[places] for key, shifts in by_category.items()}
    levels[Category.OTHER] += max(0, profile.other_bytes + profile.slack_bytes)
    live = np.array([point.live_bytes for point in line.points])
    peaks = np.array([point.peak_bytes for point in line.points])
    # As for the peak: what a replay has not brought back yet is missing among activations.
    levels[Category.ACTIVATION] += live - sum(levels.values())
    levels[Category.TEMPORARY] += peaks - live
    starts = np.cumsum([0.0, *(point.seconds for point in line.points)])
    return MemoryCurve(
        starts=tuple(starts.tolist()),
        phases=tuple(_phases(profile, line)),
        layers=tuple((key, tuple(level.tolist())) for key, level in levels.items() if level.any()),
    )


def _phases(profile: Profile, line: Timeline) -> Iterator[Phase]:
    """The phase in which each op runs: for one that runs again, that of the op it precedes."""
    ops = profile.graph.ops
    yield from (ops[min(point.position, len(ops) - 1)].phase for point in line.points)


def static_bytes(profile: Profile) -> int:
    """What is there before the step begins."""
    own = sum(storage.nbytes for storage in profile.graph.storages if storage.is_live(0))
    return profile.other_bytes + own


def peak_op(profile: Profile, line: Timeline) -> Op:
    """The op that owns the peak."""
    return profile.graph.ops[line.points[line.peak].op]
