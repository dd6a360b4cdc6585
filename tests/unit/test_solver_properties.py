"""What every solver keeps to on random graphs, and what the exact ones prove."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from leanstep.errors import BudgetError
from leanstep.ir import Engine, Plan, Profile
from leanstep.ir.blocks import find_block
from leanstep.planner import plan_in, prepare
from leanstep.planner.bounds import relaxed_seconds
from leanstep.planner.space import Space
from leanstep.rebuild.block import views_of
from leanstep.rebuild.program import build_program
from leanstep.simulator import simulate
from leanstep.solvers import Outcome, Problem
from leanstep.solvers.chain import run_stops
from leanstep.solvers.exhaustive import Exhaustive
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.registry import SOLVERS
from leanstep.testing import dag_profile

MOST_CANDIDATES = 12

# A block with so many candidates has all its sets listed.
MOST_IN_A_BLOCK = 7

FAST = [s for s in SOLVERS if s.name not in ("milp", "exhaustive")]

few = settings(max_examples=25, deadline=None, derandomize=True)


@st.composite
def profiles(draw: st.DrawFn, *, is_sequential: bool | None = None) -> Profile:
    sequential = draw(st.booleans()) if is_sequential is None else is_sequential
    return dag_profile(
        draw(st.integers(0, 10**6)),
        num_blocks=draw(st.integers(1, 4)),
        most_ops=draw(st.integers(2, 6)),
        is_sequential=sequential,
        is_ordered=draw(st.booleans()),
    )


def small_space(profile: Profile) -> Space:
    space = prepare(profile)
    counts = [len(call.candidates) for call in space.problem.calls]
    assume(1 <= sum(counts) <= MOST_CANDIDATES and max(counts) <= MOST_IN_A_BLOCK)
    return space


def budgets_of(problem: Problem, count: int = 6) -> list[int]:
    low = problem.peak_bytes(Exhaustive().lowest(problem).picks)
    high = problem.peak_bytes(problem.kept)
    return [low + (high - low) * step // count for step in range(count + 1)]


def check_plan(profile: Profile, plan: Plan) -> None:
    """A plan can be executed and does what it says."""
    assert simulate(profile, plan).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    covered = []
    found = [find_block(profile.graph, profile.blocks, d) for d in plan.decisions]
    for view, decision in zip(views_of(profile.graph, found), plan.decisions, strict=True):
        covered.extend(range(view.block.start, view.block.stop))
        dropped = view.storages_named(decision.drop)
        assert dropped <= {*view.candidates, *view.borders}
        if decision.engine is Engine.REPLAY:
            wanted = {save.value: 1 for save in view.saves if save.value.storage in dropped}
            program = build_program(view.reruns, wanted, view.available(dropped))
            assert bool(program.reruns) == bool(wanted)
    blocks = [range(block.start, block.stop) for block in profile.blocks]
    assert covered == list(itertools.chain(*blocks)), "every call is decided about, once"


@pytest.mark.parametrize("solver", FAST, ids=lambda solver: solver.name)
@few
@given(profile=profiles())
def test_plans_are_sound_and_budgets_monotone(solver: object, profile: Profile) -> None:
    space = small_space(profile)
    plans, missing = [], []

    for budget_bytes in budgets_of(space.problem):
        try:
            plans.append(plan_in(space, budget_bytes, solver=solver))
            check_plan(profile, plans[-1])
        except BudgetError as error:
            missing.append(error.floor_bytes)
            assert not plans, "with less budget there was a plan"

    seconds = [round(found.extra_seconds, 12) for found in plans]
    peaks = [found.peak_bytes for found in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)
    for floor_bytes in missing:
        assert plan_in(space, floor_bytes, solver=solver).peak_bytes == floor_bytes
        with pytest.raises(BudgetError):
            plan_in(space, floor_bytes - 1, solver=solver)


@pytest.mark.parametrize("solver", FAST, ids=lambda solver: solver.name)
@few
@given(profile=profiles(is_sequential=False))
def test_no_solver_beats_enumeration(solver: object, profile: Profile) -> None:
    problem = small_space(profile).problem

    for budget_bytes in budgets_of(problem):
        best = Exhaustive().solve(problem, budget_bytes)
        found = solver.solve(problem, budget_bytes)
        if found.is_found:
            assert problem.picoseconds(found.picks) >= problem.picoseconds(best.picks)


@settings(few, max_examples=80)
@given(profile=profiles())
def test_optimal_equals_enumeration_whatever_the_order_of_backward(profile: Profile) -> None:
    problem = small_space(profile).problem
    lowest = problem.peak_bytes(Exhaustive().lowest(problem).picks)

    assert problem.peak_bytes(Optimal().lowest(problem).picks) == lowest
    assert not Optimal().solve(problem, lowest - 1).is_found
    for budget_bytes in budgets_of(problem):
        best = Exhaustive().solve(problem, budget_bytes)
        found = Optimal().solve(problem, budget_bytes)
        assert found.outcome is Outcome.OPTIMAL
        assert problem.seconds(found.picks) == pytest.approx(problem.seconds(best.picks), abs=1e-9)
        assert problem.peak_bytes(found.picks) == problem.peak_bytes(best.picks)


@few
@given(profile=profiles(is_sequential=False))
def test_bound_is_below_every_plan_and_above_an_independent_relaxation(profile: Profile) -> None:
    space = small_space(profile)
    rows = SimulatedRows(space)

    for budget_bytes in budgets_of(space.problem, 3):
        best = space.problem.seconds(Exhaustive().solve(space.problem, budget_bytes).picks)
        found = plan_in(space, budget_bytes)
        assert found.bound_seconds <= found.extra_seconds
        assert found.bound_seconds <= best + 1e-9
        # The independent program knows no borders.
        plain = without_borders(space.problem)
        found_plain = Exhaustive().solve(plain, budget_bytes)
        if not found_plain.is_found:
            continue
        best = plain.seconds(found_plain.picks)
        expected = rows.bound_seconds(budget_bytes)
        assert expected <= best + 1e-9
        exact = relaxed_seconds(plain, budget_bytes)
        # The solver's rows also know that a stretch is as high without a replay.
        assert expected - 1e-5 <= exact <= best


def without_borders(problem: Problem) -> Problem:
    return Problem(problem.tops, tuple(replace(c, border_choices=()) for c in problem.calls))


class SimulatedRows:
    """The linear relaxation, built from simulated plans of one decision each."""

    def __init__(self, space: Space) -> None:
        self.profile, self.untouched = space.profile, plan_in(space, space.profile.peak_bytes)
        self.options = [
            (index, option) for index, call in enumerate(space.options) for option in call.options
        ]
        points = simulate(self.profile).points
        self.tops = np.array([point.peak_bytes for point in points], dtype=float)
        self.levels = np.array([point.live_bytes for point in points], dtype=float)
        seen = [self._seen(space, index, option) for index, option in self.options]
        self.deltas = np.stack([deltas for deltas, _ in seen], axis=1)
        self.replays = [replays for _, replays in seen]

    def _seen(self, space: Space, index: int, option: object) -> tuple[np.ndarray, dict[int, int]]:
        """What a decision alone adds at each op, and the tops of its replays by position."""
        drop = tuple(space.views[index].storage_key(number) for number in option.dropped)
        is_replay = option.engine is Engine.REPLAY
        decision = replace(
            self.untouched.decisions[index], engine=option.engine, drop=drop if is_replay else ()
        )
        plan = replace(self.untouched, decisions=(decision,))
        deltas, tops, place = np.zeros(len(self.tops)), dict[int, int](), 0
        for point in simulate(self.profile, plan).points:
            if point.replayed:
                tops[place] = max(tops.get(place, 0), point.peak_bytes)
            else:
                deltas[place] = point.peak_bytes - self.tops[place]
                place += 1
        return deltas, tops

    def bound_seconds(self, budget_bytes: int) -> float:
        calls = np.array([index for index, _ in self.options])
        rows, limits = [self.deltas], [budget_bytes - self.tops]
        for call in set(calls.tolist()):
            own = np.flatnonzero(calls == call)
            for place in {p for o in own for p in self.replays[o] if p < len(self.tops)}:
                row = self.deltas[place].copy()
                for option in own:
                    if place in self.replays[option]:
                        row[option] = self.replays[option][place] - self.levels[place]
                rows.append(row[None, :])
                limits.append(np.array([budget_bytes - self.levels[place]]))
        each = (calls[None, :] == np.unique(calls)[:, None]).astype(float)
        scale = 1024.0
        answer = linprog(
            [option.seconds for _, option in self.options],
            A_ub=np.vstack(rows) / scale,
            b_ub=np.concatenate(limits) / scale,
            A_eq=each,
            b_eq=np.ones(len(each)),
            bounds=(0, 1),
        )
        return float(answer.fun) if answer.success else 0.0


def test_every_run_of_a_short_sequential_is_a_move() -> None:
    """Runs of four calls in four were left out, and the answer was called optimal all the same."""
    for seed in range(40):
        profile = dag_profile(seed, num_blocks=4, most_ops=3, is_sequential=True, is_ordered=True)
        problem = prepare(profile).problem
        if problem.joints == {1, 2, 3} and len(problem.segment(0, 4)[0].choices) > 1:
            break

    assert list(run_stops(problem, 0)) == [2, 3, 4]
