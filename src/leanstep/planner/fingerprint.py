"""What makes two block calls equal for planning: solve one, copy the answer to the others.

Storages are numbered by their first appearance in the call, ops count from its start. Everything
that the search inside a block reads is in the fingerprint, so equal fingerprints have equal
answers. What a decision does to the whole step is still computed for each call: the positions in
backward differ.
"""

from collections.abc import Hashable

from leanstep.blockgraph import BlockGraph
from leanstep.ir import Op, Value
from leanstep.planner.cut import is_gone_in_backward


class _Numbers(dict[int, tuple[int, int]]):
    """Number storages by first appearance, and their versions from the first one seen.

    The random generator is a storage too, and reaches each call in a later version.
    """

    def of(self, value: Value) -> tuple[int, int]:
        """The number of a value's storage, and its version relative to the first one seen."""
        number, first = self.setdefault(value.storage, (len(self), value.version))
        return number, value.version - first


def fingerprint(view: BlockGraph) -> Hashable:
    """Return a key that equal block calls share."""
    numbers = _Numbers()
    graph, block = view.graph, view.block
    ops = tuple(_op(op, numbers) for op in graph.ops[block.start : block.stop])
    saves = tuple(numbers.of(save.value) for save in view.saves)
    storages = tuple(_storage(view, number) for number in numbers)
    there = view.available(())
    reads = {value for op in graph.ops[block.start : block.stop] for value in op.reads}
    available = frozenset(numbers.of(value) for value in reads if value in there)
    return ops, saves, storages, available


def _op(op: Op, numbers: _Numbers) -> Hashable:
    return (
        op.name,
        op.cost,
        op.rise_bytes,
        op.facts,
        tuple(numbers.of(value) for value in op.reads),
        tuple(numbers.of(value) for value in op.writes),
    )


def _storage(view: BlockGraph, number: int) -> Hashable:
    storage = view.graph.storages[number]
    if number in view.own_storages:
        is_saved = number in view.saved
        return storage.nbytes, is_saved, is_saved and storage.natural_death < storage.death
    return storage.nbytes, is_gone_in_backward(view, number)
