"""Recompute even segments of the chain of calls: what people do by hand.

The cut of `torch.utils.checkpoint.checkpoint_sequential` (and of VISSL): k segments of n // k
calls, the last one longer. All but the last are recomputed; the last is kept, since its backward
follows at once.
"""

from dataclasses import dataclass

from leanstep.errors import InputError
from leanstep.solvers.answers import Answer, answers_to, fastest_of, lowest_of
from leanstep.solvers.base import Problem, Solution
from leanstep.solvers.cuts import answer_to_cut


@dataclass(frozen=True, slots=True)
class Uniform:
    """Cut the calls into `segments` even segments and recompute all but the last.

    Without a number it takes the fastest that fits of 1, 2, ... segments, 1 being the untouched
    step; costs one evaluation of the step for each. Knows nothing of what a call costs.
    """

    segments: int | None = None
    name: str = "uniform"

    def __post_init__(self) -> None:
        if self.segments is not None and self.segments < 1:
            raise InputError(f"a step cannot be cut into {self.segments} segments: use 1 or more")

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Use the fastest number of segments that fits."""
        return fastest_of(self.answers(problem), budget_bytes)

    def lowest(self, problem: Problem) -> Solution:
        """Use the number of segments with the lowest peak."""
        return lowest_of(self.answers(problem))

    def answers(self, problem: Problem) -> tuple[Answer, ...]:
        """The answers with each number of segments, but those that another beats."""
        most = max(1, len(problem.calls))
        numbers = range(1, most + 1) if self.segments is None else [min(self.segments, most)]
        return answers_to(
            problem,
            f"uniform, {self.segments} segments",
            lambda: [_cut(problem, number) for number in numbers],
        )


def _cut(problem: Problem, num_segments: int) -> Answer:
    size = len(problem.calls) // num_segments
    starts = (place * size for place in range(num_segments - 1))
    return answer_to_cut(problem, [(start, start + size) for start in starts])
