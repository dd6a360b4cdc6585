"""The public verb: from a profile and a budget to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from leanstep.blockgraph import BlockGraph
from leanstep.errors import BudgetError
from leanstep.ir import Plan, Profile
from leanstep.planner.chain import Chain, build_chain, restricted, without_dominated
from leanstep.planner.lower import lower
from leanstep.planner.options import UNTOUCHED, Option, check_engine, find_options
from leanstep.planner.search import Selected, select
from leanstep.simulator import peak_op, timeline
from leanstep.solvers import find_solver
from leanstep.units import parse_budget


@dataclass(frozen=True, slots=True)
class Space:
    """Everything that can be decided about a profiled step: made once, asked for many budgets."""

    profile: Profile
    views: tuple[BlockGraph, ...]
    options: tuple[tuple[Option, ...], ...]
    chain: Chain

    def picked(self, selection: Sequence[int]) -> list[Option]:
        """The options at the given places."""
        return [call[place] for call, place in zip(self.options, selection, strict=True)]

    @property
    def stuck(self) -> list[BlockGraph]:
        """The calls that save something of their own and cannot drop any of it."""
        alone = (v for v, call in zip(self.views, self.options, strict=True) if len(call) == 1)
        return [view for view in alone if view.saved]


def plan(
    profile: Profile,
    budget: str | int | float = "60%",
    *,
    solver: str = "auto",
    engine: str = "auto",
) -> Plan:
    """Decide what each block call drops, so that the step fits the budget in the least time.

    Args:
        profile: the recorded step, from `leanstep.profile` or from a file.
        budget: `"16GiB"`, a share of the unplanned peak such as `"60%"`, or bytes.
        solver: `"auto"` is `"optimal"`; `"uniform"` and `"keep_all"` are there to compare with.
        engine: `"replay"` runs ops again, `"module"` whole blocks; `"auto"` takes `"replay"` where
            it can.

    Raises:
        BudgetError: no plan fits; it names the least peak that can be asked for.
        InputError: an argument cannot be used.
    """
    find_solver(solver)
    check_engine(engine)
    budget_bytes = parse_budget(budget, unplanned_peak_bytes=profile.peak_bytes)
    if timeline(profile, ()).peak_bytes <= budget_bytes:
        return _untouched(profile, solver, budget_bytes)
    return plan_in(prepare(profile, engine), budget_bytes, solver=solver)


def prepare(profile: Profile, engine: str = "auto") -> Space:
    """Find every option of every block call; `plan_in` then answers budgets quickly."""
    views = tuple(BlockGraph(profile.graph, block) for block in profile.blocks)
    options = find_options(profile, views, engine)
    chain = build_chain(profile, views, options)
    places = without_dominated(chain)
    kept = tuple(
        tuple(call[place] for place in kept) for call, kept in zip(options, places, strict=True)
    )
    return Space(profile, views, kept, restricted(chain, places))


def plan_in(space: Space, budget_bytes: int, *, solver: str = "auto") -> Plan:
    """Plan for one budget in a prepared space."""
    selected = select(space.chain, find_solver(solver), budget_bytes)
    if selected.peak_bytes > budget_bytes:
        raise _budget_error(space, selected, budget_bytes)
    found = lower(
        space.profile,
        space.views,
        space.picked(selected.selection),
        stuck=space.stuck,
        solver=find_solver(solver).name,
        budget_bytes=budget_bytes,
        bound_seconds=selected.bound_seconds,
    )
    assert found.peak_bytes == selected.peak_bytes, "the chain and the simulator must agree"
    return found


def _untouched(profile: Profile, solver: str, budget_bytes: int) -> Plan:
    views = tuple(BlockGraph(profile.graph, block) for block in profile.blocks)
    return lower(
        profile,
        views,
        [UNTOUCHED] * len(views),
        solver=find_solver(solver).name,
        budget_bytes=budget_bytes,
        bound_seconds=0.0,
    )


def _budget_error(space: Space, lowest: Selected, budget_bytes: int) -> BudgetError:
    effects = [option.effect for option in space.picked(lowest.selection)]
    op = peak_op(space.profile, timeline(space.profile, effects))
    return BudgetError(
        budget_bytes,
        lowest.peak_bytes,
        op=op.name,
        module=space.profile.graph.path(op) or None,
        source=op.source or None,
    )
