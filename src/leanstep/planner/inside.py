"""Inside one block call: the sets of storages worth dropping.

A dropped storage needs certain ops to run again: those between it and the nearest values that are
there in backward anyway. Every candidate is there in backward, kept or rebuilt, so an op that reads
one asks for nothing more; only values that autograd does not save pull further ops in. So two
storages have to do with each other only where they need the same op, and a block falls into small
*parts*. The best sets of each part, by bytes and seconds, are found by trying all; the best sets of
the block are their sums. A part too large for that is cut at every price of a byte (`cut.py`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from leanstep.ir import Profile
from leanstep.planner.cut import Projects, find_projects, hull_sets
from leanstep.rebuild.block import BlockGraph
from leanstep.solvers.base import PICOSECONDS

# A block with this many candidates or fewer has all its sets simulated: nothing can be missed.
FEW_CANDIDATES = 7

# A part with more storages than this has too many sets to try them all.
LARGE_PART = 12

# More sets than this in one block cost planning time and gain next to nothing.
MOST_SETS = 56

# Sums of parts are thinned beyond this many.
MOST_SUMS = 4000

# Two sets closer than this share of the block's bytes are one.
NEAR = 0.001


@dataclass(frozen=True, slots=True)
class _Sum:
    """A set of places with what it earns and costs."""

    nbytes: int
    picoseconds: int
    chosen: frozenset[int]


def drop_sets(
    profile: Profile, view: BlockGraph, droppable: Collection[int], most: int = MOST_SETS
) -> list[frozenset[int]]:
    """The sets of storages worth dropping, from few bytes to all; without the empty set."""
    projects = find_projects(profile, view, droppable)
    everything = frozenset(range(len(projects.storages)))
    if len(everything) <= FEW_CANDIDATES:
        sets = _all_sets(projects, sorted(everything))
    else:
        sets = [_Sum(0, 0, frozenset())]
        for part in _parts(projects):
            sets = _best(_added(sets, _part_sets(projects, part)))
        sets = _thinned(sets, most)
    found = {one.chosen for one in sets} | {everything}
    ordered = sorted(found, key=lambda chosen: (projects.earned_bytes(chosen), sorted(chosen)))
    named = [frozenset(projects.storages[place] for place in chosen) for chosen in ordered]
    # What drops all it can comes last, whatever it earns.
    whole = frozenset(projects.storages)
    return [chosen for chosen in named if chosen and chosen != whole] + [whole] * bool(whole)


def _parts(projects: Projects) -> list[list[int]]:
    """The storages, put together where they need the same op or hold the same source."""
    groups: list[tuple[set[tuple[str, int]], list[int]]] = []
    for place, (ops, held) in enumerate(zip(projects.required, projects.held, strict=True)):
        needs = {("op", op) for op in ops} | {("held", source) for source in held}
        members = [place]
        for group in [group for group in groups if group[0] & needs]:
            needs |= group[0]
            members = group[1] + members
            groups.remove(group)
        groups.append((needs, members))
    return [sorted(members) for _, members in groups]


def _part_sets(projects: Projects, part: Sequence[int]) -> list[_Sum]:
    if len(part) <= LARGE_PART:
        return _best(_all_sets(projects, part))
    return [_sum(projects, chosen) for chosen in hull_sets(projects, part)]


def _all_sets(projects: Projects, part: Sequence[int]) -> list[_Sum]:
    return [
        _sum(projects, frozenset(place for bit, place in enumerate(part) if mask >> bit & 1))
        for mask in range(1 << len(part))
    ]


def _sum(projects: Projects, chosen: frozenset[int]) -> _Sum:
    seconds = projects.seconds(chosen)
    return _Sum(projects.earned_bytes(chosen), round(seconds * PICOSECONDS), chosen)


def _added(some: Sequence[_Sum], others: Sequence[_Sum]) -> list[_Sum]:
    return [
        _Sum(a.nbytes + b.nbytes, a.picoseconds + b.picoseconds, a.chosen | b.chosen)
        for a in some
        for b in others
    ]


def _best(sums: Sequence[_Sum]) -> list[_Sum]:
    """Those that no other beats in bytes and time, from few bytes to many."""
    ordered = sorted(sums, key=lambda one: (-one.nbytes, one.picoseconds, len(one.chosen)))
    best: list[_Sum] = []
    for one in ordered:
        if not best or one.picoseconds < best[-1].picoseconds:
            best.append(one)
    return _thinned(best[::-1], MOST_SUMS)


def _thinned(sums: Sequence[_Sum], most: int) -> list[_Sum]:
    """At most so many: of each narrow range of bytes the one nearest to the hull."""
    if len(sums) <= 2:
        return list(sums)
    low, high = sums[0], sums[-1]
    span = max(1, high.nbytes - low.nbytes)
    width = max(NEAR * span, span / most)
    hull = _hull_seconds(sums)
    nearest: dict[int, _Sum] = {}
    for one in sums[1:-1]:
        bucket = int((one.nbytes - low.nbytes) / width)
        other = nearest.get(bucket)
        if other is None or one.picoseconds - hull(one) < other.picoseconds - hull(other):
            nearest[bucket] = one
    middle = sorted(nearest.values(), key=lambda one: one.nbytes)[: max(0, most - 2)]
    return [low, *middle, high]


class _hull_seconds:
    """The lower convex hull of sums as a function of bytes."""

    def __init__(self, sums: Sequence[_Sum]) -> None:
        self.corners: list[_Sum] = []
        for one in sums:
            while len(self.corners) > 1 and self._is_above(self.corners[-2], one):
                self.corners.pop()
            self.corners.append(one)

    def _is_above(self, before: _Sum, after: _Sum) -> bool:
        corner = self.corners[-1]
        rise = (after.picoseconds - before.picoseconds) * (corner.nbytes - before.nbytes)
        return (corner.picoseconds - before.picoseconds) * (after.nbytes - before.nbytes) >= rise

    def __call__(self, one: _Sum) -> float:
        """The least time that mixing corners takes for as many bytes."""
        for low, high in zip(self.corners, self.corners[1:], strict=False):
            if low.nbytes <= one.nbytes <= high.nbytes and low.nbytes < high.nbytes:
                share = (one.nbytes - low.nbytes) / (high.nbytes - low.nbytes)
                return low.picoseconds + share * (high.picoseconds - low.picoseconds)
        return float(one.picoseconds)
