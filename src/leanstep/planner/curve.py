"""The whole curve of peak against time, for every solver in one call."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from leanstep.errors import InputError
from leanstep.ir import Frontier, FrontierPoint, Profile
from leanstep.ir.codec import check_kind
from leanstep.planner.bounds import bound_seconds, relaxed_seconds
from leanstep.planner.space import Space, prepare
from leanstep.solvers.base import Outcome, Solution, Solver
from leanstep.solvers.registry import CURVED, find_solver
from leanstep.stages import each, stage


def frontier(
    profile: Profile,
    *,
    solvers: Iterable[str] | None = None,
    points: int = 20,
    engine: str = "auto",
    overrides: Mapping[str, str] | None = None,
    watch: Callable[[FrontierPoint], object] | None = None,
) -> Frontier:
    """Plan for evenly spaced budgets, from the untouched peak down to the least reachable one.

    Args:
        profile: the recorded step, from `leanstep.profile` or from a file.
        solvers: their names; by default all but the slow references.
        points: how many budgets, the untouched peak and the floor included.
        engine: as for `plan`.
        overrides: as for `plan`.
        watch: called with each point when it is planned.
    """
    check_kind(profile, Profile)
    if points < 2:
        raise InputError(f"points={points} is too few: a curve has at least 2")
    asked = [find_solver(name) for name in (CURVED if solvers is None else solvers)]
    with stage("planning for every budget"):
        space = prepare(profile, engine, overrides)
        floors = {solver.name: space.floor_bytes(solver) for solver in asked}
        low = min(floors.values(), default=profile.peak_bytes)
        high = max(low, space.problem.peak_bytes(space.problem.kept))
        budgets = [high - (high - low) * place // (points - 1) for place in range(points)]
        found = []
        for point in _points(space, asked, budgets):
            found.append(point)
            if watch is not None:
                watch(point)
    return Frontier(
        unplanned_peak_bytes=profile.peak_bytes,
        step_seconds=profile.step_seconds,
        floors=tuple(floors.items()),
        points=tuple(found),
        device=profile.device,
    )


def _extra_seconds(space: Space, solution: Solution) -> float:
    problem = solution.problem or space.problem
    return problem.seconds(solution.picks) - space.unplanned_seconds + space.loss_seconds


def _bound_seconds(space: Space, solution: Solution, budget_bytes: int) -> float:
    if solution.outcome is Outcome.INFEASIBLE:
        return math.inf
    if solution.is_found:
        bound = bound_seconds(space.problem, solution, budget_bytes)
    else:
        bound = relaxed_seconds(space.problem, budget_bytes, without_any=math.inf)
    return bound - space.unplanned_seconds + space.loss_seconds


def _points(
    space: Space, asked: Sequence[Solver], budgets: Sequence[int]
) -> Iterator[FrontierPoint]:
    # What one solver has proved about a budget holds for the others: it is worked out once.
    bounds: dict[int, float] = {}
    for solver in asked:
        for budget_bytes in each(budgets, solver.name):
            start = time.perf_counter()
            answers = [(own, solver.solve(own.problem, budget_bytes)) for own in space.both]
            seconds = time.perf_counter() - start
            found = [pair for pair in answers if pair[1].is_found]
            if not found:
                continue
            best, solution = min(found, key=lambda pair: _extra_seconds(*pair))
            extra = _extra_seconds(best, solution)
            if budget_bytes not in bounds:
                bounds[budget_bytes] = min(
                    _bound_seconds(own, answer, budget_bytes) for own, answer in answers
                )
            problem = solution.problem or best.problem
            yield FrontierPoint(
                solver=solver.name,
                budget_bytes=budget_bytes,
                peak_bytes=problem.peak_bytes(solution.picks),
                extra_seconds=extra,
                bound_seconds=min(extra, bounds[budget_bytes]),
                planning_seconds=seconds,
            )
