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
from leanstep.solvers.chain import Chain, Moves
from leanstep.solvers.relaxation import Relaxation, relax

# The first, thinned pass keeps this many states a call: enough for a plan near the optimum.
THINNED_STATES = 200

Path = tuple[int, ...]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def fastest(problem: Problem, chain: Chain, budget_bytes: int) -> Path | None:
    """The path with the least time, and of those the lowest peak; None if none fits."""
    relaxation = relax(problem, chain, budget_bytes)
    if relaxation is None or not can_fit(chain, budget_bytes):
        return None
    thinned = _Walk(chain, budget_bytes, relaxation, most_states=THINNED_STATES).path()
    limit = None if thinned is None else picoseconds(chain, thinned)
    best = _Walk(chain, budget_bytes, relaxation, limit=limit).path()
    return None if best is None else _lowered(chain, best, relaxation)


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
    asked = high - 1
    while low < high:
        # The prices were found for a larger budget: their bound holds for less as well.
        lower = _Walk(chain, asked, relaxation, limit=limit).path()
        if lower is None:
            low = asked + 1
        else:
            best, high = lower, chain.peak_bytes(lower)
        # Mostly nothing lower is as fast: the first question settles it.
        asked = (low + high) // 2
    return best


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

    def at(self, chosen: npt.NDArray[np.intp] | Flags) -> "_States":
        return _States(
            self.freed[:, chosen],
            self.time[chosen],
            self.cost[chosen],
            self.came_from[chosen],
            self.parent[chosen],
            self.move[chosen],
        )


def _joined(parts: Sequence[_States]) -> _States:
    return _States(
        np.concatenate([part.freed for part in parts], axis=1),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("time", "cost", "came_from", "parent", "move")
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
        self.chain, self.budget_bytes, self.relaxation = chain, budget_bytes, relaxation
        self.limit, self.most_states, self.is_timed = limit, most_states, is_timed
        self.required = _demands(chain, budget_bytes, np.minimum.reduce)
        self.sufficient = _demands(chain, budget_bytes, np.maximum.reduce)

    def path(self) -> Path | None:
        """Go along; None where no state within the limit is left."""
        if self.required[0].max() > 0:
            return None
        zero = np.zeros(1, dtype=np.int64)
        start = _States(
            np.zeros((self.chain.num_eras, 1), dtype=np.int64), zero, np.zeros(1), zero, zero, zero
        )
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
        states = states.at(_in_every_era(states.freed >= self.required[place][:, None]))
        np.minimum(states.freed, self.sufficient[place][:, None], out=states.freed)
        if self.limit is not None:
            # The prices are floats: a millionth keeps what they cannot tell apart.
            within = self._bounds(place, states) <= self.limit * (1 + 1e-6) + 1
            states = states.at(within & (states.time <= self.limit))
        if self.most_states is not None and len(states.time) > self.most_states:
            states = states.at(_thinned(states, self._bounds(place, states), self.most_states))
        states = _pareto(states)
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
        needs = moves.inside[:, columns] - self.budget_bytes
        parent, column = np.nonzero(_in_every_era(states.freed[:, :, None] >= needs[:, None, :]))
        move = columns[column]
        times = moves.picoseconds[move] if self.is_timed else 0
        return _States(
            states.freed[:, parent] + moves.freed[:, move],
            states.time[parent] + times,
            states.cost[parent] + costs[move],
            np.full(len(parent), place, dtype=np.int64),
            parent,
            move,
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
    demands = {num_places: chain.gaps[:, -1] - budget_bytes}
    for place in range(num_places - 1, -1, -1):
        moves = chain.moves[place]
        after = np.stack([demands[int(stop)] for stop in moves.stops], axis=1)
        needs = np.maximum(moves.inside - budget_bytes, after - moves.freed)
        here = over_moves(needs, axis=1)
        demands[place] = np.maximum(chain.gaps[:, place] - budget_bytes, here)
    return [demands[place] for place in range(num_places + 1)]


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
    first_eras = np.unique(states.freed[0])[::-1]
    kept = np.zeros(0, dtype=np.intp)
    # From most to fewest bytes freed in the first era: those before beat all that follow there.
    for freed_bytes in first_eras:
        group = np.flatnonzero(states.freed[0] == freed_bytes)
        both = np.concatenate([kept, group])
        best = _best(states.freed[1, both], states.time[both])
        kept = np.concatenate([kept, both[best[best >= len(kept)]]])
    return states.at(kept)


def _best(freed: Bytes, time: Bytes) -> npt.NDArray[np.intp]:
    """The places that no other beats in freed bytes and time; of equal ones the first."""
    order = np.lexsort((time, -freed))
    times = time[order]
    fastest_before = np.minimum.accumulate(times)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = times[1:] < fastest_before[:-1]
    best: npt.NDArray[np.intp] = order[keep]
    return best
