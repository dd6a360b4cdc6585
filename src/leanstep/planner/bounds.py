"""What no plan of a space can beat: what is listed, or the greedy's plans, without the host."""

import math

from leanstep.solvers.base import PICOSECONDS, Outcome, Problem, Solution
from leanstep.solvers.chain import chain_of, loose_chain
from leanstep.solvers.mu_two import MuTwo
from leanstep.solvers.relaxation import relax


def bound_seconds(problem: Problem, solution: Solution, budget_bytes: int) -> float:
    """A proved lower bound for all plans whose exact peak fits: the solver's, or the relaxation.

    Solvers may know of what is listed alone: the greedy's plans are more than that. Runs of calls
    made one can do what single calls cannot: their bound is then one for both.
    """
    listed = solution.bound_seconds
    if solution.outcome is not Outcome.OPTIMAL:
        problems = [problem] if solution.problem is None else [problem, solution.problem]
        listed = max(listed, min(_relaxed_listed_seconds(one, budget_bytes) for one in problems))
    return min(listed, _greedy_seconds(problem, budget_bytes))


def relaxed_seconds(problem: Problem, budget_bytes: int, *, without_any: float = 0.0) -> float:
    """The same without a solution: the linear relaxation's least time, or the greedy's.

    `without_any` is the answer where not even the relaxation has one.
    """
    relaxed = _relaxed_listed_seconds(problem, budget_bytes, without_any)
    return min(relaxed, _greedy_seconds(problem, budget_bytes))


def _greedy_seconds(problem: Problem, budget_bytes: int) -> float:
    """The time of the fastest of the greedy's plans, which need not be listed."""
    greedy = MuTwo().solve(problem, budget_bytes)
    return problem.seconds(greedy.picks) if greedy.is_found else math.inf


def _relaxed_listed_seconds(problem: Problem, budget_bytes: int, without_any: float = 0.0) -> float:
    chain = chain_of(problem)
    if not chain.is_complete or chain.slack_bytes(budget_bytes):
        chain = loose_chain(problem, chain)
    relaxation = relax(problem, chain, budget_bytes)
    return without_any if relaxation is None else relaxation.bound_picoseconds / PICOSECONDS
