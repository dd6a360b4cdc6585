"""One integer program over the listed choices, on the exact levels: the reference.

A binary variable a choice, one choice a call. A stretch gives the row: the bytes all choices add
there <= budget - its top. Where choices of a call replay, their tops count in a row of that call.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack

from leanstep.solvers.base import PICOSECONDS, Call, Choice, Outcome, Problem, Solution

Floats = npt.NDArray[np.float64]

# The reference answers in this time or says what it has: HiGHS can take hours over the last digit.
MOST_SECONDS = 60.0

MOST_RETRIES = 4


@dataclass(frozen=True, slots=True)
class Milp:
    """Least time by HiGHS's branch and bound, whatever the order of backward.

    For checking: equal blocks make it slow (symmetry), and beyond some thousand choices it stops
    at its time limit with the best plan so far. `optimal` gives the same plans in a blink.
    """

    name: str = "milp"
    most_seconds: float = MOST_SECONDS

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Find the least time, then the lowest peak at that time."""
        rows = rows_of(problem)
        best = rows.fastest(budget_bytes, self.most_seconds)
        if not best.is_found:
            return best
        lower = rows.lowest(self.most_seconds, within=best)
        if not lower.is_found:
            return best
        return Solution(best.outcome, lower.picks, bound_seconds=best.bound_seconds)

    def lowest(self, problem: Problem) -> Solution:
        """Find the lowest peak, then the least time there."""
        found = rows_of(problem).lowest(self.most_seconds)
        if not found.is_found:
            return Solution(Outcome.FEASIBLE, problem.kept)
        faster = self.solve(problem, problem.peak_bytes(found.picks))
        return faster if faster.is_found else found


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The exact levels as rows over the choices: `matrix @ x + tops` <= budget."""

    problem: Problem
    choices: tuple[Choice, ...]
    matrix: Floats
    tops: Floats
    one_each: Floats

    def fastest(self, budget_bytes: int, most_seconds: float) -> Solution:
        """The least time within a budget."""
        found = self._fastest(budget_bytes, most_seconds)
        # HiGHS may break a row by its tolerance, a millionth of the largest number.
        margin_bytes = 1 + int(1e-6 * np.abs(self.matrix).max(initial=0))
        for retry in range(MOST_RETRIES):
            if not found.is_found or self.problem.peak_bytes(found.picks) <= budget_bytes:
                return found
            lower = self._fastest(budget_bytes - (margin_bytes << retry), most_seconds)
            outcome = Outcome.FEASIBLE if lower.is_found else Outcome.NOT_FOUND
            found = Solution(outcome, lower.picks, bound_seconds=found.bound_seconds)
        return Solution(Outcome.NOT_FOUND)

    def _fastest(self, budget_bytes: int, most_seconds: float) -> Solution:
        times = np.array([choice.picoseconds for choice in self.choices], dtype=float)
        scale = max(times.max(initial=0), 1.0)
        # What no selection can lift above the budget needs no row.
        matters = self._most() > budget_bytes
        byte_scale = max(np.abs(self.matrix[matters]).max(initial=0), 1.0)
        limits = (budget_bytes - self.tops[matters]) / byte_scale
        levels = LinearConstraint(csr_array(self.matrix[matters] / byte_scale), ub=limits)
        answer = milp(
            times / scale,
            constraints=[levels, self._each(), *self._borders()],
            integrality=np.ones(len(times), dtype=np.int64),
            bounds=Bounds(0, 1),
            options={"time_limit": most_seconds, "mip_rel_gap": 0.0},
        )
        if answer.x is None:
            proved = answer.status == 2
            return Solution(Outcome.INFEASIBLE if proved else Outcome.NOT_FOUND)
        picks = self._picks(answer.x)
        outcome = Outcome.OPTIMAL if answer.status == 0 else Outcome.FEASIBLE
        bound = float(answer.mip_dual_bound or 0.0) * scale / PICOSECONDS
        return Solution(outcome, picks, bound_seconds=min(bound, self.problem.seconds(picks)))

    def lowest(self, most_seconds: float, *, within: Solution | None = None) -> Solution:
        """The lowest peak, of all selections or of those as fast as a known one."""
        num_choices = len(self.choices)
        byte_scale = max(np.abs(self.matrix).max(initial=0), 1.0)
        peak_column = np.full((len(self.tops), 1), -1.0)
        levels = LinearConstraint(
            hstack([csr_array(self.matrix / byte_scale), csr_array(peak_column)], format="csr"),
            ub=-self.tops / byte_scale,
        )
        each = self._each(extra_columns=1)
        constraints = [levels, each, *self._borders(extra_columns=1)]
        if within is not None:
            times = np.array([choice.picoseconds for choice in self.choices], dtype=float)
            limit = sum(choice.picoseconds for choice in within.picks)
            scale = max(times.max(initial=0), 1.0)
            row = np.append(times / scale, 0.0)[None, :]
            constraints.append(LinearConstraint(csr_array(row), ub=limit / scale))
        answer = milp(
            np.append(np.zeros(num_choices), 1.0),
            constraints=constraints,
            integrality=np.append(np.ones(num_choices, dtype=np.int64), 0),
            bounds=Bounds(
                np.append(np.zeros(num_choices), -np.inf), np.append(np.ones(num_choices), np.inf)
            ),
            options={"time_limit": most_seconds, "mip_rel_gap": 0.0},
        )
        if answer.x is None:
            return Solution(Outcome.NOT_FOUND)
        picks = self._picks(answer.x[:num_choices])
        if within is not None and not self._is_better(picks, within.picks):
            return within
        return Solution(Outcome.OPTIMAL if answer.status == 0 else Outcome.FEASIBLE, picks)

    def _is_better(self, picks: Sequence[Choice], known: Sequence[Choice]) -> bool:
        """Whether picks are as fast and lower: the program's numbers are rounded."""
        return sum(p.picoseconds for p in picks) <= sum(
            p.picoseconds for p in known
        ) and self.problem.peak_bytes(picks) < self.problem.peak_bytes(known)

    def _most(self) -> Floats:
        """The highest level that any selection gives in each row."""
        most, start = self.tops.copy(), 0
        for call in self.problem.calls:
            stop = start + len(_choices(call))
            most += self.matrix[:, start:stop].max(axis=1)
            start = stop
        return most

    def _each(self, extra_columns: int = 0) -> LinearConstraint:
        rows = np.pad(self.one_each, ((0, 0), (0, extra_columns)))
        return LinearConstraint(csr_array(rows), lb=1.0, ub=1.0)

    def _borders(self, extra_columns: int = 0) -> list[LinearConstraint]:
        """A call that drops its border comes before one that takes it, and in time."""
        rows = []
        calls = self.problem.calls
        starts = np.cumsum([0, *(len(_choices(call)) for call in calls)])
        for place, (before, after) in enumerate(itertools.pairwise(calls)):
            drops = [choice.drops_border for choice in _choices(before)]
            cannot = [not c.takes_border or c.reads_border_early for c in _choices(after)]
            if any(drops) and any(cannot):
                row = np.zeros(len(self.choices) + extra_columns)
                row[starts[place] : starts[place + 1]] = drops
                row[starts[place + 1] : starts[place + 2]] = cannot
                rows.append(row)
        return [LinearConstraint(csr_array(np.stack(rows)), ub=1.0)] if rows else []

    def _picks(self, shares: Floats) -> tuple[Choice, ...]:
        picks, start = [], 0
        for call in self.problem.calls:
            stop = start + len(_choices(call))
            picks.append(_choices(call)[int(np.argmax(shares[start:stop]))])
            start = stop
        return tuple(picks)


def _choices(call: Call) -> tuple[Choice, ...]:
    return (*call.choices, *call.border_choices)


def rows_of(problem: Problem) -> Rows:
    """The exact levels of a problem as rows; worked out once."""
    found = problem.notebook.get("rows")
    if not isinstance(found, Rows):
        found = problem.notebook["rows"] = _build(problem)
    return found


def _build(problem: Problem) -> Rows:
    choices = tuple(choice for call in problem.calls for choice in _choices(call))
    num_stretches = len(problem.tops)
    deltas = np.zeros((num_stretches, len(choices)))
    for column, choice in enumerate(choices):
        deltas[:, column] = choice.deltas
    matrices, tops = [deltas], [problem.tops.astype(float)]
    start = 0
    for call in problem.calls:
        places = [choice.replay_stretches for choice in _choices(call)]
        stretches = np.unique(np.concatenate(places))
        rows = deltas[stretches].copy()
        for offset, choice in enumerate(_choices(call)):
            lifts = np.zeros(num_stretches)
            rise = choice.replay_tops - problem.tops[choice.replay_stretches]
            np.maximum.at(lifts, choice.replay_stretches, rise)
            rows[:, start + offset] += lifts[stretches]
        matrices.append(rows)
        tops.append(problem.tops[stretches].astype(float))
        start += len(_choices(call))
    matrix, highest = _distinct(np.vstack(matrices), np.concatenate(tops))
    sizes = [len(_choices(call)) for call in problem.calls]
    call_of = np.repeat(np.arange(len(sizes)), sizes)
    one_each = (call_of[None, :] == np.arange(len(sizes))[:, None]).astype(float)
    return Rows(problem, choices, matrix, highest, one_each)


def _distinct(matrix: Floats, tops: Floats) -> tuple[Floats, Floats]:
    """Of rows with the same bytes, the one with the highest top."""
    if matrix.shape[1] == 0:
        return matrix[:1], np.array([tops.max(initial=0)])
    rows, where = np.unique(matrix, axis=0, return_inverse=True)
    highest = np.full(len(rows), -np.inf)
    np.maximum.at(highest, where.ravel(), tops)
    return rows, highest
