"""The exact answer on a chain, by a Pareto-list dynamic program.

A state at a place of the path is (bytes freed so far in each era, time so far). Everything that
comes later asks only for enough freed bytes, so a state that frees no more and takes no less time
than another can go: no answer is lost. A state also goes when what it freed cannot suffice for the
rest, or when its moves and the cheapest way on, with bytes priced, cost more than a plan that is
already known. Freed bytes above what the rest can ever need count as equal, so equal blocks merge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leanstep.solvers.base import Bytes, Problem
from leanstep.solvers.moves import NEVER, Chain, Moves
from leanstep.solvers.relaxation import Relaxation, relax

# The first, thinned walks keep so many states a call, until one is this near to the bound. The
# nearer, the fewer states the exact walk has to keep.
THINNED_STATES = (200, 1500, 1500, 1500, 1500, 1500)
NEAR = 0.001

# Questions for a lower peak at the same time: each is a walk. On a large step with many plans of
# equal time the peak may then be a little above the lowest of them.
MOST_QUESTIONS = 3
SMALL_MOVES = 400
MOST_QUESTIONS_SMALL = 64

# An exact walk that would keep more states than this is given up: minutes instead of seconds.
MOST_STATES = 200_000

# States compared with each other at once.
CHUNK = 256

Path = tuple[int, ...]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Found:
    """A path, and a proved lower bound for the time of every path that fits."""

    path: Path
    bound_picoseconds: float


def fastest(problem: Problem, chain: Chain, budget_bytes: int) -> Found | None:
    """The path with the least time, and of those the lowest peak; None if none fits."""
    relaxation = relax(problem, chain, budget_bytes)
    if relaxation is None or not can_fit(chain, budget_bytes):
        return None
    thinned = _thinned_path(chain, budget_bytes, relaxation)
    limit = None if thinned is None else picoseconds(chain, thinned)
    try:
        best = _Walk(chain, budget_bytes, relaxation, limit=limit).path()
        if best is None:
            return None
        lowest = _lowered(chain, best, relaxation)
        return Found(lowest, picoseconds(chain, lowest))
    except _TooManyError:
        return None if thinned is None else Found(thinned, relaxation.bound_picoseconds)


def _thinned_path(chain: Chain, budget_bytes: int, relaxation: Relaxation) -> Path | None:
    """A path near the optimum."""
    best: Path | None = None
    for most_states in THINNED_STATES:
        limit = None if best is None else picoseconds(chain, best)
        path = _Walk(chain, budget_bytes, relaxation, limit=limit, most_states=most_states).path()
        is_better = path is not None and (best is None or _is_faster(chain, path, best))
        if not is_better and best is not None:
            break
        best = path
        near = (1 + NEAR) * relaxation.bound_picoseconds + 1
        if best is not None and picoseconds(chain, best) <= near:
            break
    return best


def _is_faster(chain: Chain, path: Path, other: Path) -> bool:
    return picoseconds(chain, path) < picoseconds(chain, other)


def can_fit(chain: Chain, budget_bytes: int) -> bool:
    """Whether any path fits."""
    return _Walk(chain, budget_bytes, None, is_timed=False).path() is not None


def lowest_peak_bytes(chain: Chain) -> int:
    """The lowest level that any path reaches."""
    low, high = 0, chain.peak_bytes([0] * len(chain.moves))
    while low < high:
        middle = (low + high) // 2
        if can_fit(chain, middle):
            high = middle
        else:
            low = middle + 1
    return low


def picoseconds(chain: Chain, path: Sequence[int]) -> int:
    """The time of a path."""
    return sum(choice.picoseconds for _, choice in chain.picks(path))


def _lowered(chain: Chain, best: Path, relaxation: Relaxation) -> Path:
    """The path with the lowest peak that takes no more time."""
    limit, low, high = picoseconds(chain, best), 0, chain.peak_bytes(best)
    is_small = sum(len(moves.stops) for moves in chain.moves) <= SMALL_MOVES
    asked = high - 1
    for _ in range(MOST_QUESTIONS_SMALL if is_small else MOST_QUESTIONS):
        if low >= high:
            break
        # The prices were found for a larger budget: their bound holds for less as well.
        lower = _Walk(chain, asked, relaxation, limit=limit).path()
        if lower is None:
            low = asked + 1
        else:
            best, high = lower, chain.peak_bytes(lower)
        # Mostly nothing lower is as fast: the first question settles it.
        asked = (low + high) // 2
    return best


class _TooManyError(Exception):
    """There are more states than an exact walk may keep."""


@dataclass(frozen=True, slots=True)
class _States:
    """Some states; `parent` at place `came_from` and `move` lead back to how each was reached.

    `freed` has a row an era and a column a state; `cost` is what its moves cost at the prices.
    """

    freed: Bytes
    time: Bytes
    cost: Floats
    came_from: Bytes
    parent: Bytes
    move: Bytes
    kind: Bytes

    def at(self, chosen: npt.NDArray[np.intp] | Flags) -> "_States":
        return _States(
            self.freed[:, chosen],
            self.time[chosen],
            self.cost[chosen],
            self.came_from[chosen],
            self.parent[chosen],
            self.move[chosen],
            self.kind[chosen],
        )


def _joined(parts: Sequence[_States]) -> _States:
    return _States(
        np.concatenate([part.freed for part in parts], axis=1),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("time", "cost", "came_from", "parent", "move", "kind")
        ),
    )


class _Walk:
    """One walk along the path with one budget."""

    def __init__(
        self,
        chain: Chain,
        budget_bytes: int,
        relaxation: Relaxation | None,
        *,
        limit: int | None = None,
        most_states: int | None = None,
        is_timed: bool = True,
    ) -> None:
        if chain.num_eras > 1 and not _first_era_matters(chain, budget_bytes):
            chain = chain.last_era
        self.chain, self.budget_bytes, self.relaxation = chain, budget_bytes, relaxation
        self.limit, self.most_states, self.is_timed = limit, most_states, is_timed
        self.required = _demands(chain, budget_bytes, np.minimum.reduce)
        self.sufficient = _demands(chain, budget_bytes, np.maximum.reduce)

    def path(self) -> Path | None:
        """Go along; None where no state within the limit is left."""
        if self.required[0].max() > 0:
            return None
        zero = np.zeros(1, dtype=np.int64)
        freed = np.zeros((self.chain.num_eras, 1), dtype=np.int64)
        start = _States(freed, zero, np.zeros(1), zero, zero, zero, zero)
        num_places = len(self.chain.moves)
        arrived: list[list[_States]] = [[start], *([] for _ in range(num_places))]
        lists: list[_States | None] = []
        for place in range(num_places + 1):
            states = self._settled(place, arrived[place]) if arrived[place] else None
            lists.append(states)
            if states is not None and place < num_places:
                self._extend(place, states, arrived)
        return self._read_back(lists)

    def _settled(self, place: int, parts: Sequence[_States]) -> _States | None:
        """The states at a place that may lead to an answer."""
        states = _joined(parts)
        needs = np.maximum(
            self.required[place][:, None],
            self.chain.gaps[place][:, states.kind] - self.budget_bytes,
        )
        states = states.at(_in_every_era(states.freed >= needs))
        np.minimum(states.freed, self.sufficient[place][:, None], out=states.freed)
        if self.limit is not None:
            # The prices are floats: a millionth keeps what they cannot tell apart.
            within = self._bounds(place, states) <= self.limit * (1 + 1e-6) + 1
            states = states.at(within & (states.time <= self.limit))
        if self.most_states is not None and len(states.time) > self.most_states:
            states = states.at(_thinned(states, self._bounds(place, states), self.most_states))
        elif len(states.time) > 20 * MOST_STATES:
            raise _TooManyError
        kinds = np.unique(states.kind)
        groups = [states.at(states.kind == kind) for kind in kinds]
        states = _joined([_pareto(group) for group in groups]) if groups else states
        if len(states.time) > MOST_STATES:
            raise _TooManyError
        return states if len(states.time) else None

    def _bounds(self, place: int, states: _States) -> Floats:
        assert self.relaxation is not None
        rest: Floats = states.cost + self.relaxation.rest[place] + self.relaxation.constant
        return rest

    def _extend(self, place: int, states: _States, arrived: list[list[_States]]) -> None:
        """Every state with every move that fits after it."""
        moves = self.chain.moves[place]
        costs = np.zeros(len(moves.stops))
        able = np.ones(len(moves.stops), dtype=bool)
        if self.relaxation is not None:
            costs = self.relaxation.costs[place]
        if self.limit is not None and self.relaxation is not None:
            # What is this much dearer than the cheapest way on is in no plan within the limit.
            dearer = costs + self.relaxation.rest[moves.stops] - self.relaxation.rest[place]
            able = dearer + self.relaxation.bound_picoseconds <= self.limit * (1 + 1e-6) + 1
        for stop in np.unique(moves.stops[able]):
            columns = np.flatnonzero(able & (moves.stops == stop))
            arrived[stop].append(self._extended(place, states, moves, columns, costs))

    def _extended(
        self,
        place: int,
        states: _States,
        moves: Moves,
        columns: npt.NDArray[np.intp],
        costs: Floats,
    ) -> _States:
        needs = moves.inside[:, :, columns][:, states.kind] - self.budget_bytes
        parent, column = np.nonzero(_in_every_era(states.freed[:, :, None] >= needs))
        move = columns[column]
        times = moves.picoseconds[move] if self.is_timed else 0
        return _States(
            states.freed[:, parent] + moves.freed[:, move],
            states.time[parent] + times,
            states.cost[parent] + costs[move],
            np.full(len(parent), place, dtype=np.int64),
            parent,
            move,
            moves.kinds[move],
        )

    def _read_back(self, lists: Sequence[_States | None]) -> Path | None:
        """The moves that led to the fastest last state."""
        states, path, place = lists[-1], [], len(lists) - 1
        if states is None:
            return None
        state = int(np.argmin(states.time))
        while place > 0:
            here = lists[place]
            assert here is not None, "a state has a parent"
            path.append(int(here.move[state]))
            place, state = int(here.came_from[state]), int(here.parent[state])
        return tuple(path[::-1])


def _demands(chain: Chain, budget_bytes: int, over_moves: Callable[..., Bytes]) -> list[Bytes]:
    """The freed bytes at each place that the rest asks for, by era.

    With `min` over the moves: without that many nothing fits; with `max`: with that many
    everything does.
    """
    num_places = len(chain.moves)
    demands = {num_places: over_moves(chain.gaps[-1], axis=1) - budget_bytes}
    for place in range(num_places - 1, -1, -1):
        moves = chain.moves[place]
        after = np.stack([demands[int(stop)] for stop in moves.stops], axis=1)
        inside = over_moves(moves.inside, axis=1)
        here = over_moves(np.maximum(inside - budget_bytes, after - moves.freed), axis=1)
        gaps = over_moves(chain.gaps[place], axis=1) - budget_bytes
        demands[place] = np.maximum(gaps, here)
    return [demands[place] for place in range(num_places + 1)]


def _first_era_matters(chain: Chain, budget_bytes: int) -> bool:
    """Whether a state that frees enough in the last era can be short of bytes in the first."""
    required = _demands(chain.last_era, budget_bytes, np.minimum.reduce)
    for place, needed in enumerate(required):
        level = int(chain.gaps[place][0].max())
        if place < len(chain.moves):
            insides = chain.moves[place].inside[0]
            level = max(level, int(insides[insides < NEVER].max(initial=0)))
        if level - (int(needed[0]) - int(chain.held_back[place])) > budget_bytes:
            return True
    return False


def _in_every_era(holds: Flags) -> Flags:
    everywhere: Flags = np.logical_and.reduce(holds, axis=0)
    return everywhere


def _thinned(states: _States, bounds: Floats, most: int) -> npt.NDArray[np.intp]:
    """The most promising states, and those that free most so that the walk can end."""
    promising = np.argpartition(bounds, most - 1)[:most]
    return np.union1d(promising, np.argmax(states.freed, axis=1))


def _pareto(states: _States) -> _States:
    """The states that no other beats in freed bytes of every era and in time."""
    if len(states.freed) == 1:
        return states.at(_best(states.freed[0], states.time))
    states = states.at(_best_of_groups(states))
    freed, time = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    kept = []
    # From most to fewest bytes freed in the first era: those before beat all that follow there.
    for chunk in np.split(np.arange(len(states.time)), range(CHUNK, len(states.time), CHUNK)):
        place = np.searchsorted(freed, states.freed[1, chunk])
        rivals = np.append(time, np.iinfo(np.int64).max)[place]
        better = chunk[states.time[chunk] < rivals]
        better = better[~_beaten_before(states.freed[1, better], states.time[better])]
        kept.append(better)
        freed = np.concatenate([freed, states.freed[1, better]])
        time = np.concatenate([time, states.time[better]])
        # Rising bytes and rising times: what frees more and takes no longer comes first.
        stairs = _best(freed, time)[::-1]
        freed, time = freed[stairs], time[stairs]
    return states.at(np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp))


def _beaten_before(freed: Bytes, time: Bytes) -> Flags:
    """Which are beaten by one that stands before them."""
    order = np.arange(len(time))
    beats = (freed[:, None] >= freed[None, :]) & (time[:, None] <= time[None, :])
    beaten: Flags = np.logical_or.reduce(beats & (order[:, None] < order[None, :]), axis=0)
    return beaten


def _best_of_groups(states: _States) -> npt.NDArray[np.intp]:
    """The states that no other with the same first era beats; sorted, most freed first."""
    order = np.lexsort((states.time, -states.freed[1], -states.freed[0]))
    groups = np.cumsum(np.diff(states.freed[0, order], prepend=states.freed[0, order[:1]]) != 0)
    # Times of later groups are made lower than all before, so that each begins anew.
    span = int(states.time.max(initial=0)) + 1
    times = states.time[order] - groups * span
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = times[1:] < np.minimum.accumulate(times)[:-1]
    best: npt.NDArray[np.intp] = order[keep]
    return best


def _best(freed: Bytes, time: Bytes) -> npt.NDArray[np.intp]:
    """The places that no other beats in freed bytes and time; of equal ones the first."""
    order = np.lexsort((time, -freed))
    times = time[order]
    fastest_before = np.minimum.accumulate(times)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = times[1:] < fastest_before[:-1]
    best: npt.NDArray[np.intp] = order[keep]
    return best
