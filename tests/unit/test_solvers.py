"""Solvers on random chains: exact ones equal enumeration, and nobody exceeds the budget."""

import itertools
import random
from dataclasses import replace

import pytest

from leanstep.errors import InputError
from leanstep.solvers import Choice, Outcome, Problem, Solver, find_solver, relax
from leanstep.solvers.keep_all import KeepAll
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.registry import SOLVERS
from leanstep.solvers.uniform import Uniform

SEEDS = range(60)


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    calls, gaps, level = [], [500], 500
    for _ in range(draw.randint(1, 5)):
        saved = draw.randint(50, 300)
        choices = [Choice(0.0, 0, level + saved + draw.randint(0, 60))]
        for _ in range(draw.randint(0, 4)):
            freed = draw.randint(-20, saved)
            inside = level + saved + draw.randint(0, 150)
            choices.append(Choice(draw.randint(1, 30) * 1e-3, freed, inside))
        calls.append(tuple(sorted(choices, key=lambda choice: choice.seconds)))
        level += saved
        gaps.append(level + draw.randint(0, 100))
    problem = Problem(0, tuple(calls), tuple(gaps))
    peak = problem.peak_bytes((0,) * len(calls))
    return replace(problem, budget_bytes=draw.randint(peak // 2, peak))


def selections(problem: Problem) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(len(choices)) for choices in problem.calls)))


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_equals_enumeration_and_takes_the_lowest_peak_of_the_fastest(seed: int) -> None:
    problem = random_problem(seed)
    fitting = [
        (round(problem.seconds(s), 9), problem.peak_bytes(s))
        for s in selections(problem)
        if problem.peak_bytes(s) <= problem.budget_bytes
    ]

    solution = Optimal().solve(problem)

    if not fitting:
        assert solution.outcome is Outcome.INFEASIBLE
        return
    found = (round(problem.seconds(solution.selection), 9), problem.peak_bytes(solution.selection))
    assert solution.outcome is Outcome.OPTIMAL
    assert found == min(fitting)


@pytest.mark.parametrize("seed", SEEDS)
def test_optimal_finds_the_lowest_peak_of_all(seed: int) -> None:
    problem = random_problem(seed)

    solution = Optimal().lowest(problem)

    lowest = min(problem.peak_bytes(selection) for selection in selections(problem))
    assert problem.peak_bytes(solution.selection) == lowest


@pytest.mark.parametrize("seed", SEEDS)
def test_relaxation_is_never_above_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    solution = Optimal().solve(problem)
    if not solution.is_found:
        return

    relaxation = relax(problem)

    assert relaxation is not None
    assert relaxation.bound_seconds <= problem.seconds(solution.selection) + 1e-9


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.name)
@pytest.mark.parametrize("seed", range(15))
def test_solver_fits_the_budget_and_is_monotone(solver: Solver, seed: int) -> None:
    problem = random_problem(seed)
    peak = problem.peak_bytes((0,) * len(problem.calls))
    seconds, peaks = [], []

    for budget_bytes in range(peak // 2, peak + 40, max(1, peak // 40)):
        solution = solver.solve(replace(problem, budget_bytes=budget_bytes))
        if solution.is_found:
            seconds.append(round(problem.seconds(solution.selection), 12))
            peaks.append(problem.peak_bytes(solution.selection))
            assert peaks[-1] <= budget_bytes

    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.name)
@pytest.mark.parametrize("seed", range(15))
def test_lowest_peak_of_a_solver_can_be_asked_for(solver: Solver, seed: int) -> None:
    problem = random_problem(seed)
    floor_bytes = problem.peak_bytes(solver.lowest(problem).selection)

    assert solver.solve(replace(problem, budget_bytes=floor_bytes)).is_found
    assert not solver.solve(replace(problem, budget_bytes=floor_bytes - 1)).is_found


def test_keep_all_never_drops() -> None:
    problem = Problem(100, ((Choice(0.0, 0, 90), Choice(1.0, 50, 90)),), (10, 100))

    assert KeepAll().solve(problem).selection == (0,)
    assert KeepAll().solve(replace(problem, budget_bytes=99)).outcome is Outcome.NOT_FOUND


def test_uniform_recomputes_as_few_calls_as_fit_evenly_spaced() -> None:
    calls = tuple((Choice(0.0, 0, 0), Choice(1.0, 10, 0)) for _ in range(8))
    problem = Problem(60, calls, (0,) * 8 + (80,))

    assert Uniform().solve(problem).selection == (0, 0, 1, 0, 0, 0, 1, 0)
    assert Uniform().solve(replace(problem, budget_bytes=-1)).outcome is Outcome.NOT_FOUND


def test_optimal_does_a_hundred_calls_of_many_choices() -> None:
    draw = random.Random(5)
    saved = [draw.randint(900, 1100) for _ in range(100)]
    calls = tuple(
        tuple(
            Choice(1e-6 * draw.randint(9, 11) * share**2, nbytes * share // 15, 0)
            for share in range(16)
        )
        for nbytes in saved
    )
    problem = Problem(sum(saved) // 2, calls, (0,) * 100 + (sum(saved),))

    solution = Optimal().solve(problem)

    relaxation = relax(problem)
    assert relaxation is not None
    assert problem.seconds(solution.selection) <= 1.02 * relaxation.bound_seconds


def test_unknown_solver_is_refused_with_the_known_names() -> None:
    with pytest.raises(InputError, match=r"no solver is called 'best'.*optimal"):
        find_solver("best")


def test_auto_is_the_optimal_solver() -> None:
    assert find_solver("auto").name == "optimal"
