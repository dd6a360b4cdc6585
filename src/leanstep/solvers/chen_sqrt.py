"""Segments of about equal bytes (Chen et al., 2016, "Training deep nets with sublinear memory").

Walk along the calls and add up what each saves; where the sum exceeds a limit, the segment ends and
the next begins (their algorithm 3). All segments are recomputed, their inputs stay. A limit of
bytes near the square root of all bytes times those of the largest call gives about √n segments, the
least peak on an even chain; limits around it are tried too, from single calls to the whole chain.
"""

import math
from dataclasses import dataclass

from leanstep.solvers.answers import Answer, answers_to, fastest_of, lowest_of
from leanstep.solvers.base import Call, Problem, Solution
from leanstep.solvers.cuts import Segment, answer_to_cut

# Limits tried between the largest call and the whole chain, at even ratios.
NUM_LIMITS = 24


@dataclass(frozen=True, slots=True)
class ChenSqrt:
    """Recompute every segment of a cut by bytes; the cut is the fastest that fits.

    Nearly all cuts recompute everything once, so they differ in peak much more than in time. Costs
    one evaluation of the step for each cut.
    """

    name: str = "chen_sqrt"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Use the fastest cut that fits."""
        return fastest_of(self.answers(problem), budget_bytes)

    def lowest(self, problem: Problem) -> Solution:
        """Use the cut with the lowest peak."""
        return lowest_of(self.answers(problem))

    def answers(self, problem: Problem) -> tuple[Answer, ...]:
        """Every cut, but those that another beats."""
        return answers_to(problem, "chen_sqrt", lambda: _all_answers(problem))


def _all_answers(problem: Problem) -> list[Answer]:
    nbytes = [_saved_bytes(call) for call in problem.calls]
    cuts = dict.fromkeys(tuple(_cut(nbytes, limit)) for limit in _limits(nbytes))
    # What fits untouched is left untouched.
    return [answer_to_cut(problem, ()), *(answer_to_cut(problem, cut) for cut in cuts)]


def _saved_bytes(call: Call) -> int:
    """The bytes that a call saves and could drop, while it is open."""
    if call.first <= call.stop:
        return 0
    kept, dropped = call.choices[0], call.choices[-1]
    saved = (kept.deltas - dropped.deltas)[call.stop : call.first]
    return max(0, int(saved.max(initial=0)))


def _limits(nbytes: list[int]) -> list[float]:
    largest, total = max(nbytes, default=0), sum(nbytes)
    if largest <= 0:
        return [0.0]
    ratio = total / largest
    spread = [largest * ratio ** (step / NUM_LIMITS) for step in range(NUM_LIMITS + 1)]
    return [0.0, *spread, math.sqrt(total * largest)]


def _cut(nbytes: list[int], limit: float) -> list[Segment]:
    segments, start, total = [], 0, 0
    for place, saved in enumerate(nbytes):
        if total + saved > limit and place > start:
            segments.append((start, place))
            start, total = place, 0
        total += saved
    return [*segments, (start, len(nbytes))] if nbytes else []
