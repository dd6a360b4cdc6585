"""What no plan of a space can beat: what is listed, or rivals' plans, without the host."""

import math

from leanstep.solvers.answers import fastest_of
from leanstep.solvers.base import PICOSECONDS, Outcome, Problem, Solution
from leanstep.solvers.chain import chain_of, loose_chain
from leanstep.solvers.relaxation import relax
from leanstep.solvers.rivals import rivals


def bound_seconds(problem: Problem, solution: Solution, budget_bytes: int) -> float:
    """A proved lower bound for all plans whose exact peak fits: the solver's, or the relaxation.

    Solvers may know of what is listed alone: rivals' plans are more than that. Runs of calls
    made one can do what single calls cannot: their bound is then one for both.
    """
    listed = solution.bound_seconds
    if solution.outcome is not Outcome.OPTIMAL:
        problems = [problem] if solution.problem is None else [problem, solution.problem]
        listed = max(listed, min(_relaxed_listed_seconds(one, budget_bytes) for one in problems))
    return min(listed, _rival_seconds(problem, budget_bytes))


def relaxed_seconds(problem: Problem, budget_bytes: int, *, without_any: float = 0.0) -> float:
    """The same without a solution: the linear relaxation's least time, or a rival's.

    `without_any` is the answer where not even the relaxation has one.
    """
    relaxed = _relaxed_listed_seconds(problem, budget_bytes, without_any)
    return min(relaxed, _rival_seconds(problem, budget_bytes))


def _rival_seconds(problem: Problem, budget_bytes: int) -> float:
    """The time of the fastest of the plans that need not be listed."""
    rival = fastest_of(rivals(problem), budget_bytes)
    return problem.seconds(rival.picks) if rival.is_found else math.inf


def _relaxed_listed_seconds(problem: Problem, budget_bytes: int, without_any: float = 0.0) -> float:
    chain = chain_of(problem)
    if not chain.is_complete or chain.slack_bytes(budget_bytes):
        chain = loose_chain(problem, chain)
    relaxation = relax(problem, chain, budget_bytes)
    return without_any if relaxation is None else relaxation.bound_picoseconds / PICOSECONDS
