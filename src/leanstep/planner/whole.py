"""The public verb: from a profile and a budget to a plan."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from leanstep.blockgraph import BlockGraph
from leanstep.chunks import find_loss, in_chunks
from leanstep.errors import BudgetError
from leanstep.ir import Engine, Kind, LossInChunks, Offload, Plan, Profile, Timeline
from leanstep.ir.exclusion import left_out
from leanstep.planner.bounds import bound_seconds, relaxed_seconds
from leanstep.planner.lower import effects, lower
from leanstep.planner.offload import LEAST_SECONDS, capacity_bytes, find_offload, roomier
from leanstep.planner.option import CallOptions, Option
from leanstep.planner.options import check_engine, check_profiled
from leanstep.planner.overrides import Rule, parse_rules, unmet
from leanstep.planner.replay_options import hooked
from leanstep.planner.segments import Part, Parts
from leanstep.simulator import peak_op, simulate, timeline
from leanstep.solvers.base import Choice, Outcome, Problem, Solution, Solver
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.registry import find_solver
from leanstep.units import parse_budget

# How much of what the link could move is tried first; then halfway between what was too much and
# what was not, as often as `MOST_SHARES` allows: each is a solve.
FIRST_SHARES = (1.0, 0.9)
MOST_SHARES = 5
# And where every copy costs time, what it would be to move less.
SMALLER_SHARES = (0.5, 0.25, 0.12, 0.06)

# The least peak with the host's help is found to within this share of it, by trying budgets.
FLOOR_TOLERANCE = 0.002
FLOOR_TRIALS = 9

Roomier = tuple[Problem, Callable[[Solution], Solution]]


@dataclass(frozen=True, slots=True, eq=False)
class Space:
    """Everything that can be decided about a profiled step: made once, asked for many budgets.

    With a `loss` the step is the one that computes it in chunks, and `untouched` the recorded one.
    """

    profile: Profile
    untouched: Profile
    engine: str
    rules: tuple[Rule, ...]
    parts: Parts
    problem: Problem
    exact: bool = True
    loss: LossInChunks | None = None
    # Worked out once for all budgets: each takes as long as a plan.
    _rooms: dict[tuple[float, float], Roomier] = field(default_factory=dict, repr=False)
    _chunked: "list[Space | None]" = field(default_factory=list, repr=False)

    @property
    def chunked(self) -> "Space | None":
        """The same for the step with its loss in chunks, where that is possible."""
        if not self._chunked:
            loss = None if self.loss else find_loss(self.profile)
            self._chunked.append(None if loss is None else self._with(loss))
        return self._chunked[0]

    def _with(self, loss: LossInChunks) -> "Space":
        chunked = in_chunks(self.profile, loss)
        space = _prepared(chunked, self.engine, self.rules, exact=self.exact)
        return replace(space, untouched=self.untouched, loss=loss)

    @property
    def both(self) -> "tuple[Space, ...]":
        """With the loss as a whole and, where that is possible, in chunks."""
        return (self,) if self.chunked is None else (self, self.chunked)

    def floor_bytes(self, solver: Solver) -> int:
        """The least peak that a solver finds without the host."""
        lowest = [(own.problem, solver.lowest(own.problem)) for own in self.both]
        return min((one.problem or problem).peak_bytes(one.picks) for problem, one in lowest)

    @property
    def loss_seconds(self) -> float:
        """What the loss takes longer than in the recorded step."""
        return 0.0 if self.loss is None else self.loss.extra_seconds

    def roomier(self, share: float, least_seconds: float) -> Roomier:
        """The problem with so much of what the link could move gone to the host."""
        key = share, least_seconds
        if key not in self._rooms:
            self._rooms[key] = roomier(self.profile, self.problem, self.parts.alone, *key)
        return self._rooms[key]

    @property
    def views(self) -> tuple[BlockGraph, ...]:
        """The block calls of the step."""
        return tuple(part.view for part in self.parts.alone)

    @property
    def options(self) -> tuple[CallOptions, ...]:
        """The options of each block call."""
        return tuple(part.options for part in self.parts.alone)

    @property
    def unplanned_seconds(self) -> float:
        """What the unplanned step takes beyond the fastest form of every compiled call."""
        return sum(call.options[0].unplanned_seconds for call in self.options)

    def picked(self, solution: Solution) -> list[tuple[Part, Option]]:
        """The calls that a solution is about, each with the option picked for it."""
        problem = solution.problem or self.problem
        parts = [self.parts.run(*call.span) for call in problem.calls]
        pairs = zip(parts, solution.picks, strict=True)
        return [(part, _option(part, pick)) for part, pick in pairs]

    @property
    def notes(self) -> list[str]:
        """What the user should know about overrides and about blocks that are left out."""
        droppable = [call.droppable for call in self.options]
        return [
            *unmet(self.views, droppable, self.rules),
            *left_out(self.profile.exclusions),
            *_inexact(self.profile.kinds),
        ]


def _inexact(kinds: Sequence[Kind]) -> Iterator[str]:
    """What exactness costs a compiled step: forms that gave other bits."""
    if count := sum(kind.num_inexact for kind in kinds):
        yield (
            f"left out for other bits than the unplanned compiled step's: {count} compiled forms; "
            "exact=False allows them"
        )


def _option(part: Part, pick: Choice) -> Option:
    options = (*part.options.options, *part.options.border_options)
    choices = (*part.call.choices, *part.call.border_choices)
    for option, choice in zip(options, choices, strict=True):
        if choice is pick:
            return option
    option_for_set = part.options.drop(pick.dropped)
    assert option_for_set is not None, "a solver picks what a call gave it"
    return option_for_set


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
    find_solver(solver)
    budget_bytes = parse_budget(budget, unplanned_peak_bytes=profile.peak_bytes)
    space = prepare(profile, engine, overrides, exact=exact)
    return plan_in(space, budget_bytes, solver=solver, offload=offload, chunks=chunks)


def prepare(
    profile: Profile,
    engine: str = "auto",
    overrides: Mapping[str, str] | None = None,
    *,
    exact: bool = True,
) -> Space:
    """Find every option of every block call; `plan_in` then answers budgets quickly."""
    check_engine(engine)
    check_profiled(profile, engine)
    return _prepared(profile, engine, parse_rules(profile, overrides), exact=exact)


def _prepared(profile: Profile, engine: str, rules: tuple[Rule, ...], *, exact: bool) -> Space:
    parts = Parts(profile, engine, rules, exact=exact)
    return Space(profile, profile, engine, rules, parts, parts.problem(), exact)


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
        chunked = _plan_in(other, budget_bytes, own, offload=offload)
    if chunked is not None:
        # Mostly the other cannot be better, and to say so takes less than to plan it.
        bound = _relaxed_extra_seconds(space, budget_bytes, offload=offload)
        if bound >= chunked.extra_seconds:
            return chunked
    whole = _plan_in(space, budget_bytes, own, offload=offload)
    found = [plan for plan in (whole, chunked) if plan is not None]
    if not found:
        raise _budget_error(other or space, own, budget_bytes, offload=offload)
    best = min(found, key=lambda plan: plan.extra_seconds)
    bounds = [plan.bound_seconds for plan in found] if whole is not None else [bound]
    return replace(best, bound_seconds=min(best.bound_seconds, *bounds))


def _relaxed_extra_seconds(space: Space, budget_bytes: int, *, offload: bool) -> float:
    """What no plan of a space takes less than, with all the room that the host may give."""
    room = capacity_bytes(space.profile) if offload else 0
    least = relaxed_seconds(space.problem, budget_bytes + room, without_any=math.inf)
    return least - space.unplanned_seconds


def _plan_in(space: Space, budget_bytes: int, solver: Solver, *, offload: bool) -> Plan | None:
    solution = solver.solve(space.problem, budget_bytes)
    answer = Answer(solution, space.picked(solution)) if solution.is_found else None
    if offload and (answer is None or answer.extra_seconds):
        other = _with_the_host(space, solver, budget_bytes, LEAST_SECONDS)
        if other and (answer is None or other.extra_seconds < answer.extra_seconds):
            answer = other
    if offload and answer is None:
        # Many small copies are better than none.
        answer = _with_the_host(space, solver, budget_bytes, 0.0)
    if answer is None:
        return None
    found = lower(
        space.profile,
        answer.picked,
        droppable=[part.options.droppable for part, _ in answer.picked],
        notes=space.notes,
        solver=solver.name,
        budget_bytes=budget_bytes,
        bound_seconds=_bound(space, solution, answer, budget_bytes, offload=offload),
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


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a solver picked, and what goes to the host so that it fits."""

    solution: Solution
    picked: list[tuple[Part, Option]]
    offload: tuple[tuple[Offload, ...], ...] = ()
    copy_seconds: float = 0.0

    @property
    def extra_seconds(self) -> float:
        """The time that it costs."""
        num_copies = sum(map(len, self.offload))
        return sum(option.seconds for _, option in self.picked) + num_copies * self.copy_seconds


def _with_the_host(
    space: Space, solver: Solver, budget_bytes: int, least_seconds: float
) -> Answer | None:
    """An answer that moves something to the host; where copies cost time, also with fewer."""
    best = _with_more_room(space, solver, budget_bytes, least_seconds)
    if best is None or not space.profile.copy_seconds:
        return best
    less = (
        _solved_with_room(space, solver, budget_bytes, share, least_seconds)
        for share in SMALLER_SHARES
    )
    found = (solver.lowest(space.problem), *less)
    fewer = (_moved(space, solution, budget_bytes, least_seconds) for solution in found)
    answers = (best, *(answer for answer in fewer if answer))
    return min(answers, key=lambda answer: answer.extra_seconds)


def _with_more_room(
    space: Space, solver: Solver, budget_bytes: int, least_seconds: float
) -> Answer | None:
    """An answer that keeps more than fits, with as much moved to the host as it is over.

    As much as the link can move and still fits. Where nothing fits, all is dropped that can be, and
    the rest moved.
    """
    if not capacity_bytes(space.profile):
        return None

    best, fits, too_much = None, 0.0, 1.0
    for trial in range(MOST_SHARES):
        share = FIRST_SHARES[trial] if trial < len(FIRST_SHARES) else (fits + too_much) / 2
        solution = _solved_with_room(space, solver, budget_bytes, share, least_seconds)
        if not solution.is_found:
            break
        answer = _moved(space, solution, budget_bytes, least_seconds)
        if answer is None:
            too_much = share
        else:
            fits = share
            best = min(best or answer, answer, key=lambda one: one.extra_seconds)
        if fits == 1.0:
            break
    return best or _moved(space, solver.lowest(space.problem), budget_bytes, least_seconds)


def _solved_with_room(
    space: Space, solver: Solver, budget_bytes: int, share: float, least_seconds: float
) -> Solution:
    problem, back = space.roomier(share, least_seconds)
    # What the greedy drops beyond the lists has no room there: to ask for it takes time alone.
    solve = solver.listed if isinstance(solver, Optimal) else solver.solve
    return back(solve(problem, budget_bytes))


def _moved(
    space: Space, solution: Solution, budget_bytes: int, least_seconds: float
) -> Answer | None:
    """The solution of a roomier problem, with what it is over moved to the host."""
    if not solution.is_found:
        return None
    picked = space.picked(solution)
    # Hooks hold a little, be it that of a call which is left alone in the end.
    with_hooks = [
        (part, hooked(space.profile, part.view) if option.engine is Engine.UNTOUCHED else option)
        for part, option in picked
    ]
    moved = find_offload(space.profile, with_hooks, budget_bytes, least_seconds)
    if moved is None:
        return None
    rows = zip(picked, with_hooks, moved, strict=True)
    used = [with_hook if own else alone for alone, with_hook, own in rows]
    return Answer(solution, used, tuple(moved), space.profile.copy_seconds)


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


def _budget_error(space: Space, solver: Solver, budget_bytes: int, *, offload: bool) -> BudgetError:
    picked = space.picked(solver.lowest(space.problem))
    line = timeline(space.profile, effects(picked))
    op = peak_op(space.profile, line)
    floor = line.peak_bytes
    if offload:
        floor = _lower_floor(space, solver, budget_bytes, floor)
    return BudgetError(
        budget_bytes,
        floor,
        op=op.name,
        module=space.profile.graph.path(op) or None,
        source=op.source or None,
        overrides=_to_blame(space, budget_bytes, solver),
        left_out=tuple(left_out(space.profile.exclusions)),
        # Where the host lowers the floor, these are not its parts.
        breakdown=_parts(line) if floor == line.peak_bytes else (),
        with_host=floor < line.peak_bytes,
    )


def _parts(line: Timeline) -> tuple[tuple[str, int], ...]:
    return tuple((category.value, nbytes) for category, nbytes in line.at_peak)


def _lower_floor(space: Space, solver: Solver, too_little_bytes: int, floor_bytes: int) -> int:
    """The least budget that moving to the host makes possible, nearly; each trial is a plan."""
    graph, end = space.profile.graph, len(space.profile.graph.ops)
    stay = (s for s in graph.storages if s.birth < 0 and s.death >= end and not s.absences)
    lasting = sum(storage.nbytes for storage in stay)
    low = max(too_little_bytes, lasting, floor_bytes - capacity_bytes(space.profile))
    for _ in range(FLOOR_TRIALS):
        if floor_bytes - low <= FLOOR_TOLERANCE * floor_bytes:
            break
        middle = (low + floor_bytes) // 2
        if _with_more_room(space, solver, middle, 0.0) is not None:
            floor_bytes = middle
        else:
            low = middle
    return floor_bytes


def _to_blame(space: Space, budget_bytes: int, solver: Solver) -> tuple[str, ...]:
    """The rules without which the budget could be met, as few as possible."""
    blamed = space.rules
    if not blamed or not _fits_without(space, blamed, budget_bytes, solver):
        return ()
    for rule in space.rules:
        others = tuple(other for other in blamed if other is not rule)
        if others and _fits_without(space, others, budget_bytes, solver):
            blamed = others
    return tuple(str(rule) for rule in blamed)


def _fits_without(space: Space, rules: Sequence[Rule], budget_bytes: int, solver: Solver) -> bool:
    left = tuple(rule for rule in space.rules if rule not in rules)
    freer = _prepared(space.profile, space.engine, left, exact=space.exact)
    return solver.solve(freer.problem, budget_bytes).is_found
