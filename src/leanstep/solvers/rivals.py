"""The other solvers' plans, which the default one looks at too: none of them beats it.

Lists that do not depend on the budget. The greedy's sets need not be listed anywhere. All else is
among the moves of a chain, where that is exact; elsewhere it is judged by levels that are too high.
"""

from leanstep.solvers.answers import Answer, answers_to
from leanstep.solvers.base import Problem
from leanstep.solvers.chain import chain_of
from leanstep.solvers.chain_dp import ChainDP
from leanstep.solvers.chen_sqrt import ChenSqrt
from leanstep.solvers.mu_two import MuTwo
from leanstep.solvers.uniform import Uniform

# The fast solvers, the greedy first.
RIVALS = (MuTwo(), MuTwo(corrected=False), ChainDP(), ChenSqrt(), Uniform())


def rivals(problem: Problem) -> tuple[Answer, ...]:
    """The plans that may beat all that is listed; worked out once."""
    chain = chain_of(problem)
    if chain.is_complete and not chain.slack.any():
        return RIVALS[0].answers(problem)
    every = (answer for rival in RIVALS for answer in rival.answers(problem))
    return answers_to(problem, "rivals", lambda: every)
