"""The fastest plan, proved: exact on the chain, and exact beyond it where the chain is cautious.

The chain's level is never below the exact one, so its answer for a budget fits. Where backward is
the reverse of forward both are the same, and the answer is the optimum. Elsewhere the answer for a
somewhat larger budget may fit too, and be faster: answers are tried from the largest budget that
can matter downwards, and a small problem is left to the integer program. An answer is a step
function of the budget alone; hence more budget is never slower, and less budget never higher.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from leanstep.solvers.base import PICOSECONDS, Choice, Outcome, Problem, Solution
from leanstep.solvers.chain import Chain, chain_of
from leanstep.solvers.milp import Milp
from leanstep.solvers.pareto import fastest, lowest_peak_bytes, picoseconds

# Answers tried above the budget before taking the one for the budget itself. Beyond that more
# budget could in rare cases be slower; no recorded model has needed more than a few.
MOST_ANSWERS_ABOVE = 12

MOST_SWEEPS = 4

# Up to this many choices the integer program is fast whatever their numbers.
SMALL_CHOICES = 400


@dataclass(frozen=True, slots=True)
class Optimal:
    """Least seconds over all listed choices, proved; of equally fast ones the lowest peak.

    Takes milliseconds for tens of calls with tens of choices. The default.
    """

    name: str = "optimal"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Walk the chain; then make sure that nothing faster fits the exact levels."""
        chain = chain_of(problem)
        slack_bytes = chain.slack_bytes(budget_bytes)
        if slack_bytes and _is_small(problem):
            found = Milp().solve(problem, budget_bytes)
            # The integer program may fail to tell budgets apart that differ by a millionth.
            if found.outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE):
                return found
        floor = self.lowest(problem)
        if problem.peak_bytes(floor.picks) > budget_bytes:
            return Solution(Outcome.NOT_FOUND if slack_bytes else Outcome.INFEASIBLE)
        bound = 0.0
        fitting = [floor.picks]
        for number, (picks, seconds) in enumerate(_answers(problem, chain, budget_bytes)):
            # The first answer allows every selection that fits exactly: none is faster.
            bound = seconds if number == 0 else bound
            if problem.peak_bytes(picks) <= budget_bytes:
                fitting.append(picks)
                break
        best = min(fitting, key=lambda picks: (problem.seconds(picks), problem.peak_bytes(picks)))
        is_proved = problem.seconds(best) <= bound
        outcome = Outcome.OPTIMAL if is_proved else Outcome.FEASIBLE
        return Solution(outcome, best, bound_seconds=bound)

    def lowest(self, problem: Problem) -> Solution:
        """Find the lowest peak by bisection, then the least time there."""
        found = problem.notebook.get("lowest")
        if not isinstance(found, Solution):
            found = problem.notebook["lowest"] = _lowest(problem)
        return found


def _is_small(problem: Problem) -> bool:
    return sum(len(call.choices) for call in problem.calls) <= SMALL_CHOICES


def _lowest(problem: Problem) -> Solution:
    chain = chain_of(problem)
    selection = fastest(chain, lowest_peak_bytes(chain))
    assert selection is not None, "the lowest peak can be reached"
    picks = chain.picks(problem, selection)
    # The chain proved its own level least; where levels are exact there is nothing to gain.
    if chain.slack_bytes(problem.peak_bytes(picks) - 1) == 0:
        return Solution(Outcome.OPTIMAL, picks)
    if _is_small(problem):
        return Milp().lowest(problem)
    return Solution(Outcome.FEASIBLE, _descended(problem, picks))


def _answers(
    problem: Problem, chain: Chain, budget_bytes: int
) -> Iterator[tuple[tuple[Choice, ...], float]]:
    """The chain's answers from the largest budget that can matter down to the given one."""
    level = budget_bytes + chain.slack_bytes(budget_bytes)
    for number in range(MOST_ANSWERS_ABOVE + 1):
        if number == MOST_ANSWERS_ABOVE or level <= budget_bytes:
            level = min(level, budget_bytes)
        selection = fastest(chain, level)
        if selection is None:
            return
        yield chain.picks(problem, selection), picoseconds(chain, selection) / PICOSECONDS
        if level <= budget_bytes:
            return
        level = min(level, chain.peak_bytes(selection)) - 1


def _descended(problem: Problem, start: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Change one call at a time while the exact peak falls."""

    def rank(picks: tuple[Choice, ...]) -> tuple[int, float]:
        return problem.peak_bytes(picks), problem.seconds(picks)

    best = start
    for _ in range(MOST_SWEEPS):
        before = problem.peak_bytes(best)
        for index, call in enumerate(problem.calls):
            tried = [(*best[:index], choice, *best[index + 1 :]) for choice in call.choices]
            best = min([best, *tried], key=rank)
        if problem.peak_bytes(best) == before:
            break
    return best
