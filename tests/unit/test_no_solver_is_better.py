"""No other solver finds what the default one refuses, or is faster."""

from dataclasses import replace

import pytest

from leanstep.errors import BudgetError
from leanstep.ir import Link
from leanstep.planner import plan_in, prepare
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.registry import CURVED, find_solver
from leanstep.testing import dag_profile

SOLVERS = [find_solver(name) for name in (*CURVED, "mu_two_paper")]


@pytest.mark.parametrize("seed", [0, 7])
def test_what_another_solver_finds_is_neither_refused_nor_beaten(seed):
    """The chain is cautious here: some runs of calls are not among its moves."""
    profile = dag_profile(seed, num_blocks=6, most_ops=12, is_ordered=False, is_sequential=True)
    space = prepare(profile)
    problem = space.problem
    floors = [space.floor_bytes(solver) for solver in SOLVERS]
    low, high = min(floors), problem.peak_bytes(problem.kept)

    assert space.floor_bytes(Optimal()) == low
    slowest = float("inf")
    for budget in (low, low + (high - low) // 6, low + (high - low) // 2):
        found = plan_in(space, budget)
        answers = (solver.solve(problem, budget) for solver in SOLVERS)
        fastest = min(problem.seconds(answer.picks) for answer in answers if answer.is_found)
        assert found.peak_bytes <= budget
        assert found.bound_seconds <= found.extra_seconds <= min(fastest, slowest) + 1e-12
        slowest = found.extra_seconds
    with pytest.raises(BudgetError) as refused:
        plan_in(space, low - 1)
    assert refused.value.floor_bytes == low


def test_nor_is_it_refused_where_only_the_host_makes_room():
    profile = dag_profile(0, num_blocks=14, most_ops=20, is_ordered=False, is_sequential=True)
    space = prepare(replace(profile, link=Link(1.35e7, 1.08e7, 8_000_000)))
    budget = 1_440_000

    assert plan_in(space, budget, solver="mu_two").host_bytes
    assert plan_in(space, budget).peak_bytes <= budget
