"""The fastest plan, proved: exact on the chain, and exact beyond it where the chain is cautious.

The chain's level is never below the exact one, so its answer for a budget fits. Where backward is
the reverse of forward both are the same, and the answer is the optimum. Elsewhere the answer for a
somewhat larger budget may fit too, and be faster: answers are tried from the largest budget that
can matter downwards, and a small problem is left to the integer program. An answer is a step
function of the budget alone; hence more budget is never slower, and less budget never higher.

A call lists the sets that are worth having by themselves. Beside those of other calls, near the
lowest peak, another may be better. The greedy of µ-TWO picks from all sets, so its plans count
among the answers (`rivals.py`): a list that does not depend on the budget. Where the chain is
cautious, so do those of all other fast solvers: some are judged by exact levels where the chain
sees none that fits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanstep.solvers.answers import fastest_of, lowest_of
from leanstep.solvers.base import PICOSECONDS, Call, Choice, Outcome, Problem, Solution
from leanstep.solvers.chain import chain_of
from leanstep.solvers.milp import Milp
from leanstep.solvers.moves import Chain
from leanstep.solvers.pareto import Found, fastest, lowest_peak_bytes
from leanstep.solvers.rivals import rivals

# Answers tried above the budget before taking the one for the budget itself. Beyond that more
# budget could in rare cases be slower; no recorded model has needed more than a few.
MOST_ANSWERS_ABOVE = 12

MOST_SWEEPS = 4

Picks = tuple[tuple[Call, Choice], ...]


@dataclass(frozen=True, slots=True)
class Optimal:
    """Least seconds over all listed choices, runs of calls and rivals' plans, proved.

    Takes tens of milliseconds to seconds for a hundred calls with tens of choices. The default.
    """

    name: str = "optimal"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Take the fastest of what is listed, or a rival's plan that is faster yet."""
        listed = self.listed(problem, budget_bytes)
        rival = fastest_of(rivals(problem), budget_bytes)
        if not rival.is_found or (listed.is_found and not _is_better(problem, rival, listed)):
            return listed
        seconds = problem.seconds(rival.picks)
        if listed.outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE):
            return replace(rival, outcome=Outcome.OPTIMAL, bound_seconds=seconds)
        return replace(rival, bound_seconds=min(listed.bound_seconds, seconds))

    def listed(self, problem: Problem, budget_bytes: int) -> Solution:
        """Walk the chain; then make sure that nothing faster fits the exact levels."""
        chain = chain_of(problem)
        slack_bytes = chain.slack_bytes(budget_bytes)
        is_exact = slack_bytes == 0 and chain.is_complete
        if not is_exact and problem.is_small:
            small = _enumerated(problem, budget_bytes)
            # The integer program may fail to tell budgets apart that differ by a millionth.
            if small.outcome in (Outcome.OPTIMAL, Outcome.INFEASIBLE):
                return small
        bound = 0.0
        fitting: list[Solution] = []
        if not is_exact:
            # Where levels are exact, the walk itself says whether anything fits.
            lowest = _lowest_listed(problem)
            fitting = [lowest] if _peak_bytes(problem, lowest) <= budget_bytes else []
        for number, found in enumerate(_answers(problem, chain, budget_bytes)):
            # The first answer allows every selection that fits exactly: none is faster.
            bound = found.bound_picoseconds / PICOSECONDS if number == 0 else bound
            answer = _solution(problem, chain.picks(found.path), Outcome.FEASIBLE)
            if _peak_bytes(problem, answer) <= budget_bytes:
                fitting.append(answer)
                break
        if not fitting:
            return Solution(Outcome.INFEASIBLE if is_exact else Outcome.NOT_FOUND)
        best = min(fitting, key=lambda s: (problem.picoseconds(s.picks), _peak_bytes(problem, s)))
        is_proved = chain.is_complete and problem.seconds(best.picks) <= bound
        outcome = Outcome.OPTIMAL if is_proved else Outcome.FEASIBLE
        # Over an incomplete chain its answer proves nothing: the relaxation has to.
        proved = bound if chain.is_complete else 0.0
        return Solution(outcome, best.picks, best.problem, bound_seconds=proved)

    def lowest(self, problem: Problem) -> Solution:
        """Find the lowest peak by bisection, then the least time there; or a rival's peak."""
        found = (_lowest_listed(problem), lowest_of(rivals(problem)))
        return min(found, key=lambda s: (_peak_bytes(problem, s), problem.picoseconds(s.picks)))


def _lowest_listed(problem: Problem) -> Solution:
    found = problem.notebook.get("lowest")
    if not isinstance(found, Solution):
        found = problem.notebook["lowest"] = _lowest(problem)
    return found


def _is_better(problem: Problem, one: Solution, other: Solution) -> bool:
    """Whether one is faster than another, or as fast with a lower peak."""
    ranks = [(problem.picoseconds(s.picks), _peak_bytes(problem, s)) for s in (one, other)]
    return ranks[0] < ranks[1]


def _enumerated(problem: Problem, budget_bytes: int) -> Solution:
    """The integer program's best answer over all ways to join calls."""
    found = [
        _elsewhere(arranged, problem, Milp().solve(arranged, budget_bytes))
        for arranged in problem.arrangements()
    ]
    if any(solution.outcome is Outcome.NOT_FOUND for solution in found):
        return Solution(Outcome.NOT_FOUND)
    fitting = [solution for solution in found if solution.is_found]
    if not fitting:
        return Solution(Outcome.INFEASIBLE)
    best = min(fitting, key=lambda s: (problem.picoseconds(s.picks), _peak_bytes(problem, s)))
    bound = min(solution.bound_seconds for solution in fitting)
    return replace(best, bound_seconds=bound)


def _elsewhere(arranged: Problem, problem: Problem, solution: Solution) -> Solution:
    return solution if arranged is problem else replace(solution, problem=arranged)


def _peak_bytes(problem: Problem, solution: Solution) -> int:
    return (solution.problem or problem).peak_bytes(solution.picks)


def _solution(problem: Problem, picks: Picks, outcome: Outcome) -> Solution:
    """A solution in the problem asked about, or in one where some runs of calls are one."""
    calls, choices = tuple(call for call, _ in picks), tuple(choice for _, choice in picks)
    is_plain = len(calls) == len(problem.calls)
    return Solution(outcome, choices, None if is_plain else problem.with_calls(calls))


def _lowest(problem: Problem) -> Solution:
    chain = chain_of(problem)
    fast = fastest(problem, chain, lowest_peak_bytes(chain))
    assert fast is not None, "the lowest peak can be reached"
    found = _solution(problem, chain.picks(fast.path), Outcome.OPTIMAL)
    # The chain proved its own level least; where levels are exact there is nothing to gain.
    if chain.slack_bytes(_peak_bytes(problem, found) - 1) == 0 and chain.is_complete:
        return found
    if chain.slack_bytes(_peak_bytes(problem, found) - 1) == 0 and not problem.is_small:
        return replace(found, outcome=Outcome.FEASIBLE)
    if problem.is_small:
        lows = [
            _elsewhere(arranged, problem, Milp().lowest(arranged))
            for arranged in problem.arrangements()
        ]
        return min(lows, key=lambda s: (_peak_bytes(problem, s), problem.picoseconds(s.picks)))
    if found.problem is not None:
        return replace(found, outcome=Outcome.FEASIBLE)
    return Solution(Outcome.FEASIBLE, _descended(problem, found.picks))


def _answers(problem: Problem, chain: Chain, budget_bytes: int) -> Iterator[Found]:
    """The chain's answers from the largest budget that can matter down to the given one."""
    level = budget_bytes + chain.slack_bytes(budget_bytes)
    for number in range(MOST_ANSWERS_ABOVE + 1):
        if number == MOST_ANSWERS_ABOVE or level <= budget_bytes:
            level = min(level, budget_bytes)
        found = fastest(problem, chain, level)
        if found is None:
            return
        yield found
        if level <= budget_bytes:
            return
        level = min(level, chain.peak_bytes(found.path)) - 1


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
