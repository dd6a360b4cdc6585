"""What every solver has to keep to, tried on many small steps: for authors of plug-ins."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from leanstep.errors import BudgetError, InputError
from leanstep.ir import Engine, Fact, Plan, Profile
from leanstep.planner import plan_in, prepare
from leanstep.planner.space import Space
from leanstep.simulator import simulate
from leanstep.solvers.base import Problem, Solution, Solver
from leanstep.solvers.exhaustive import Exhaustive
from leanstep.testing.chains import Layer, chain_profile, random_profile
from leanstep.testing.dags import dag_profile

NUM_BUDGETS = 6

# Enumerating more than this takes longer than a check should.
MOST_CANDIDATES = 11


def check_solver(solver: Solver, seeds: Sequence[int] = range(6)) -> None:
    """Raise AssertionError, in one sentence with the seed, unless a solver is sound.

    On chains, random graphs with an orderly and a disorderly backward pass, equal blocks, blocks
    that can run as one, a step with nothing to drop, and under overrides: its plans fit their
    budgets by simulation, drop what may be dropped and all that must be, are never faster than the
    fastest there is, and are the same when asked for again. More budget is never slower, less is
    never higher, and its lowest peak can be asked for.
    """
    for seed in seeds:
        for case in _cases(seed):
            _check(solver, case)


@dataclass(frozen=True, slots=True)
class Case:
    """One step to plan."""

    name: str
    seed: int
    profile: Profile
    overrides: Mapping[str, str] = field(default_factory=dict)

    def space(self) -> Space:
        """A fresh space: nothing is known of it yet."""
        return prepare(self.profile, "auto", self.overrides)


def _cases(seed: int) -> Iterator[Case]:
    layers = [Layer(400, 2e-3), Layer(1600, 5e-4), Layer(900, 4e-3)]
    stuck = [Layer(1600), Layer(400, facts=(Fact.HOST_READ,))]
    profiles = {
        "a chain": random_profile(seed, most_layers=3),
        "a random graph": dag_profile(seed),
        "a disorderly backward": dag_profile(seed, is_ordered=False),
        "a Sequential": dag_profile(seed, is_sequential=True),
        "equal blocks": chain_profile([layers] * 4, input_bytes=10 * seed + 400),
        "nothing to drop": chain_profile([stuck[1:]] * 3),
    }
    cases = [Case(name, seed, profile) for name, profile in profiles.items()]
    rules = {"layers.0": "keep", "layers.1": "recompute"}
    for name in ("a random graph", "a Sequential"):
        cases.append(
            Case(f"{name} with overrides", seed, profiles[name], _matching(profiles[name], rules))
        )
    yield from (case for case in cases if _num_candidates(case.space().problem) <= MOST_CANDIDATES)


def _matching(profile: Profile, rules: Mapping[str, str]) -> dict[str, str]:
    """Those of some rules that match something."""
    paths = {profile.graph.path(op) for op in profile.graph.ops}
    return {pattern: action for pattern, action in rules.items() if pattern in paths}


def _num_candidates(problem: Problem) -> int:
    return sum(len(call.candidates) for call in problem.calls)


def _check(solver: Solver, case: Case) -> None:
    space = case.space()
    lowest = solver.lowest(space.problem)
    say = _Sentence(solver.name, case)
    say.require(lowest.is_found, "gives no lowest plan")
    problem = lowest.problem or space.problem
    floor_bytes = problem.peak_bytes(lowest.picks)
    budgets, plans = _budgets(space, floor_bytes), dict[int, Plan | None]()
    for budget_bytes in budgets:
        plans[budget_bytes] = _plan(say.at(budget_bytes), solver, space, budget_bytes)
    # Once more, in a space that knows nothing yet, from much to little.
    fresh = case.space()
    for budget_bytes in budgets[::-1]:
        again = solver.solve(fresh.problem, budget_bytes)
        is_same = _dropped(again) == _dropped(solver.solve(space.problem, budget_bytes))
        say.at(budget_bytes).require(is_same, "gives another plan when asked again")
    say.require(
        plans[floor_bytes] is not None,
        f"has a lowest peak of {floor_bytes} bytes that cannot be asked for",
    )
    say.require(plans[floor_bytes - 1] is None, "finds a plan below its own lowest peak")
    _check_monotone(say, plans)


def _dropped(solution: Solution) -> list[frozenset[int]]:
    return [pick.dropped for pick in solution.picks]


@dataclass(frozen=True, slots=True)
class _Sentence:
    """Who failed, where: what every complaint says."""

    solver: str
    case: Case
    budget_bytes: int | None = None

    def at(self, budget_bytes: int) -> "_Sentence":
        return _Sentence(self.solver, self.case, budget_bytes)

    def require(self, is_so: bool, complaint: str) -> None:
        if not is_so:
            budget = "" if self.budget_bytes is None else f", budget {self.budget_bytes}"
            place = f"on {self.case.name}, seed {self.case.seed}{budget}"
            raise AssertionError(f"{self.solver} {complaint} ({place})")


def _budgets(space: Space, floor_bytes: int) -> list[int]:
    high = space.profile.peak_bytes
    low = space.problem.peak_bytes(Exhaustive().lowest(space.problem).picks)
    spread = [low + (high - low) * step // NUM_BUDGETS for step in range(NUM_BUDGETS + 1)]
    return sorted({low - 1, *spread, high + 1, floor_bytes - 1, floor_bytes})


def _plan(say: _Sentence, solver: Solver, space: Space, budget_bytes: int) -> Plan | None:
    """The plan of a solver, looked at from all sides; None where it found none."""
    solution = solver.solve(space.problem, budget_bytes)
    if not solution.is_found:
        return None
    problem = solution.problem or space.problem
    say.require(
        len(solution.picks) == len(problem.calls),
        f"picks {len(solution.picks)} choices for {len(problem.calls)} calls",
    )
    _check_picks(say, space, solution)
    say.require(problem.is_possible(solution.picks), "drops an output that nobody takes in time")
    peak_bytes = problem.peak_bytes(solution.picks)
    say.require(peak_bytes <= budget_bytes, f"has a plan with a peak of {peak_bytes} bytes")
    _check_time(say, problem, solution, budget_bytes)
    try:
        found = plan_in(space, budget_bytes, solver=solver)
    except BudgetError:
        say.require(False, "finds a plan and then none")
        raise
    simulated = simulate(space.profile, found).peak_bytes
    say.require(simulated == found.peak_bytes, f"has a plan that simulates to {simulated} bytes")
    say.require(simulated <= budget_bytes, f"has a plan that simulates to {simulated} bytes")
    say.require(found.bound_seconds <= found.extra_seconds, "has a bound above its own plan")
    return found


def _check_picks(say: _Sentence, space: Space, solution: Solution) -> None:
    for (part, option), pick in zip(space.picked(solution), solution.picks, strict=True):
        name, options = part.view.block.name, part.options
        listed = (*options.options, *options.border_options)
        is_listed = any(pick.dropped == one.dropped for one in listed)
        may = is_listed or (
            option.engine is not Engine.MODULE and pick.dropped <= options.droppable
        )
        say.require(may, f"drops what {name} must keep")
        say.require(options.forced <= pick.dropped, f"keeps what {name} must drop")
        say.require(
            abs(pick.seconds - option.seconds) < 1e-12, f"has its own idea of the time of {name}"
        )


def _check_time(say: _Sentence, problem: Problem, solution: Solution, budget_bytes: int) -> None:
    if _num_candidates(problem) > MOST_CANDIDATES:
        return
    try:
        best = Exhaustive().solve(problem, budget_bytes)
    except InputError:
        return
    say.require(
        best.is_found and problem.picoseconds(solution.picks) >= problem.picoseconds(best.picks),
        "is faster than the fastest plan there is: its accounts are wrong",
    )


def _check_monotone(say: _Sentence, plans: Mapping[int, Plan | None]) -> None:
    seconds, peak_bytes = float("inf"), 0
    for budget_bytes, found in sorted(plans.items()):
        if found is None:
            say.at(budget_bytes).require(peak_bytes == 0, "finds no plan, but did with less budget")
            continue
        is_faster = found.extra_seconds <= seconds + 1e-12
        say.at(budget_bytes).require(is_faster, "is slower than with less budget")
        is_higher = found.peak_bytes >= peak_bytes
        say.at(budget_bytes).require(is_higher, "has a lower peak than with less budget")
        seconds, peak_bytes = found.extra_seconds, found.peak_bytes
