"""What makes two block calls equal for planning: solve one, copy the answer to the others.

Storages are numbered by their first appearance in the call. Positions of forward count from the
call's start, positions of backward from its first request. Everything that the search inside a
block and the simulation of its options read is in the fingerprint, so equal fingerprints have equal
answers, moved along by two distances.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leanstep.ir import Op, Phase, Value
from leanstep.planner.cut import is_gone_in_backward
from leanstep.rebuild.block import BlockGraph

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a call lies in the step: what its positions are counted from.

    `behind` is the position behind all block calls of forward: what happens from there until
    backward, such as the end of autocast, is the same for all of them. `turn` is the first position
    of backward.
    """

    start: int
    first: int
    behind: int
    turn: int
    end: int

    def relative(self, position: int) -> tuple[str, int]:
        """A position as every equal call sees it."""
        if position < self.behind:
            return "forward", position - self.start
        if position < self.turn:
            return "between", position - self.behind
        if position < self.end:
            return "backward", position - self.first
        return "end", position - self.end

    def moved(self, positions: Positions, to: "Frame") -> Positions:
        """The same positions for an equal call."""
        ahead = np.where(positions < self.behind, to.start - self.start, 0)
        later = (self.turn <= positions) & (positions < self.end)
        there: Positions = positions + np.where(later, to.first - self.first, ahead)
        return there


def frame_of(view: BlockGraph, behind: int, turn: int) -> Frame:
    """The frame of a call."""
    end = len(view.graph.ops)
    asked = (unpack.position for unpack in view.unpacks)
    return Frame(view.block.start, min(asked, default=end), behind, turn, end)


def turning_point(ops: tuple[Op, ...]) -> int:
    """The position where backward begins."""
    return next((i for i, op in enumerate(ops) if op.phase is not Phase.FORWARD), len(ops))


class _Numbers(dict[int, tuple[int, int]]):
    """Number storages by first appearance, and their versions from the first one seen.

    The random generator is a storage too, and reaches each call in a later version.
    """

    def of(self, value: Value) -> tuple[int, int]:
        """The number of a value's storage, and its version relative to the first one seen."""
        number, first = self.setdefault(value.storage, (len(self), value.version))
        return number, value.version - first


def fingerprint(view: BlockGraph, frame: Frame) -> Hashable:
    """Return a key that equal block calls share."""
    numbers = _Numbers()
    graph, block = view.graph, view.block
    ops = tuple(_op(op, numbers) for op in graph.ops[block.start : block.stop])
    saves = tuple(
        (numbers.of(save.value), frame.relative(save.position), frame.relative(save.release))
        for save in view.saves
    )
    order = {save: place for place, save in enumerate(block.saves)}
    unpacks = tuple(
        (order[unpack.save], frame.relative(unpack.position)) for unpack in view.unpacks
    )
    storages = tuple(_storage(view, number, frame) for number in numbers)
    there = view.available(())
    reads = {value for op in graph.ops[block.start : block.stop] for value in op.reads}
    available = frozenset(numbers.of(value) for value in reads if value in there)
    candidates = frozenset(numbers[number] for number in view.candidates)
    borders = tuple(
        (numbers.of(value), frame.relative(view.border_release(number)))
        for number, value in view.border_values(view.borders).items()
    )
    later = (
        (frame.relative(view.border_request), frame.relative(view.later.stop))
        if borders and view.later is not None
        else None
    )
    size = block.stop - block.start
    return ops, saves, unpacks, storages, available, candidates, borders, later, size


def _op(op: Op, numbers: _Numbers) -> Hashable:
    return (
        op.name,
        op.cost,
        op.rise_bytes,
        op.facts,
        tuple(numbers.of(value) for value in op.reads),
        tuple(numbers.of(value) for value in op.writes),
    )


def _storage(view: BlockGraph, number: int, frame: Frame) -> Hashable:
    storage = view.graph.storages[number]
    if number in view.own_storages:
        ends = frame.relative(storage.natural_death), frame.relative(storage.death)
        return storage.nbytes, storage.category, number in view.saved, *ends
    # Of what outlives the call it does not matter how long it lives.
    death = frame.relative(storage.death) if storage.death < view.last_release else None
    return storage.nbytes, storage.category, is_gone_in_backward(view, number), death
