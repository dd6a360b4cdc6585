"""Which sets of values are worth keeping: torch's own choices, and minimum cuts of ours.

At a price per byte kept, every forward node that backward needs is either kept, for its bytes, or
computed again, for its seconds, and then all that it reads is needed too. The cheapest way is a
minimum cut. A node is two vertices: *there* (backward has it) and *again* (backward computes it);
the side of the sink means yes.

    source -> again   seconds          computed again
    again -> there    price × bytes    there, but not computed again: kept
    input -> again    infinite         what it reads must be there
    there -> sink     infinite         backward reads it
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from leanstep.engines.joint import JointGraph, base_of, is_tensor
from leanstep.forms.costs import node_bytes
from leanstep.torch_private.compiler import kept_by_torch

# What users set `activation_memory_budget` to.
BUDGETS = (0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)

# Those that are compiled before any cut of ours: a plan can then be no worse than these settings,
# as far as their bits are right.
FIRM_BUDGETS = (0.5, 0.2)

NUM_PRICES = 32

# Of the largest value: what is no larger is kept without a thought, statistics above all.
TINY_SHARE = 1 / 64
# Of all values: where many small ones come to more than this, the rest of them are not tiny.
TINY_TOGETHER = 1 / 16

# SciPy's flow has 32-bit capacities: everything finite together stays below the infinite one.
INFINITE = 2**30
FINITE_TOTAL = 2**29


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of names to keep, what it is expected to hold and to cost, and `whole` as in `Form`."""

    name: str
    kept: tuple[str, ...]
    nbytes: int
    seconds: float
    is_firm: bool = False
    whole: tuple[str, ...] = ()


def unplanned(joint: JointGraph) -> Candidate:
    """Torch's own choice."""
    kept, _ = joint.closed(_torchs(joint, 1.0))
    return Candidate("torch's choice", kept, kept_bytes(joint, kept), 0.0)


def candidates(
    joint: JointGraph, seconds: Mapping[Any, float], first: Candidate, most: int
) -> list[Candidate]:
    """The sets worth compiling beside the first, of which backward computes the rest again."""
    found: dict[tuple[str, ...], Candidate] = {}

    def add(name: str, kept: Sequence[str], *, is_firm: bool = False) -> None:
        names, again = joint.closed(kept)
        nbytes = kept_bytes(joint, names)
        spent = sum(seconds.get(node, 0.0) for node in again)
        known = found.get(names)
        if known is None or (is_firm and not known.is_firm):
            title = name if known is None else known.name
            found[names] = Candidate(title, names, nbytes, spent, is_firm)

    add("seeds kept", seeds_kept(joint))
    for budget in BUDGETS:
        try:
            kept = _torchs(joint, budget)
        except RuntimeError:
            # Torch's search raises where it finds no cut: then nobody can have that setting.
            continue
        add(f"torch's at budget {budget}", kept, is_firm=budget in FIRM_BUDGETS)
    for number, kept in enumerate(_cuts(joint, seconds, joint.needed)):
        add(f"cut {number}", kept)
    return _spread(first, list(found.values()), most)


def candidates_apart(
    joint: JointGraph, seconds: Mapping[Any, float], first: Candidate, most: int
) -> list[Candidate]:
    """Smaller sets of what a form hands over, the rest to be rebuilt apart.

    What is rebuilt is written: `seconds` counts that, but not what a launch takes. So what is tiny
    (statistics, casts of weights) is dropped in the smallest set alone.
    """
    handed = [joint.by_name[name] for name in first.kept]
    tiny = _tiny(handed)
    cuts = [set(cut) for cut in _cuts(joint, seconds, handed, set(handed))]
    least = min(cuts, key=lambda cut: kept_bytes(joint, tuple(cut)), default=set())
    found: dict[tuple[str, ...], Candidate] = {}
    for number, cut in enumerate(cuts):
        names = cut if cut == least else cut | tiny
        kept = tuple(name for name in first.kept if name in names)
        again = joint.made_of(kept, handed)
        if kept != first.kept and kept not in found:
            spent = sum(seconds.get(node, 0.0) for node in again)
            nbytes = kept_bytes(joint, kept)
            found[kept] = Candidate(f"apart {number}", kept, nbytes, spent, whole=first.kept)
    return _spread(first, list(found.values()), most)


def _tiny(nodes: Sequence[Any]) -> set[str]:
    """The names of those that are small beside the largest, and together beside all."""
    tiny_bytes = max(map(node_bytes, nodes), default=0) * TINY_SHARE
    left_bytes = sum(map(node_bytes, nodes)) * TINY_TOGETHER
    found = set[str]()
    for node in sorted(nodes, key=node_bytes):
        left_bytes -= node_bytes(node)
        if node_bytes(node) > tiny_bytes or left_bytes < 0:
            break
        found.add(node.name)
    return found


def with_seeds(joint: JointGraph, first: Candidate) -> Candidate:
    """The same set and all seeds, from which whatever was drawn can be drawn again."""
    seeds = (name for name in joint.seeds if name not in first.kept)
    return replace(first, kept=(*seeds, *first.kept)) if first.kept else first


def seeds_kept(joint: JointGraph) -> tuple[str, ...]:
    """Torch's own choice, but for random numbers: their seeds are kept instead.

    They are drawn again inside kernels that run anyway, and a value that is dropped and was made
    with them can be made again.
    """
    drawn = set[Any]()
    for node in joint.forward:
        sources = set(node.all_input_nodes)
        is_seed = node in joint.fixed and not sources
        if is_seed or (sources and sources <= drawn and node not in joint.fixed):
            drawn.add(node)
    names = (name for name in _torchs(joint, 1.0) if joint.by_name[name] not in drawn)
    kept, _ = joint.closed(tuple(names))
    return kept


def _torchs(joint: JointGraph, budget: float) -> tuple[str, ...]:
    names = kept_by_torch(joint.joint, joint.num_outputs, joint.static, budget)
    return tuple(name for name in names if name in joint.by_name)


def kept_bytes(joint: JointGraph, names: Sequence[str]) -> int:
    """The bytes of the storages that keeping some nodes keeps."""
    bases = {base_of(joint.by_name[name]) for name in names}
    return sum(node_bytes(base) for base in bases if base.op != "placeholder")


def _spread(first: Candidate, others: Sequence[Candidate], most: int) -> list[Candidate]:
    """The firm ones, and of the rest those on the lower hull, spread over the bytes.

    Who keeps more than the first is of no use: no budget is above the unplanned peak.
    """
    others = [one for one in others if one.nbytes < first.nbytes]
    firm = [one for one in others if one.is_firm]
    rest = [one for one in _undominated([first, *others]) if not one.is_firm and one is not first]
    room = max(0, most - len(firm))
    while len(rest) > room:
        # Of the two nearest neighbours the one goes that lies between closer ones.
        rest.sort(key=lambda one: one.nbytes)
        line = [0, *(one.nbytes for one in rest), first.nbytes]
        gaps = [line[i + 2] - line[i] for i in range(len(rest))]
        # The least one can keep stays.
        places = range(1, len(rest)) if len(rest) > 1 else range(1)
        rest.pop(min(places, key=lambda place: gaps[place]))
    return sorted((*firm, *rest), key=lambda one: -one.nbytes)


def _undominated(every: Sequence[Candidate]) -> list[Candidate]:
    ordered = sorted(every, key=lambda one: (one.nbytes, one.seconds))
    best: list[Candidate] = []
    for one in ordered:
        if not best or one.seconds < best[-1].seconds:
            best.append(one)
    return best


def _cuts(
    joint: JointGraph,
    seconds: Mapping[Any, float],
    needed: Sequence[Any],
    keepable: Collection[Any] | None = None,
) -> Iterator[tuple[str, ...]]:
    """The best sets at rising prices per byte, from next to nothing to more than anything costs."""
    nodes = [node for node in joint.forward if node.op != "placeholder"]
    total_bytes = sum(map(node_bytes, nodes)) or 1
    dearest = max((seconds.get(node, 0.0) for node in nodes), default=0.0) or 1.0
    cheapest = 1e-3 * sum(seconds.get(node, 0.0) for node in nodes) / total_bytes
    smallest = min((node_bytes(node) for node in nodes if node_bytes(node) > 4096), default=1)
    for price in np.geomspace(max(cheapest, 1e-18), max(dearest / smallest, 1e-15), NUM_PRICES):
        costs = {
            node: price * node_bytes(node)
            for node in (nodes if keepable is None else keepable)
            if is_tensor(node)
        }
        yield _cut(joint, nodes, seconds, costs, needed)


def _cut(
    joint: JointGraph,
    nodes: Sequence[Any],
    seconds: Mapping[Any, float],
    costs: Mapping[Any, float],
    needed: Sequence[Any],
) -> tuple[str, ...]:
    """The cheapest set: `costs` is what keeping a node costs, of those that can be kept."""
    place = {node: number for number, node in enumerate(nodes)}
    source, sink = 2 * len(nodes), 2 * len(nodes) + 1
    edges: list[tuple[int, int, float]] = []
    for node, number in place.items():
        there, again = 2 * number, 2 * number + 1
        edges.append((source, again, np.inf if node in joint.fixed else seconds.get(node, 0.0)))
        edges.append((again, there, costs.get(node, np.inf)))
        edges.extend((2 * place[i], again, np.inf) for i in node.all_input_nodes if i in place)
    edges.extend((2 * place[node], sink, np.inf) for node in needed if node in place)
    is_source_side = _source_side(edges, source, sink)
    return tuple(
        node.name
        for node, number in place.items()
        if not is_source_side[2 * number] and is_source_side[2 * number + 1]
    )


def _source_side(edges: Sequence[tuple[int, int, float]], source: int, sink: int) -> list[bool]:
    """Which vertices a minimum cut leaves with the source."""
    tails, heads, costs = zip(*edges, strict=True)
    network: csr_array[np.int32, tuple[int, int]] = csr_array(
        (_whole_numbers(np.array(costs)), (np.array(tails), np.array(heads))),
        shape=(sink + 1, sink + 1),
    )
    residual = csr_array(network - maximum_flow(network, source, sink).flow)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
    return [vertex in reached for vertex in range(sink + 1)]


def _whole_numbers(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    is_finite = np.isfinite(costs)
    scale = FINITE_TOTAL / max(float(costs[is_finite].sum()), 1e-30)
    whole = np.maximum(1, np.round(np.where(is_finite, costs, 0.0) * scale))
    return np.where(is_finite, whole, INFINITE).astype(np.int32)
