"""Keep everything: the untouched step, as a solver."""

from dataclasses import dataclass

from leanstep.solvers.base import Outcome, Problem, Solution


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Drop nothing; finds a plan just where none is needed. The baseline of comparisons."""

    name: str = "keep_all"

    def solve(self, problem: Problem) -> Solution:
        """Keep everything if that fits."""
        solution = self.lowest(problem)
        if problem.peak_bytes(solution.selection) > problem.budget_bytes:
            return Solution(Outcome.NOT_FOUND)
        return solution

    def lowest(self, problem: Problem) -> Solution:
        """Keep everything."""
        return Solution(Outcome.FEASIBLE, (0,) * len(problem.calls))
