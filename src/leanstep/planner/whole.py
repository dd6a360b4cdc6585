"""The public verb: from a profile and a budget to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leanstep.blockgraph import BlockGraph, views_of
from leanstep.errors import BudgetError
from leanstep.ir import Plan, Profile
from leanstep.planner.lower import effects, lower
from leanstep.planner.options import CallOptions, Option, check_engine, find_options
from leanstep.planner.overrides import Rule, parse_rules, unmet
from leanstep.planner.problem import build_problem
from leanstep.simulator import peak_op, timeline
from leanstep.solvers.base import PICOSECONDS, Choice, Outcome, Problem, Solution
from leanstep.solvers.chain import chain_of
from leanstep.solvers.registry import find_solver
from leanstep.solvers.relaxation import relax
from leanstep.units import parse_budget


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Everything that can be decided about a profiled step: made once, asked for many budgets."""

    profile: Profile
    engine: str
    rules: tuple[Rule, ...]
    views: tuple[BlockGraph, ...]
    options: tuple[CallOptions, ...]
    problem: Problem

    def picked(self, picks: Sequence[Choice]) -> list[Option]:
        """The options that some choices stand for."""
        return [_option(call, pick) for call, pick in zip(self.options, picks, strict=True)]

    @property
    def notes(self) -> list[str]:
        """What the user should know about the overrides."""
        droppable = [call.droppable for call in self.options]
        return list(unmet(self.views, droppable, self.rules))

    @property
    def stuck(self) -> list[BlockGraph]:
        """The calls that save something of their own and cannot drop any of it."""
        pairs = zip(self.views, self.options, strict=True)
        return [v for v, call in pairs if v.saved and not call.options[-1].dropped]


def _option(call: CallOptions, pick: Choice) -> Option:
    for option in call.options:
        if option.dropped == pick.dropped:
            return option
    option_for_set = call.drop(pick.dropped)
    assert option_for_set is not None, "a solver picks what a call gave it"
    return option_for_set


def plan(
    profile: Profile,
    budget: str | int | float = "60%",
    *,
    solver: str = "auto",
    engine: str = "auto",
    overrides: Mapping[str, str] | None = None,
) -> Plan:
    """Decide what each block call drops, so that the step fits the budget in the least time.

    Args:
        profile: the recorded step, from `leanstep.profile` or from a file.
        budget: `"16GiB"`, a share of the unplanned peak such as `"60%"`, or bytes.
        solver: `"auto"` is `"optimal"`; the others are there to compare with.
        engine: `"replay"` runs ops again, `"module"` whole blocks; `"auto"` takes `"replay"` where
            it can.
        overrides: what to keep or recompute in any case, by module or by op in a module:
            `{"encoder.*.attention": "recompute", "*::aten.mm": "keep"}`. Later ones win.

    Raises:
        BudgetError: no plan fits; it names the least peak that can be asked for.
        InputError: an argument cannot be used.
    """
    find_solver(solver)
    budget_bytes = parse_budget(budget, unplanned_peak_bytes=profile.peak_bytes)
    return plan_in(prepare(profile, engine, overrides), budget_bytes, solver=solver)


def prepare(
    profile: Profile, engine: str = "auto", overrides: Mapping[str, str] | None = None
) -> Space:
    """Find every option of every block call; `plan_in` then answers budgets quickly."""
    check_engine(engine)
    return _prepared(profile, engine, parse_rules(profile, overrides))


def _prepared(profile: Profile, engine: str, rules: tuple[Rule, ...]) -> Space:
    views = views_of(profile.graph, profile.blocks)
    options = find_options(profile, views, engine, rules)
    return Space(profile, engine, rules, views, options, build_problem(profile, views, options))


def plan_in(space: Space, budget_bytes: int, *, solver: str = "auto") -> Plan:
    """Plan for one budget in a prepared space."""
    found_solver = find_solver(solver)
    solution = found_solver.solve(space.problem, budget_bytes)
    if not solution.is_found:
        lowest = found_solver.lowest(space.problem)
        raise _budget_error(space, lowest, budget_bytes, solver)
    found = lower(
        space.profile,
        space.views,
        space.picked(solution.picks),
        stuck=space.stuck,
        notes=space.notes,
        solver=found_solver.name,
        budget_bytes=budget_bytes,
        bound_seconds=_bound_seconds(space, solution, budget_bytes),
    )
    promised = space.problem.peak_bytes(solution.picks)
    assert found.peak_bytes == promised <= budget_bytes, "problem and simulator must agree"
    return found


def _bound_seconds(space: Space, solution: Solution, budget_bytes: int) -> float:
    if solution.outcome is Outcome.OPTIMAL:
        return solution.bound_seconds
    return max(solution.bound_seconds, bound_seconds(space, budget_bytes))


def bound_seconds(space: Space, budget_bytes: int) -> float:
    """A lower bound for all plans in the space whose exact peak fits: the linear relaxation."""
    chain = chain_of(space.problem)
    relaxation = relax(chain, budget_bytes + chain.slack_bytes(budget_bytes))
    return 0.0 if relaxation is None else relaxation.bound_picoseconds / PICOSECONDS


def _budget_error(space: Space, lowest: Solution, budget_bytes: int, solver: str) -> BudgetError:
    picked = space.picked(lowest.picks)
    line = timeline(space.profile, effects(space.views, picked))
    op = peak_op(space.profile, line)
    return BudgetError(
        budget_bytes,
        line.peak_bytes,
        op=op.name,
        module=space.profile.graph.path(op) or None,
        source=op.source or None,
        overrides=_to_blame(space, budget_bytes, solver),
    )


def _to_blame(space: Space, budget_bytes: int, solver: str) -> tuple[str, ...]:
    """The rules without which the budget could be met, as few as possible."""
    blamed = space.rules
    if not blamed or not _fits_without(space, blamed, budget_bytes, solver):
        return ()
    for rule in space.rules:
        others = tuple(other for other in blamed if other is not rule)
        if others and _fits_without(space, others, budget_bytes, solver):
            blamed = others
    return tuple(str(rule) for rule in blamed)


def _fits_without(space: Space, rules: Sequence[Rule], budget_bytes: int, solver: str) -> bool:
    left = tuple(rule for rule in space.rules if rule not in rules)
    freer = _prepared(space.profile, space.engine, left)
    return find_solver(solver).solve(freer.problem, budget_bytes).is_found
