"""Blocks read off a recorded step: the saves of some calls, and children of a Sequential as one.

Consecutive blocks can run as one block where they are neighbours in one call of a Sequential: an
engine then calls the children in turn and treats them as a single module.
"""

import itertools
from collections.abc import Sequence

from leanstep.errors import GraphError
from leanstep.ir.decision import Decision
from leanstep.ir.graph import Block, Graph


def saves_in(graph: Graph, roots: set[int]) -> tuple[int, ...]:
    """The saves made in some module calls and in those inside them."""
    inside = set(roots)
    for index, call in enumerate(graph.calls):
        if call.parent in inside:
            inside.add(index)
    return tuple(index for index, save in enumerate(graph.saves) if save.call in inside)


def find_block(graph: Graph, blocks: Sequence[Block], decision: Decision) -> Block:
    """The block that a decision is about: a listed one, or children of a Sequential made one."""
    wanted = (decision.path, decision.occurrence, decision.children)
    for block in blocks:
        if (block.path, block.occurrence, block.children) == wanted:
            return block
    names = Sequentials(graph)
    parent = names.call_of(decision.path, decision.occurrence)
    children = names.children_of(parent) if parent is not None else {}
    if parent is None or not decision.children or not set(decision.children) <= set(children):
        raise GraphError(f"the step has no block {decision.path!r}{list(decision.children)}")
    return names.stretch(parent, [children[name] for name in decision.children])


class Sequentials:
    """The calls of a step by path, and the children of each call of a Sequential by name."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._calls = {
            (call.path, call.occurrence): index
            for index, call in enumerate(graph.calls)
            if call.occurrence >= 0
        }
        self._inside: dict[int, list[int]] = {}
        for index, call in enumerate(graph.calls):
            self._inside.setdefault(call.parent, []).append(index)

    def call_of(self, path: str, occurrence: int) -> int | None:
        """The number of a module's call."""
        return self._calls.get((path, occurrence))

    def children_of(self, parent: int) -> dict[str, int]:
        """The calls of a Sequential's children by name; empty where their names do not tell."""
        call = self.graph.calls[parent]
        if call.class_name != "Sequential":
            return {}
        prefix = f"{call.path}." if call.path else ""
        found: dict[str, int] = {}
        for index in self._inside.get(parent, []):
            path = self.graph.calls[index].path
            name = path.removeprefix(prefix)
            # A layer that stands in several Sequentials has the path of the first.
            if not path.startswith(prefix) or "." in name or name in found:
                return {}
            found[name] = index
        return found

    def is_called_once(self, index: int) -> bool:
        """Whether a call is the only one of its module that counts."""
        call = self.graph.calls[index]
        return call.occurrence == 0 and (call.path, 1) not in self._calls

    def place_of(self, block: Block) -> tuple[int, list[int]] | None:
        """The call of the Sequential that a block lies in, and the calls it is made of.

        None where it does not lie in one, or where a module is called more than once: an engine
        could not tell which of its calls is meant.
        """
        own = self.call_of(block.path, block.occurrence)
        if own is None:
            return None
        parent = own if block.children else self.graph.calls[own].parent
        if parent < 0 or not self.is_called_once(parent):
            return None
        children = self.children_of(parent)
        calls = [children[name] for name in block.children if name in children]
        if not block.children and own in children.values():
            calls = [own]
        if not calls or len(calls) != max(1, len(block.children)):
            return None
        return (parent, calls) if all(map(self.is_called_once, calls)) else None

    def join(self, blocks: Sequence[Block]) -> Block | None:
        """Consecutive blocks as one; None where no engine could run them so."""
        places = [self.place_of(block) for block in blocks]
        parents = {place[0] for place in places if place is not None}
        if None in places or len(parents) != 1:
            return None
        if any(a.stop != b.start for a, b in itertools.pairwise(blocks)):
            return None
        (parent,) = parents
        calls = [index for place in places if place is not None for index in place[1]]
        between = self._inside[parent]
        return self.stretch(parent, between[between.index(calls[0]) : between.index(calls[-1]) + 1])

    def stretch(self, parent: int, calls: Sequence[int]) -> Block:
        """Some consecutive children of a Sequential as one block."""
        graph = self.graph
        return Block(
            path=graph.calls[parent].path,
            class_name="Sequential",
            occurrence=graph.calls[parent].occurrence,
            start=graph.calls[calls[0]].start,
            stop=graph.calls[calls[-1]].stop,
            saves=saves_in(graph, set(calls)),
            children=tuple(graph.calls[index].path.rpartition(".")[2] for index in calls),
        )
