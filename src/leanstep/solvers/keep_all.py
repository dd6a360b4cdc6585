"""Keep everything: the untouched step, as a solver."""

from dataclasses import dataclass

from leanstep.solvers.base import Outcome, Problem, Solution


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Drop nothing; finds a plan just where none is needed. The baseline of comparisons."""

    name: str = "keep_all"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Keep everything if that fits."""
        if problem.peak_bytes(problem.kept) > budget_bytes:
            return Solution(Outcome.NOT_FOUND)
        return self.lowest(problem)

    def lowest(self, problem: Problem) -> Solution:
        """Keep everything."""
        return Solution(Outcome.FEASIBLE, problem.kept)
