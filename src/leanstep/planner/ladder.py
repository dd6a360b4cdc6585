"""A plan for each of many budgets, and the batch that each budget could hold.

One profile is of one batch. What a larger batch would need is read off the same step: what a
category such as parameters holds stays, activations and temporaries grow with the batch. That is
true but for temporaries of the size of a weight, so it errs on the side of too much memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from leanstep.errors import BudgetError, InputError
from leanstep.ir import Category, Decision, Ladder, Phase, Plan, Profile, Rung, Share
from leanstep.planner.space import Space, prepare
from leanstep.planner.whole import plan_in
from leanstep.simulator import memory_curve
from leanstep.solvers.base import Solver
from leanstep.solvers.registry import find_solver
from leanstep.stages import each, stage

_GROWING = (Category.ACTIVATION, Category.INPUT, Category.TEMPORARY)


def ladder(
    profile: Profile,
    *,
    solver: str | Solver = "auto",
    engine: str = "auto",
    exact: bool = True,
    offload: bool = True,
    rungs: int = 17,
    also: Sequence[int] = (),
) -> Ladder:
    """Plan for evenly spaced budgets, from the untouched peak to the least by recomputing.

    Unlike `frontier`, which compares solvers, it keeps what every block call does. `also` are
    budgets in bytes that get a rung of their own, where they lie between these two. The other
    arguments are those of `plan`.
    """
    if rungs < 2:
        raise InputError(f"rungs={rungs} is too few: a ladder has at least 2")
    space = prepare(profile, engine, exact=exact)
    found_solver = find_solver(solver)
    evenly = _budgets(space, found_solver, rungs)
    budgets = {*evenly, *(own for own in also if evenly[-1] < own < evenly[0])}
    with stage("planning for every budget"):
        plans = list(_plans(space, sorted(budgets, reverse=True), solver, offload=offload))
    found = [_rung(plan) for plan in plans]
    return Ladder(
        solver=found_solver.name,
        batch=profile.model.batch_size,
        step_seconds=profile.step_seconds,
        unplanned_peak_bytes=profile.peak_bytes,
        rungs=tuple(_with_growth(found, [_Loads(profile, plan) for plan in plans])),
    )


def _budgets(space: Space, solver: Solver, count: int) -> list[int]:
    low = space.floor_bytes(solver)
    high = max(low, space.problem.peak_bytes(space.problem.kept))
    return [high - (high - low) * place // (count - 1) for place in range(count)]


def _plans(
    space: Space, budgets: Sequence[int], solver: str | Solver, *, offload: bool
) -> Iterator[Plan]:
    """A plan for each budget that the solver can meet: a heuristic misses some above its floor."""
    for budget_bytes in each(budgets, "budget"):
        try:
            found = plan_in(space, budget_bytes, solver=solver, offload=offload)
        except BudgetError:
            continue
        yield found


def _rung(plan: Plan) -> Rung:
    return Rung(
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        extra_seconds=plan.extra_seconds,
        bound_seconds=plan.bound_seconds,
        host_bytes=plan.host_bytes,
        shares=tuple(_share(decision) for decision in plan.decisions),
    )


def _share(decision: Decision) -> Share:
    return Share(
        name=decision.name,
        kept_bytes=decision.resident_bytes,
        dropped_bytes=decision.dropped_bytes,
        moved_bytes=decision.host_bytes,
        seconds=decision.extra_seconds,
    )


class _Loads:
    """What a planned step holds at every op: the part that stays, and the part that grows."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        curve = memory_curve(profile, plan)
        layers = dict(curve.layers)
        empty = np.zeros(len(curve.phases), dtype=np.int64)
        growing = sum((np.array(layers[key]) for key in _GROWING if key in layers), empty)
        # The optimizer's own temporaries are of the size of the parameters.
        is_update = np.array([phase is Phase.OPTIMIZER for phase in curve.phases])
        self.growing: npt.NDArray[np.int64] = np.where(is_update, 0, growing)
        self.fixed: npt.NDArray[np.int64] = np.array(curve.totals) - self.growing

    def growth(self, budget_bytes: int) -> float:
        """How many times larger the batch may be; 0 where even what stays does not fit."""
        if self.fixed.max() > budget_bytes:
            return 0.0
        grows = self.growing > 0
        room = (budget_bytes - self.fixed[grows]) / self.growing[grows]
        return float(room.min()) if len(room) else 0.0


def _with_growth(rungs: Sequence[Rung], loads: Sequence[_Loads]) -> list[Rung]:
    found = []
    for rung in rungs:
        growths = [load.growth(rung.budget_bytes) for load in loads]
        best = max(range(len(growths)), key=growths.__getitem__)
        found.append(
            replace(
                rung,
                batch_growth=growths[best],
                batch_extra_seconds=rungs[best].extra_seconds,
                # The first rung is the untouched step.
                untouched_growth=growths[0],
            )
        )
    return found
