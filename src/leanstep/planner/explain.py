"""What a plan has to remember of its profile, so that it can explain itself later, alone."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from leanstep.effects import Effect
from leanstep.ir import Block, Category, Holder, OpRow, Peak, Phase, Point, Profile, Timeline
from leanstep.rebuild.block import BlockGraph
from leanstep.simulator import base_levels, timeline
from leanstep.units import format_bytes

STATIC = (Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE)


class Account:
    """Every decision's share in the planned step, at its peak and at the untouched step's.

    `dropped` are the storages that each decision drops, `untouched` the step before it was planned.
    """

    def __init__(
        self,
        profile: Profile,
        views: Sequence[BlockGraph],
        effects: Sequence[Effect],
        line: Timeline,
        dropped: Sequence[frozenset[int]],
        untouched: Profile,
    ) -> None:
        self.profile, self.views, self.effects = profile, views, effects
        self._dropped = dropped
        before = timeline(untouched, [])
        self.planned, self.unplanned = line.points[line.peak], before.points[before.peak]
        self.base_bytes = int(base_levels(profile)[self.planned.position])
        blocks = [view.block for view in views]
        self._finder, self._finder_before = _Finder(profile, blocks), _Finder(untouched, blocks)

    def share(self, place: int) -> dict[str, Any]:
        """The rows of one decision, and what it frees, as fields of a `Decision`."""
        effect, block = self.effects[place], self.views[place].block
        freed = [freed_bytes(effect, point.position) for point in (self.planned, self.unplanned)]
        at_peak = freed[0].total()
        if self.planned.replayed and block.start <= self.planned.op < block.stop:
            at_peak -= self._rebuilt_bytes
        return {
            "rows": tuple(self._rows(place, freed)),
            "peak_freed_bytes": at_peak,
            "unplanned_peak_freed_bytes": freed[1].total(),
        }

    @property
    def _is_outside(self) -> bool:
        """Whether the peak is in code that runs outside of the model."""
        return self.profile.graph.ops[self.planned.op].call < 0

    @cached_property
    def _rebuilt_bytes(self) -> int:
        """What the replay at the peak has rebuilt beyond what stays rebuilt after it."""
        position = self.planned.position
        freed = sum(freed_bytes(effect, position).total() for effect in self.effects)
        return self.planned.live_bytes - (self.base_bytes - freed)

    def _rows(self, place: int, freed: Sequence[Counter[int]]) -> Iterator[OpRow]:
        """The ops of a call that autograd saves from or that run again."""
        view, effect, graph = self.views[place], self.effects[place], self.profile.graph
        # Not read off the shifts: what Python holds as long as autograd is dropped without one. An
        # output that the next call saves may be dropped too.
        gone = self._dropped[place] & view.own_storages
        held = ({save.value.storage for save in view.saves} & view.own_storages) | gone
        paid: dict[int, float] = {}
        for replay in effect.replays:
            paid[replay.op] = paid.get(replay.op, 0.0) + replay.seconds(self.profile)
        for index, name in graph.keys(view.block):
            own = graph.births(index)
            freed_here = [sum(by_storage[s] for s in own) for by_storage in freed]
            if held.isdisjoint(own) and index not in paid and not any(freed_here):
                continue
            yield OpRow(
                name,
                graph.ops[index].source,
                sum(graph.storages[s].nbytes for s in own if s in held and s not in gone),
                sum(graph.storages[s].nbytes for s in own if s in gone),
                paid.get(index, 0.0),
                *freed_here,
            )

    def peaks(self, droppable: Sequence[frozenset[int]] = ()) -> tuple[Peak, Peak]:
        """The peaks of the planned and of the untouched step; `droppable` is what might go."""
        freed = sum(freed_bytes(e, self.unplanned.position).total() for e in self.effects)
        found = self._finder.peak(self.planned, self.effects, self.base_bytes)
        spare = self._finder.spare_bytes(self.views, self.effects, droppable, self.planned)
        return (
            replace(found, advice=advice(found, spare, is_outside=self._is_outside)),
            self._finder_before.peak(self.unplanned, (), self.unplanned.live_bytes - freed),
        )


def untouched_peak(profile: Profile) -> Peak:
    """The peak of a step that nobody has planned."""
    line = timeline(profile, [])
    point = line.points[line.peak]
    return _Finder(profile, profile.blocks).peak(point, (), point.live_bytes)


def freed_bytes(effect: Effect, position: int) -> Counter[int]:
    """By storage, how much less is live at a position; -1 is what the engine holds for itself."""
    freed: Counter[int] = Counter()
    for shift in effect.shifts:
        if shift.start <= position < shift.stop:
            freed[shift.storage] -= shift.nbytes
    return freed


class _Finder:
    """Say who owns what at a point of the step."""

    def __init__(self, profile: Profile, blocks: Sequence[Block]) -> None:
        self.profile, self.graph = profile, profile.graph
        self.blocks = sorted(blocks, key=lambda block: block.start)
        self._starts = [block.start for block in self.blocks]

    def peak(self, point: Point, effects: Sequence[Effect], other_live_bytes: int) -> Peak:
        """Describe one point."""
        op = self.graph.ops[point.op]
        block = self.block_of(point.op)
        return Peak(
            op=op.name,
            phase=op.phase,
            is_replayed=point.replayed,
            module=self.graph.path(op),
            block="" if block is None else block.name,
            source=op.source,
            live_bytes=point.live_bytes,
            peak_bytes=point.peak_bytes,
            other_live_bytes=other_live_bytes,
            holders=self.holders(point, effects),
        )

    def holders(self, point: Point, effects: Sequence[Effect]) -> tuple[Holder, ...]:
        """What is live at a point by category and owner; it adds up to the peak."""
        totals: Counter[tuple[Category, str]] = Counter()
        totals[Category.OTHER, ""] += max(0, self.profile.other_bytes + self.profile.slack_bytes)
        for storage in self.graph.storages:
            if storage.is_live(point.position):
                totals[storage.category, self.owner(storage.birth)] += storage.nbytes
        for block, effect in zip(self.blocks, effects, strict=False):
            for shift in effect.shifts:
                if shift.start <= point.position < shift.stop:
                    birth = -1 if shift.storage < 0 else self.graph.storages[shift.storage].birth
                    owner = block.name if shift.storage < 0 else self.owner(birth)
                    totals[shift.category, owner] += shift.nbytes
        rebuilt = point.live_bytes - totals.total()
        totals[Category.ACTIVATION, self.owner(point.op)] += rebuilt
        rise = point.peak_bytes - point.live_bytes
        totals[Category.TEMPORARY, self.owner(point.op)] += rise
        return tuple(Holder(*key, nbytes) for key, nbytes in totals.items() if nbytes)

    def owner(self, index: int) -> str:
        """The block call or module that an op belongs to."""
        if index < 0:
            return ""
        block = self.block_of(index)
        if block is not None:
            return block.name
        op = self.graph.ops[index]
        return self.graph.path(op) or op.source

    def block_of(self, index: int) -> Block | None:
        """The block call that an op of forward lies in, or that one of backward belongs to."""
        op = self.graph.ops[index]
        start, stop = index, index + 1
        if op.phase is not Phase.FORWARD:
            if op.call < 0:
                return None
            start, stop = self.graph.calls[op.call].start, self.graph.calls[op.call].stop
        place = bisect_right(self._starts, start) - 1
        if place < 0 or stop > self.blocks[place].stop:
            return None
        return self.blocks[place]

    def spare_bytes(
        self,
        views: Sequence[BlockGraph],
        effects: Sequence[Effect],
        droppable: Sequence[frozenset[int]],
        point: Point,
    ) -> int:
        """What is live at a point, could be dropped, and belongs to other calls than the point."""
        here = self.block_of(point.op)
        total = 0
        for view, effect, numbers in zip(views, effects, droppable, strict=False):
            if view.block == here:
                continue
            freed = freed_bytes(effect, point.position)
            for number in numbers:
                storage = self.graph.storages[number]
                if storage.natural_death < point.position <= storage.death and not freed[number]:
                    total += storage.nbytes
        return total


def advice(peak: Peak, spare_bytes: int, *, is_outside: bool = False) -> str:
    """What would lower a peak next, in a sentence."""
    rise = format_bytes(peak.peak_bytes - peak.live_bytes)
    if spare_bytes:
        return (
            f"other blocks keep {format_bytes(spare_bytes)} there that could be dropped for more "
            "time; ask for a smaller budget"
        )
    if peak.phase is Phase.OPTIMIZER:
        return _optimizer_advice(peak, rise)
    if peak.is_replayed:
        return (
            f"{peak.block} rebuilds what it dropped here and nothing else can go; only keeping "
            "more of it, smaller blocks or a smaller batch would help"
        )
    if peak.block:
        own = sum(h.nbytes for h in peak.holders if h.owner == peak.block)
        return (
            f"{peak.block}'s own {peak.phase.value} needs {format_bytes(own)} at once and no other "
            "block keeps anything that could go; smaller blocks or a smaller batch would help"
        )
    if is_outside and ("log_softmax" in peak.op or "nll_loss" in peak.op):
        return (
            f"the loss needs {rise} here: leanstep.cross_entropy, called in the place of torch's, "
            "takes a fraction of it and has the same bits"
        )
    return (
        f"{peak.op} is in no block, so no plan changes the {rise} it needs; a smaller batch would "
        "help"
    )


def _optimizer_advice(peak: Peak, rise: str) -> str:
    static = format_bytes(sum(peak.by_category.get(category, 0) for category in STATIC))
    if "_fused_" in peak.op:
        return f"parameters, gradients and optimizer state are {static}; recomputing frees none"
    return (
        f"the optimizer's own temporaries are the peak ({rise} on top of {static} of parameters, "
        "gradients and state): recomputing more cannot lower it; use fused=True or foreach=False"
    )
