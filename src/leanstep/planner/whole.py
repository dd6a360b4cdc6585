"""The public verb: from a profile and a budget to a plan."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from leanstep.ir import Plan, Profile
from leanstep.ir.codec import check_kind
from leanstep.planner.bounds import bound_seconds, relaxed_seconds
from leanstep.planner.lower import lower
from leanstep.planner.offload import LEAST_SECONDS, capacity_bytes
from leanstep.planner.refusal import refusal
from leanstep.planner.space import Space, prepare
from leanstep.planner.with_host import Answer, with_the_host
from leanstep.simulator import simulate
from leanstep.solvers.base import Outcome, Solution, Solver
from leanstep.solvers.registry import find_solver
from leanstep.stages import stage
from leanstep.units import parse_budget


def plan(
    profile: Profile,
    budget: str | int | float = "60%",
    *,
    solver: str | Solver = "auto",
    engine: str = "auto",
    overrides: Mapping[str, str] | None = None,
    exact: bool = True,
    offload: bool = True,
    chunks: bool = True,
) -> Plan:
    """Decide what each block call drops, so that the step fits the budget in the least time.

    Args:
        profile: the recorded step, from `leanstep.profile` or from a file.
        budget: `"16GiB"`, a share of the unplanned peak such as `"60%"`, or bytes.
        solver: `"auto"` is `"optimal"`; the others are there to compare with (`docs/solvers.md`).
            A solver of one's own may be given as an object.
        engine: `"replay"` runs ops again, `"module"` whole blocks; `"auto"` takes `"replay"` where
            it can. A profile made with `engine="inductor"` is planned with that engine alone.
        overrides: what to keep or recompute in any case, by module or by op in a module:
            `{"encoder.*.attention": "recompute", "*::aten.mm": "keep"}`. Later ones win.
        exact: false also allows cheap replays that were not seen to give the same bits.
        offload: also move activations to host memory, where the profile has the link's figures.
        chunks: also compute the loss some rows at a time, where that saves time.

    Raises:
        BudgetError: no plan fits; it names the least peak that can be asked for.
        InputError: an argument cannot be used.
    """
    check_kind(profile, Profile)
    find_solver(solver)
    budget_bytes = parse_budget(budget, unplanned_peak_bytes=profile.peak_bytes)
    with stage("planning"):
        space = prepare(profile, engine, overrides, exact=exact)
        return plan_in(space, budget_bytes, solver=solver, offload=offload, chunks=chunks)


def plan_in(
    space: Space,
    budget_bytes: int,
    *,
    solver: str | Solver = "auto",
    offload: bool = True,
    chunks: bool = True,
) -> Plan:
    """Plan for one budget in a prepared space, with the loss as a whole or in chunks."""
    own = find_solver(solver)
    problem, other = space.problem, space.chunked if chunks else None
    is_needed = problem.peak_bytes(problem.kept) > budget_bytes
    chunked = None
    if other is not None and (is_needed or other.loss_seconds < 0):
        chunked = _draft(other, budget_bytes, own, offload=offload)
    if chunked is not None:
        # Mostly the other cannot be better, and to say so takes less than to plan it.
        bound = _relaxed_extra_seconds(space, budget_bytes, offload=offload)
        if bound >= chunked.extra_seconds:
            return _plan_of(chunked, own, budget_bytes)
    whole = _draft(space, budget_bytes, own, offload=offload)
    found = [draft for draft in (whole, chunked) if draft is not None]
    if not found:
        raise refusal(other or space, own, budget_bytes, offload=offload)
    best = min(found, key=lambda draft: draft.extra_seconds)
    bounds = [draft.bound_seconds for draft in found] if whole is not None else [bound]
    plan = _plan_of(best, own, budget_bytes)
    return replace(plan, bound_seconds=min(plan.bound_seconds, *bounds))


def _relaxed_extra_seconds(space: Space, budget_bytes: int, *, offload: bool) -> float:
    """What no plan of a space takes less than, with all the room that the host may give."""
    room = capacity_bytes(space.profile) if offload else 0
    least = relaxed_seconds(space.problem, budget_bytes + room, without_any=math.inf)
    return least - space.unplanned_seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """An answer in one space, what it costs, and what is proved: the best one is made a plan."""

    space: Space
    answer: Answer
    extra_seconds: float
    bound_seconds: float


def _draft(space: Space, budget_bytes: int, solver: Solver, *, offload: bool) -> _Draft | None:
    solution = solver.solve(space.problem, budget_bytes)
    answer = Answer(solution, space.picked(solution)) if solution.is_found else None
    if offload and (answer is None or answer.extra_seconds):
        answer = with_the_host(space, solver, budget_bytes, LEAST_SECONDS, answer)
    if answer is None:
        return None
    loss_seconds = 0.0 if space.loss is None else space.loss.extra_seconds
    options = [option for _, option in answer.picked]
    copy_seconds = sum(map(len, answer.offload)) * space.profile.copy_seconds
    extra_seconds = sum(option.extra_seconds for option in options) + copy_seconds + loss_seconds
    proved = _bound(space, solution, answer, budget_bytes, offload=offload)
    proved += loss_seconds - sum(option.unplanned_seconds for option in options)
    return _Draft(space, answer, extra_seconds, min(proved, extra_seconds))


def _plan_of(draft: _Draft, solver: Solver, budget_bytes: int) -> Plan:
    space, answer = draft.space, draft.answer
    found = lower(
        space.profile,
        answer.picked,
        droppable=[part.options.droppable for part, _ in answer.picked],
        notes=space.notes,
        solver=solver.name,
        budget_bytes=budget_bytes,
        extra_seconds=draft.extra_seconds,
        bound_seconds=draft.bound_seconds,
        exact=space.exact,
        offload=answer.offload,
        untouched=space.untouched,
        loss=space.loss,
    )
    # Simulated from the decisions alone, as anyone would who is given the plan.
    simulated = simulate(space.untouched, found).peak_bytes
    assert found.peak_bytes == simulated, "planner and simulator must agree"
    if not answer.offload:
        promised = (answer.solution.problem or space.problem).peak_bytes(answer.solution.picks)
        assert simulated == promised, "problem and simulator must agree"
    assert simulated <= budget_bytes, "a plan fits its budget"
    return found


def _bound(
    space: Space, solution: Solution, answer: Answer, budget_bytes: int, *, offload: bool
) -> float:
    """A lower bound for all plans of the space; the host can make up for so much and no more.

    `solution` is the one that does without the host: where there is a better answer, others of its
    kind may still be better than that.
    """
    if not answer.extra_seconds:
        return 0.0
    is_hopeless = solution.outcome is Outcome.INFEASIBLE
    alone = math.inf if is_hopeless else bound_seconds(space.problem, solution, budget_bytes)
    room = capacity_bytes(space.profile) if offload else 0
    if not room:
        return alone
    # Something goes there, or nothing.
    moved = relaxed_seconds(space.problem, budget_bytes + room) + space.profile.copy_seconds
    return min(alone, moved)
