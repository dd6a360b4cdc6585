"""Recompute whole blocks at even distances, as few as fit: what people do by hand."""

from collections.abc import Iterator
from dataclasses import dataclass

from leanstep.solvers.base import Choice, Outcome, Problem, Solution


@dataclass(frozen=True, slots=True)
class Uniform:
    """Drop all that can be dropped in evenly spaced calls.

    Tries 0, 1, 2, ... calls and stops at the first number that fits; costs one evaluation of the
    step for each. Knows nothing of what a call costs.
    """

    name: str = "uniform"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Use the smallest number of recomputed calls that fits."""
        for picks in _selections(problem):
            if problem.peak_bytes(picks) <= budget_bytes:
                return Solution(Outcome.FEASIBLE, picks)
        return Solution(Outcome.NOT_FOUND)

    def lowest(self, problem: Problem) -> Solution:
        """Use the number of recomputed calls with the lowest peak."""
        return Solution(Outcome.FEASIBLE, min(_selections(problem), key=problem.peak_bytes))


def _selections(problem: Problem) -> Iterator[tuple[Choice, ...]]:
    """Selections of growing cost. A call with one choice has nothing to drop and is passed over."""
    able = [index for index, call in enumerate(problem.calls) if len(call.choices) > 1]
    slowest = -1.0
    for count in range(len(able) + 1):
        dropped = {able[(2 * place + 1) * len(able) // (2 * count)] for place in range(count)}
        picks = tuple(
            call.choices[-1 if index in dropped else 0] for index, call in enumerate(problem.calls)
        )
        # Blocks differ: one more of them at other places can be faster, and budgets would not be
        # monotone if a slower selection were offered first.
        if problem.seconds(picks) > slowest:
            slowest = problem.seconds(picks)
            yield picks
