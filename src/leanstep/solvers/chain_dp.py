"""Rotor's dynamic program (Beaumont et al., 2019), one level deep.

Opt(m, i) is the least time for the calls from number i on with m units of memory to spare. Two
moves: run call i under one of its choices (rotor has just "save everything"; with options this is
Rockmate's form); or keep just the input of a segment and recompute it whole. A recomputed segment
is not cut again, as rotor would: a replay inside a replay cannot be executed yet.

Memory is counted in units, freed bytes rounded down and levels up, so no answer is over its
budget; rounding loses some time. The table holds the answers for all amounts at once. `m` is the
budget and the bytes that the calls before freed: levels are those of the untouched step.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leanstep.solvers.answers import Answer, answer_of, answers_to, fastest_of, lowest_of
from leanstep.solvers.base import Bytes, Call, Choice, Problem, Solution
from leanstep.solvers.chain import chain_of, run_stops
from leanstep.solvers.moves import Chain

# As rotor has it: 500 units lose up to two percent of the step, 4,000 a tenth of that.
NUM_UNITS = 500

INFINITE = 2**62


@dataclass(frozen=True, slots=True)
class ChainDP:
    """Least time over the listed choices and segments recomputed whole, up to rounding.

    `optimal` has the same segments and does not round. It looks at every segment of up to √n + 1
    calls, once for all budgets: seconds for a hundred calls. Equal segments are simulated once.
    """

    num_units: int = NUM_UNITS
    name: str = "chain_dp"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Look up the fastest answer that fits."""
        return fastest_of(self.answers(problem), budget_bytes)

    def lowest(self, problem: Problem) -> Solution:
        """Look up the lowest answer."""
        return lowest_of(self.answers(problem))

    def answers(self, problem: Problem) -> tuple[Answer, ...]:
        """The answers to all amounts of memory, but those that another beats."""
        return answers_to(
            problem, f"chain_dp, {self.num_units} units", lambda: self._all_answers(problem)
        )

    def _all_answers(self, problem: Problem) -> Iterator[Answer]:
        chain = chain_of(problem)
        moves = [_moves(problem, chain, start) for start in range(len(problem.calls))]
        highest = max(
            [
                max(int(gap.max()) for gap in chain.gaps),
                *(move.inside for row in moves for move in row),
            ]
        )
        table = _Table(chain, moves, max(1, -(-highest // self.num_units)), self.num_units)
        yield answer_of(problem, [(call, call.choices[0]) for call in problem.calls])
        for selection in table.selections():
            yield answer_of(problem, [(move.call, move.choice) for move in selection])


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """Run the calls up to `stop` in one way."""

    call: Call
    choice: Choice
    stop: int
    freed: int
    inside: int


def _moves(problem: Problem, chain: Chain, start: int) -> list[_Move]:
    moves = chain.moves[start]
    # Answers are judged by their exact peaks; the later era is where the peak mostly is.
    insides = moves.inside[:, 0, :].max(axis=0)
    numbers = zip(moves.calls, moves.choices, moves.freed[-1], insides, strict=True)
    alone = [
        _Move(call, choice, start + 1, int(freed), int(inside))
        for call, choice, freed, inside in numbers
        if call.span == problem.calls[start].span and not choice.drops_border
    ]
    runs = (problem.segment(start, stop)[0] for stop in run_stops(problem, start))
    joined = [_recomputed(problem, run) for run in runs if len(run.choices) > 1]
    return sorted([*alone, *joined], key=lambda move: (move.choice.picoseconds, -move.freed))


def _recomputed(problem: Problem, run: Call) -> _Move:
    """A run of calls with all dropped: what it frees, and the highest level while it runs."""
    choice, tops = run.choices[-1], problem.tops
    touched = int(np.max(np.nonzero(choice.deltas)[0], initial=run.first - 1))
    last = 1 + max(touched, int(choice.replay_stretches.max(initial=-1)))
    own = np.r_[run.start : run.stop, run.first : max(run.first, last)]
    levels = (tops + choice.deltas)[own]
    replays = choice.replay_tops + choice.deltas[choice.replay_stretches]
    inside = max(int(levels.max(initial=0)), int(replays.max(initial=0)))
    freed = 0
    if run.first > run.stop:
        freed = -int(choice.deltas[run.stop + int(np.argmax(tops[run.stop : run.first]))])
    return _Move(run, choice, run.span[1], freed, inside)


class _Table:
    """The least time from each call on, for each number of units, and the move that has it."""

    def __init__(
        self, chain: Chain, moves: Sequence[Sequence[_Move]], unit: int, num_units: int
    ) -> None:
        self.moves, self.unit, self.num_units = moves, unit, num_units
        self.needs = -(-np.array([gap[:, 0].max() for gap in chain.gaps]) // unit)
        self.amounts: Bytes = np.arange(num_units + 1, dtype=np.int64)
        self.times: dict[int, Bytes] = {len(moves): np.zeros(num_units + 1, dtype=np.int64)}
        self.best: list[npt.NDArray[np.intp]] = [np.zeros(0, dtype=np.intp)] * len(moves)
        for start in range(len(moves) - 1, -1, -1):
            self._fill(start)

    def _after(self, move: _Move) -> Bytes:
        """The units to spare after a move, for each number before it."""
        return np.minimum(self.amounts + move.freed // self.unit, self.num_units)

    def _fill(self, start: int) -> None:
        rows = []
        for move in self.moves[start]:
            after = self._after(move)
            fits = (self.amounts >= -(-move.inside // self.unit)) & (after >= self.needs[move.stop])
            rest = self.times[move.stop][np.maximum(after, 0)]
            possible = fits & (rest < INFINITE)
            rows.append(np.where(possible, rest + move.choice.picoseconds, INFINITE))
        times = np.stack(rows)
        self.best[start] = times.argmin(axis=0)
        self.times[start] = times.min(axis=0)

    def selections(self) -> Iterator[tuple[_Move, ...]]:
        """The different answers, from much memory to little."""
        amounts = self.amounts[(self.times[0] < INFINITE) & (self.amounts >= self.needs[0])]
        read = (self._read_back(int(amount)) for amount in amounts[::-1])
        yield from (selection for selection, _ in itertools.groupby(read))

    def _read_back(self, amount: int) -> tuple[_Move, ...]:
        place, selection = 0, []
        while place < len(self.moves):
            move = self.moves[place][int(self.best[place][amount])]
            amount = int(self._after(move)[amount])
            selection.append(move)
            place = move.stop
        return tuple(selection)
