"""Which storages are worth dropping at every price of a byte: minimum cuts.

At a price per byte, the best set to drop is a project selection: each storage earns its bytes, each
op costs its seconds once, a storage requires its ops. That is a minimum cut (Picard 1976), and the
sets for rising prices grow. The prices that matter are found by halving from the two ends: drop
nothing, drop all. Between two neighbours on that hull, storages are added one by one, cheapest
first.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from leanstep.ir import Profile
from leanstep.rebuild.block import BlockGraph

# SciPy's flow has 32-bit capacities: everything finite together stays below the infinite one.
INFINITE = 2**30
FINITE_TOTAL = 2**29

# More sets than this in one block cost planning time and gain next to nothing.
MOST_HULL_SETS = 14
MOST_SETS = 24


@dataclass(frozen=True, slots=True)
class Projects:
    """The storages that can be dropped: what each earns and requires.

    `required[i]` are places in `op_seconds` (an op that has a cheap replay is two: the replay, and
    what running the op itself costs beyond it) and `held[i]` places in `held_bytes`: what lives on
    for a replay though it would be gone, such as a block input that autograd did not save.
    """

    storages: tuple[int, ...]
    freed_bytes: tuple[int, ...]
    required: tuple[frozenset[int], ...]
    held: tuple[frozenset[int], ...]
    op_seconds: tuple[float, ...]
    held_bytes: tuple[int, ...]

    def seconds(self, chosen: Collection[int]) -> float:
        """The time of all ops that some projects require."""
        ops = frozenset[int]().union(*(self.required[place] for place in chosen))
        return sum(self.op_seconds[op] for op in ops)

    def ops(self, place: int) -> dict[int, float]:
        """The ops that one project requires, with the seconds of each."""
        return {op: self.op_seconds[op] for op in sorted(self.required[place])}

    def earned_bytes(self, chosen: Collection[int]) -> int:
        """The bytes that some projects free, less what must be held for them."""
        held = frozenset[int]().union(*(self.held[place] for place in chosen))
        freed = sum(self.freed_bytes[place] for place in chosen)
        return freed - sum(self.held_bytes[source] for source in held)


def hull_sets(projects: Projects, part: Sequence[int]) -> list[frozenset[int]]:
    """The sets of places worth dropping among some, from none to all."""
    alone = _only(projects, part)
    nothing, everything = frozenset[int](), frozenset(range(len(part)))
    chain = [nothing, *_between(alone, nothing, everything, MOST_HULL_SETS), everything]
    return [frozenset(part[place] for place in chosen) for chosen in _filled(alone, chain)]


def _only(projects: Projects, part: Sequence[int]) -> Projects:
    return replace(
        projects,
        storages=tuple(projects.storages[place] for place in part),
        freed_bytes=tuple(projects.freed_bytes[place] for place in part),
        required=tuple(projects.required[place] for place in part),
        held=tuple(projects.held[place] for place in part),
    )


def find_projects(profile: Profile, view: BlockGraph, droppable: Collection[int]) -> Projects:
    """Find what dropping each storage earns and requires."""
    storages = tuple(sorted(droppable))
    least = profile.launch_seconds
    recipes = {op.index: max(view.recipes[op.index].seconds, least) for op in view.cheap_reruns}
    ops: dict[tuple[int, bool], int] = {}
    sources: dict[int, int] = {}
    required, held = [], []
    for storage in storages:
        program = view.alone(storage)
        parts = {(index, False) for index in program.reruns}
        parts |= {
            (i, True) for i, op in program.reruns.items() if i in recipes and not op.is_recipe
        }
        required.append(frozenset(ops.setdefault(part, len(ops)) for part in sorted(parts)))
        reads = {value.storage for value in program.all_sources}
        gone = (number for number in sorted(reads) if is_gone_in_backward(view, number))
        held.append(frozenset(sources.setdefault(number, len(sources)) for number in gone))
    graph = view.graph
    return Projects(
        storages=storages,
        freed_bytes=tuple(_freed_bytes(view, number) for number in storages),
        required=tuple(required),
        held=tuple(held),
        op_seconds=tuple(
            max(profile.seconds(index), least) - recipes[index]
            if is_rest
            else recipes.get(index, max(profile.seconds(index), least))
            for index, is_rest in ops
        ),
        held_bytes=tuple(graph.storages[number].nbytes for number in sources),
    )


def _freed_bytes(view: BlockGraph, number: int) -> int:
    storage = view.graph.storages[number]
    return storage.nbytes if storage.natural_death < storage.death else 0


def is_gone_in_backward(view: BlockGraph, number: int) -> bool:
    """Whether a storage from outside would be gone when backward comes to the call."""
    if number in view.own_storages:
        return False
    return view.graph.storages[number].death < view.first_release


def _between(
    projects: Projects, low: frozenset[int], high: frozenset[int], most: int
) -> list[frozenset[int]]:
    """The sets on the hull strictly between two of its sets, in order."""
    bytes_apart = projects.earned_bytes(high) - projects.earned_bytes(low)
    seconds_apart = projects.seconds(high) - projects.seconds(low)
    if most <= 0 or bytes_apart <= 0 or seconds_apart <= 0:
        return []
    price = seconds_apart / bytes_apart
    middle = _best_at(projects, price)

    def profit(chosen: frozenset[int]) -> float:
        return price * projects.earned_bytes(chosen) - projects.seconds(chosen)

    if profit(middle) <= profit(low) + 1e-6 * seconds_apart:
        return []
    below = _between(projects, low, middle, most // 2)
    return [*below, middle, *_between(projects, middle, high, most - 1 - len(below))]


def _best_at(projects: Projects, price: float) -> frozenset[int]:
    """The set that earns most at a price per byte: the source side of the minimum cut."""
    network = _network(projects, price)
    sink = network.shape[0] - 1
    residual = csr_array(network - maximum_flow(network, 0, sink).flow)
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, 0, return_predecessors=False).tolist())
    return frozenset(place for place in range(len(projects.storages)) if place + 1 in reached)


def _network(projects: Projects, price: float) -> csr_array[np.int32, tuple[int, int]]:
    """Nodes: the source, a node a storage, an op, a held source, and the sink."""
    num_storages, num_ops = len(projects.storages), len(projects.op_seconds)
    first_op, first_held = 1 + num_storages, 1 + num_storages + num_ops
    sink = first_held + len(projects.held_bytes)
    arcs: list[tuple[int, int, float]] = []
    for place, nbytes in enumerate(projects.freed_bytes):
        arcs.append((0, 1 + place, price * nbytes))
        arcs.extend((1 + place, first_op + op, np.inf) for op in projects.required[place])
        arcs.extend((1 + place, first_held + held, np.inf) for held in projects.held[place])
    arcs.extend((first_op + op, sink, cost) for op, cost in enumerate(projects.op_seconds))
    arcs.extend((first_held + h, sink, price * n) for h, n in enumerate(projects.held_bytes))
    tails, heads = np.array([arc[:2] for arc in arcs], dtype=np.int32).T
    capacities = _whole_numbers(np.array([cost for _, _, cost in arcs]))
    return csr_array((capacities, (tails, heads)), shape=(sink + 1, sink + 1))


def _whole_numbers(costs: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    finite = np.isfinite(costs)
    scale = FINITE_TOTAL / max(costs[finite].sum(), 1e-30)
    scaled = np.where(finite, np.round(np.where(finite, costs, 0.0) * scale), INFINITE)
    return scaled.astype(np.int32)


def _filled(projects: Projects, chain: list[frozenset[int]]) -> list[frozenset[int]]:
    """Add the sets between neighbours: one storage more each time, the cheapest per byte first."""
    sets = [chain[0]]
    room = MOST_SETS - len(chain)
    for low, high in itertools.pairwise(chain):
        current = low
        missing = set(high - low)
        while len(missing) > 1 and room > 0:
            current = min(
                (current | {place} for place in sorted(missing)),
                key=lambda chosen: _seconds_per_byte(projects, low, chosen),
            )
            missing -= current
            sets.append(current)
            room -= 1
        sets.append(high)
    return sets


def _seconds_per_byte(projects: Projects, low: frozenset[int], chosen: frozenset[int]) -> float:
    earned = projects.earned_bytes(chosen) - projects.earned_bytes(low)
    return (projects.seconds(chosen) - projects.seconds(low)) / max(earned, 1e-9)
