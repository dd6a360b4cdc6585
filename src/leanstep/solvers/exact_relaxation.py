"""A lower bound on the exact levels, where the chain is too cautious to give a good one.

The linear relaxation of the integer program in `milp.py`: calls may mix their choices. It has a row
for each stretch, and one for each stretch in which a call replays. Nearly all of them hold by
themselves, so they are added when they are broken (cutting planes). Stopping early gives a bound
too, just a lower one.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from leanstep.solvers.base import PICOSECONDS, Bytes, Problem

Floats = npt.NDArray[np.float64]

MOST_ROUNDS = 25

# Rows added in one round: those broken most.
MOST_ROWS = 12


def exact_bound_seconds(problem: Problem, budget_bytes: int) -> float:
    """The least time of the mixed problem, or a little less; 0 where even mixing does not fit."""
    if not problem.calls:
        return 0.0
    rows, bound = _Rows(problem), 0.0
    known: dict[tuple[int, int], tuple[Floats, int]] = {}
    for _ in range(MOST_ROUNDS):
        found = rows.solve([known[key] for key in sorted(known)], budget_bytes)
        if found is None:
            return 0.0
        bound, shares = found
        broken = [key for key in rows.broken(shares, budget_bytes) if key not in known]
        if not broken:
            break
        known.update((key, rows.row(*key)) for key in broken[:MOST_ROWS])
    return bound


class _Rows:
    """The rows of a problem: number -1 and a stretch, or a call that replays in the stretch."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.choices = [choice for call in problem.calls for choice in call.choices]
        sizes = [len(call.choices) for call in problem.calls]
        self.call_of = np.repeat(np.arange(len(sizes)), sizes)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.times = np.array([choice.picoseconds for choice in self.choices], dtype=float)
        self.one_each = (self.call_of[None, :] == np.arange(len(sizes))[:, None]).astype(float)

    def row(self, call: int, stretch: int) -> tuple[Floats, int]:
        """What each choice adds in a row, and the level it is added to."""
        added = np.array([choice.deltas[stretch] for choice in self.choices], dtype=float)
        if call >= 0:
            for place in range(self.starts[call], self.starts[call + 1]):
                added[place] += self._lifts(place)[stretch]
        return added, int(self.problem.tops[stretch])

    def _lifts(self, place: int) -> Bytes:
        """How far the replays of a choice come above the tops."""
        choice, tops = self.choices[place], self.problem.tops
        lifts: Bytes = np.zeros_like(tops)
        rises = choice.replay_tops - tops[choice.replay_stretches]
        np.maximum.at(lifts, choice.replay_stretches, rises)
        return lifts

    def solve(
        self, rows: list[tuple[Floats, int]], budget_bytes: int
    ) -> tuple[float, Floats] | None:
        """The least seconds under some rows, with the share of each choice."""
        scale = max(self.times.max(), 1.0)
        # HiGHS wants numbers near one.
        sizes = [max(np.abs(added).max(), 1.0) for added, _ in rows]
        matrix = np.zeros((len(rows), len(self.times)))
        limits = np.zeros(len(rows))
        for place, ((added, top), size) in enumerate(zip(rows, sizes, strict=True)):
            matrix[place], limits[place] = added / size, (budget_bytes - top) / size
        answer = linprog(
            self.times / scale,
            A_ub=matrix,
            b_ub=limits,
            A_eq=self.one_each,
            b_eq=np.ones(len(self.problem.calls)),
            bounds=(0, 1),
            method="highs",
        )
        if not answer.success or answer.fun is None or answer.x is None:
            return None
        # HiGHS's tolerance: a bound must not be above the truth.
        return max(0.0, (answer.fun - 1e-7) * scale / PICOSECONDS), answer.x

    def broken(self, shares: Floats, budget_bytes: int) -> list[tuple[int, int]]:
        """The rows that mixed choices break, the worst of each call, the worst first."""
        worst = sorted(self._excesses(shares, budget_bytes), reverse=True)
        return [(call, stretch) for _, call, stretch in worst]

    def _excesses(self, shares: Floats, budget_bytes: int) -> Iterator[tuple[float, int, int]]:
        used = np.flatnonzero(shares > 1e-9)
        levels = self.problem.tops.astype(float)
        lifts: dict[int, Floats] = {}
        for place in used:
            levels += shares[place] * self.choices[place].deltas
            call = int(self.call_of[place])
            own = lifts.setdefault(call, np.zeros(len(levels)))
            own += shares[place] * self._lifts(int(place))
        # Broken by less than the solver's own tolerance is not broken.
        limit = budget_bytes + max(1.0, 1e-6 * budget_bytes)
        for call, lift in [(-1, np.zeros(len(levels))), *lifts.items()]:
            total = levels + lift
            stretch = int(np.argmax(total))
            if total[stretch] > limit:
                yield float(total[stretch]), call, stretch
