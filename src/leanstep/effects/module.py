"""What it does to the step when a whole block runs again."""

from leanstep.effects.base import Effect, Replay, Shift, outside_reads, state_bytes
from leanstep.ir import Category, Value
from leanstep.ir.graph import Fact, Op
from leanstep.rebuild.block import BlockGraph
from leanstep.rebuild.rerun import STATISTICS_ARE_OPTIONAL

# A call with such an op may read and write other buffers than the recorded one.
_VARIES = frozenset((Fact.HOST_READ, Fact.DYNAMIC_SHAPE))


def module_effect(view: BlockGraph) -> Effect:
    """What it does to the step when a whole block runs again at its first request."""
    graph, block = view.graph, view.block
    if not view.saves:
        return Effect()
    first = min(
        (unpack.position for unpack in view.unpacks),
        default=len(graph.ops),
    )
    # Checkpointing stops early: nothing after the last save runs again.
    last = max(save.position for save in view.saves)
    shifts = _module_shifts(view, first, last)
    held = {save.value.storage for save in view.saves}
    level, steps = 0, []
    for index in range(block.start, last):
        op = graph.ops[index]
        steps.append((index, level, level + op.rise_bytes))
        level += sum(graph.storages[s].nbytes for s in graph.births(index))
        level -= _natural_ends(view, index, held)
    # What was neither saved nor dead when the run stops goes with its frames.
    end = sum(
        graph.storages[s].nbytes for s in held if block.start <= graph.storages[s].birth < last
    )
    copies = _written_bytes(view, statistics=True) + 2 * state_bytes(graph)
    return Effect(
        shifts,
        tuple(
            Replay(index, first, live - end + copies, peak - end + copies)
            for index, live, peak in steps
        ),
    )


def _module_shifts(view: BlockGraph, first: int, last: int) -> tuple[Shift, ...]:
    graph, block = view.graph, view.block
    release: dict[int, int] = {}
    for save in view.saves:
        release[save.value.storage] = max(release.get(save.value.storage, 0), save.release)
    shifts = []
    for number, until in release.items():
        storage = graph.storages[number]
        if number in view.own_storages:
            if number in view.saved:
                early, late = storage.natural_death + 1, storage.death + 1
                shifts.append(Shift(early, late, -storage.nbytes, storage.category, number))
            shifts.append(Shift(first, until, storage.nbytes, storage.category, number))
    ends = max(release.values())
    shifts.append(Shift(block.start, ends, state_bytes(graph), Category.GENERATOR))
    copies = _written_bytes(view, statistics=False)
    shifts.append(Shift(block.start, ends, copies, Category.TEMPORARY))
    for number in outside_reads(view):
        storage = graph.storages[number]
        held = Shift(storage.death + 1, ends, storage.nbytes, storage.category, number)
        shifts.append(held)
    return tuple(shift for shift in shifts if shift.start < shift.stop and shift.nbytes)


def _natural_ends(view: BlockGraph, index: int, held: set[int]) -> int:
    """The bytes that go after an op of the second run, had autograd held nothing of them."""
    storages = view.graph.storages
    return sum(
        storages[number].nbytes
        for number in view.own_storages
        if number not in held and storages[number].natural_death == index
    )


def _written_bytes(view: BlockGraph, *, statistics: bool) -> int:
    """The copies of the buffers that forward writes.

    To put back after a second run, with the statistics of batch norm; and to start it from, without
    those that nothing reads.
    """
    ops = view.graph.ops[view.block.start : view.block.stop]
    statistics = statistics or any(_VARIES.intersection(op.facts) for op in ops)
    read = {value.storage for op in ops for value in op.reads if not _is_statistic(op, value)}
    written = {
        value.storage
        for op in ops
        for value in op.writes
        if view.graph.storages[value.storage].category is Category.BUFFER
        if statistics or value.storage in read or not _is_statistic(op, value)
    }
    return sum(view.graph.storages[number].nbytes for number in written)


def _is_statistic(op: Op, value: Value) -> bool:
    """Whether an op writes a storage that does not change what else it computes."""
    is_written = any(written.storage == value.storage for written in op.writes)
    return is_written and op.name in STATISTICS_ARE_OPTIONAL
