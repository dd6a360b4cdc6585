"""Less than torch's own choice at hardly a price: what pointwise steps make of the rest.

A GELU's output beside its input, a normalized value beside its statistics: Inductor computes them
again inside kernels of backward that run anyway. Products and sums stay what they were, and so, as
a rule, do all bits.
"""

from collections.abc import Sequence
from typing import Any

from leanstep.engines.joint import JointGraph, is_draw, is_tensor, is_view
from leanstep.forms.costs import is_own_kernel, is_reduction, node_bytes
from leanstep.forms.cuts import TINY_SHARE, Candidate, kept_bytes


def pointwise_again(joint: JointGraph, first: Candidate) -> list[Candidate]:
    """Smaller sets than the first, the smallest before the others.

    First without all that can go; then with what is made of statistics, such as normalized values,
    which join kernels that sum and may change these.
    """
    found: dict[tuple[str, ...], Candidate] = {}
    for name, of_statistics in (("pointwise again", True), ("pointwise of products again", False)):
        names = _Maker(joint, first.kept, of_statistics).left()
        kept, _ = joint.closed(names)
        nbytes = kept_bytes(joint, kept)
        if nbytes < first.nbytes:
            found.setdefault(kept, Candidate(name, kept, nbytes, 0.0))
    return list(found.values())


class _Maker:
    """What pointwise steps make of what is kept and of inputs that are held anyway."""

    def __init__(self, joint: JointGraph, kept: Sequence[str], of_statistics: bool) -> None:
        self._kept, self._of_statistics = kept, of_statistics
        self._by_name, self._fixed = joint.by_name, joint.fixed
        inputs = [node for node in joint.nodes if node.op == "placeholder"]
        self._parameters = {inputs[place] for place in joint.static}
        _, again = joint.closed(kept)
        readers = [*again, *joint.backward]
        self._held = {source for node in readers for source in node.all_input_nodes}
        self._tiny_bytes = max((node_bytes(self._by_name[n]) for n in kept), default=0) * TINY_SHARE
        # What each node is made of, or None where it takes more than pointwise steps. In the order
        # of the graph: who asked a node for its sources' sources would be lost in a long chain.
        self._sources: dict[Any, set[Any] | None] = {}
        for node in joint.forward:
            self._sources[node] = self._found_sources(node)

    def left(self) -> list[str]:
        """The names to keep: what cannot be made, and the statistics that the rest is made of."""
        sources = {name: self._sources_of_kept(self._by_name[name]) for name in self._kept}
        stay = [name for name, found in sources.items() if found is None]
        used = {node for found in sources.values() if found for node in found}
        tiny = [node.name for node in used if node.op != "placeholder" and self._is_tiny(node)]
        return [*stay, *tiny]

    def _sources_of_kept(self, node: Any) -> set[Any] | None:
        """What is made of parameters alone stays: it is small, and nobody else reads these."""
        sources = self._sources[node]
        if sources is None or sources <= self._parameters or self._is_tiny(node):
            return None
        statistics = {n for n in sources if n not in self._parameters and self._is_tiny(n)}
        return sources if self._of_statistics or not statistics else None

    def _found_sources(self, node: Any) -> set[Any] | None:
        if not self._is_pointwise(node):
            return None
        found = set[Any]()
        for source in node.all_input_nodes:
            if self._is_there(source):
                found.add(source)
            elif (more := self._sources[source]) is not None:
                found |= more
            elif is_tensor(source) and self._is_tiny(source):
                found.add(source)
            else:
                return None
        return found

    def _is_there(self, node: Any) -> bool:
        if node.op == "placeholder":
            return node in self._parameters or node in self._held
        return node.name in self._kept

    def _is_tiny(self, node: Any) -> bool:
        return node_bytes(node) <= self._tiny_bytes

    def _is_pointwise(self, node: Any) -> bool:
        if node.op != "call_function" or node in self._fixed or is_draw(node):
            return False
        return is_view(node) or not (is_own_kernel(node) or is_reduction(node))
