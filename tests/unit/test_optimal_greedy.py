"""The default solver counts the greedy's plans too: its floor, bounds and proofs are about both."""

import random

import numpy as np
import pytest

from leanstep.errors import BudgetError
from leanstep.planner import plan_in, prepare
from leanstep.solvers import Outcome, base
from leanstep.solvers.base import Call, Candidate, Choice, Problem
from leanstep.solvers.mu_two import MuTwo
from leanstep.solvers.optimal import Optimal
from leanstep.testing import dag_profile


def test_the_floor_is_that_of_the_greedy_where_this_is_lower():
    space = prepare(dag_profile(3, num_blocks=5, most_ops=16, is_ordered=False))
    problem = space.problem
    floor = problem.peak_bytes(Optimal().lowest(problem).picks)

    assert floor == problem.peak_bytes(MuTwo().lowest(problem).picks)
    assert plan_in(space, floor).peak_bytes == floor
    with pytest.raises(BudgetError) as refused:
        plan_in(space, floor - 1)
    assert refused.value.floor_bytes == floor


def test_no_solver_s_bound_is_above_a_plan_of_the_greedy_s():
    space = prepare(dag_profile(13, num_blocks=4, most_ops=14, is_ordered=True))
    found, listed = (plan_in(space, 826_096, solver=solver) for solver in ("optimal", "milp"))

    assert found.extra_seconds < listed.extra_seconds
    assert listed.bound_seconds <= found.extra_seconds == found.bound_seconds


NUM_STRETCHES = 9
NOWHERE = np.array([], dtype=np.intp)


def drawn_problem(seed):
    """Three calls whose backward is the reverse of forward but for a byte here and there."""
    draw = random.Random(seed)
    calls = tuple(drawn_call(draw, place) for place in range(3))
    tops = [draw.randint(150, 330) for _ in range(NUM_STRETCHES)]
    return Problem(np.array(tops, dtype=np.int64), calls)


def drawn_call(draw, place):
    start, stop, first = place, place + 1, 7 - place
    sizes = [draw.randint(5, 60) for _ in range(3)]
    seconds = [draw.randint(1, 12) for _ in range(3)]
    more = [draw.choice([0, 0, draw.randint(0, 12)]) for _ in range(3)]
    elsewhere = draw.choice([at for at in (0, 1, 2, 5, 6, 7) if at not in (place, first)])

    def drop(dropped):
        deltas = np.zeros(NUM_STRETCHES, dtype=np.int64)
        deltas[stop:first] -= sum(sizes[one] for one in dropped)
        deltas[elsewhere] += sum(more[one] for one in dropped)
        spent = float(sum(seconds[one] for one in dropped))
        return Choice(frozenset(dropped), spent, deltas, NOWHERE, NOWHERE.astype(np.int64))

    some = [one for one in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)) if draw.random() < 0.3]
    candidates = tuple(
        Candidate(
            n, sizes[n], {10 * place + n: float(seconds[n])}, frozenset(), place, first, first
        )
        for n in range(3)
    )
    choices = tuple(drop(frozenset(one)) for one in ((), *some, (0, 1, 2)))
    span = (place, place + 1)
    return Call(f"{place}", choices, start, stop, first, drop, lambda: candidates, (), span)


@pytest.mark.parametrize(("seed", "budget"), [(2, 288), (52, 242), (57, 288), (88, 236)])
def test_no_bound_is_above_the_plan_itself(monkeypatch, seed, budget):
    # As if there were too many choices for the integer program.
    monkeypatch.setattr(base, "SMALL_CHOICES", 0)
    problem = drawn_problem(seed)
    found = Optimal().solve(problem, budget)

    assert Optimal().listed(problem, budget).bound_seconds > problem.seconds(found.picks)
    assert found.bound_seconds <= problem.seconds(found.picks)


def test_what_no_list_meets_and_the_greedy_does_is_proved(monkeypatch):
    space = prepare(dag_profile(3, num_blocks=5, most_ops=16, is_ordered=False))
    problem = space.problem
    floor = problem.peak_bytes(MuTwo().lowest(problem).picks)
    refused = base.Solution(Outcome.INFEASIBLE)
    monkeypatch.setattr(Optimal, "listed", lambda self, problem, budget: refused)
    found = Optimal().solve(problem, floor)

    assert found.outcome is Outcome.OPTIMAL
    assert found.bound_seconds == problem.seconds(found.picks)
