"""The linear relaxation of the exact program: a lower bound, and prices that prune.

Shares of moves may be mixed; they flow along the path, one unit from its first place to its last. A
row a stretch: the bytes that all moves add there, replays included, <= budget - its top. Least time
by HiGHS. Rows are added where the answer so far breaks them, so only few of the thousands of
stretches are ever looked at; any set of rows gives a valid bound.

The multipliers of the rows say what a byte is worth in each stretch. Priced so, every move costs
its time and its bytes, and the cheapest path is a lower bound (Lagrange): so is the cost of the
moves made so far and the cheapest way on from there.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array

from leanstep.solvers.base import Bytes, Choice, Problem
from leanstep.solvers.moves import Chain

Floats = npt.NDArray[np.float64]

# Rounds of adding rows: each adds the worst stretch of every call and gap.
MOST_ROUNDS = 12


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The bound, and what each move costs when bytes are priced.

    `costs[i]` are the priced picoseconds of the moves from place i on, `rest[i]` the least priced
    picoseconds from there to the end. `rest[0] + constant` is a lower bound for every path.
    """

    costs: tuple[Floats, ...]
    rest: Floats
    constant: float

    @property
    def bound_picoseconds(self) -> float:
        """A lower bound for the time of every path that fits."""
        return max(0.0, float(self.rest[0]) + self.constant)


# A row: a stretch, and the call whose replays count in it.
Key = tuple[int, int]


@dataclass(eq=False)
class _Program:
    """All moves of a chain as columns, and the rows that have been asked for."""

    problem: Problem
    chain: Chain
    budget_bytes: int
    rows: dict[Key, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.choices = [choice for moves in self.chain.moves for choice in moves.choices]
        sizes = [len(moves.choices) for moves in self.chain.moves]
        self.starts = np.repeat(np.arange(len(sizes)), sizes)
        self.stops = np.concatenate([moves.stops for moves in self.chain.moves])
        self.times = np.concatenate([m.picoseconds for m in self.chain.moves]).astype(float)

    def row(self, key: Key) -> Bytes:
        """The bytes that each move adds in a stretch, the replays of a call there included."""
        if key not in self.rows:
            stretch, call = key
            row = np.array([choice.deltas[stretch] for choice in self.choices], dtype=np.int64)
            # Only one of the moves over a call is made, so all their replays may count.
            for column in np.flatnonzero((self.starts <= call) & (call < self.stops)).tolist():
                choice = self.choices[column]
                lifts = self._lifts(choice)[choice.replay_stretches == stretch]
                if self._call_at(column, stretch) == call:
                    row[column] += int(lifts.max(initial=0))
            self.rows[key] = row
        return self.rows[key]

    def broken(self, shares: Floats) -> list[Key]:
        """The rows that mixed moves break: the worst among those with the same calls open."""
        used: list[int] = np.flatnonzero(shares > 1e-9).tolist()
        levels = self.problem.tops.astype(float)
        for column in used:
            levels += shares[column] * self.choices[column].deltas
        lifted: dict[Key, float] = {}
        for column in used:
            choice = self.choices[column]
            for stretch, lift in zip(choice.replay_stretches, self._lifts(choice), strict=True):
                key = (int(stretch), self._call_at(column, int(stretch)))
                lifted[key] = lifted.get(key, levels[stretch]) + shares[column] * lift
        limit = self.budget_bytes * (1 + 1e-7) + 1
        above = [(levels[s], (int(s), -1)) for s in np.flatnonzero(levels > limit)]
        above += [(level, key) for key, level in lifted.items() if level > limit]
        worst: dict[int, Key] = {}
        for _, key in sorted(above, reverse=True):
            if key not in self.rows:
                worst.setdefault(int(self.chain.open_calls[key[0]]), key)
        return list(worst.values())

    def _lifts(self, choice: Choice) -> Bytes:
        """How far the replays of a choice come above the tops."""
        rises: Bytes = choice.replay_tops - self.problem.tops[choice.replay_stretches]
        return np.maximum(rises, 0)

    def _call_at(self, column: int, stretch: int) -> int:
        """The call of a move that replays in a stretch."""
        call = int(self.chain.open_calls[stretch])
        is_over = self.starts[column] <= call < self.stops[column]
        return call if is_over else int(self.starts[column])


def relax(problem: Problem, chain: Chain, budget_bytes: int) -> Relaxation | None:
    """Solve the relaxation; None where even mixing does not fit."""
    if not chain.moves:
        return Relaxation((), np.zeros(1), 0.0)
    program = _Program(problem, chain, budget_bytes)
    prices: dict[Key, float] = {}
    shares = _untouched(program)
    for _ in range(MOST_ROUNDS):
        broken = program.broken(shares)
        if not broken:
            break
        for key in broken:
            program.row(key)
        answer = _solve(program)
        if answer is None:
            return None
        shares, prices = answer
    return _priced(program, prices)


def _untouched(program: _Program) -> Floats:
    """The first move of every place: keep everything."""
    shares = np.zeros(len(program.choices))
    shares[np.searchsorted(program.starts, np.arange(len(program.chain.moves)))] = 1.0
    return shares


def _solve(program: _Program) -> tuple[Floats, dict[Key, float]] | None:
    """The best shares under the rows so far, and the price of a byte in each."""
    num_places = len(program.chain.moves)
    columns = np.arange(len(program.choices))
    leaves = csr_array(
        (np.ones(len(columns)), (program.starts, columns)), shape=(num_places, len(columns))
    )
    inner = program.stops < num_places
    arrives = csr_array(
        (np.ones(int(inner.sum())), (program.stops[inner], columns[inner])),
        shape=(num_places, len(columns)),
    )
    matrix = np.stack(list(program.rows.values())).astype(float)
    tops = program.problem.tops[[stretch for stretch, _ in program.rows]]
    limits = program.budget_bytes - tops.astype(float)
    # HiGHS wants numbers near one: bytes are 1e9, picoseconds too.
    time_scale = max(float(program.times.max()), 1.0)
    byte_scale = max(float(np.abs(matrix).max()), 1.0)
    # The stubs know no sparse rows; HiGHS does.
    answer = linprog(  # type: ignore[call-overload]
        program.times / time_scale,
        A_ub=csr_array(matrix / byte_scale),
        b_ub=limits / byte_scale,
        A_eq=leaves - arrives,
        b_eq=np.concatenate([[1.0], np.zeros(num_places - 1)]),
        bounds=(0.0, None),
        method="highs",
    )
    if answer.status == 2 or answer.x is None:
        return None
    prices = np.maximum(0.0, -answer.ineqlin.marginals) * (time_scale / byte_scale)
    return answer.x, dict(zip(program.rows, prices.tolist(), strict=True))


def _priced(program: _Program, prices: dict[Key, float]) -> Relaxation:
    """Cost every move at some prices, and find the cheapest way on from every place."""
    costs, constant = program.times.copy(), 0.0
    for key, price in prices.items():
        if price > 0:
            costs += price * program.row(key)
            constant += price * (float(program.problem.tops[key[0]]) - program.budget_bytes)
    num_places = len(program.chain.moves)
    rest, by_place = np.zeros(num_places + 1), []
    for place in range(num_places - 1, -1, -1):
        own = costs[program.starts == place]
        by_place.append(own)
        rest[place] = (own + rest[program.chain.moves[place].stops]).min()
    return Relaxation(tuple(by_place[::-1]), rest, constant)
