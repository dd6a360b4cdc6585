"""Answers that fit because something moves to the host: solved with more room, then moved.

What is picked where there is more room does not depend on the budget, but on the level asked for
there. The levels are steps, and the right one for a budget is found by halving, always at the same
steps: one that is fit for a budget is fit for every larger one. So more budget never ends at an
earlier step, and is never slower, but for the hooks of a call that in the end has nothing to move:
microseconds each, which are then left away.
"""

from dataclasses import dataclass, field

from leanstep.ir import Engine, Offload
from leanstep.planner.offload import Offloader, capacity_bytes, find_offload, link_of
from leanstep.planner.option import UNTOUCHED, Option
from leanstep.planner.rooms import Rooms
from leanstep.planner.segments import Part
from leanstep.planner.space import Space
from leanstep.solvers.base import PICOSECONDS, Solution, Solver
from leanstep.solvers.keep_all import KeepAll
from leanstep.solvers.optimal import Optimal
from leanstep.solvers.rivals import RIVALS

# So many steps are as much as the room that the host gives: finer ones take more solves.
STEPS_OF_ROOM = 32

# On a step of so few calls, whose solves are quick, other solvers' answers are moved as well, and
# levels above the budget tried: uneven calls may move more than there was room for.
FEW_CALLS = 12

# A tree of steps this deep is higher than any level.
DEPTH = 40


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
        return self.picoseconds / PICOSECONDS

    @property
    def picoseconds(self) -> int:
        """The same as a whole number: what answers are compared by."""
        num_copies = sum(map(len, self.offload))
        copying = round(num_copies * self.copy_seconds * PICOSECONDS)
        return copying + sum(round(option.seconds * PICOSECONDS) for _, option in self.picked)


def with_the_host(
    space: Space,
    solver: Solver,
    budget_bytes: int,
    least_seconds: float,
    alone: Answer | None = None,
) -> Answer | None:
    """The fastest answer, be it the one that does without the host.

    Where there is none such, all that can be dropped is, and the rest moved; also what takes the
    link less than the least seconds, if that is faster than all else: many small copies are better
    than none. They are never faster than what a budget that needs none of them gives.
    """
    if not capacity_bytes(space.profile):
        return alone
    solvers, best = _asked(space, solver), alone
    for one in solvers:
        best = _searched(space, one, budget_bytes, least_seconds, best)
    # Where the solver has a plan without the host, none of its own is slower than its lowest.
    lowest = [_lowest(space, one) for one in (solvers if alone is None else solvers[1:])]
    for low in lowest:
        best = _moved_lowest(space, low, budget_bytes, least_seconds, best)
    most = 0 if alone else lowest[0].picoseconds
    if alone is None and (best is None or best.picoseconds > most):
        solvers = _asked(space, solver, is_short=True)
        for low in (_lowest(space, one) for one in solvers):
            if low.picoseconds >= most:
                best = _moved_lowest(space, low, budget_bytes, 0.0, best)
        for one in solvers:
            best = _searched(space, one, budget_bytes, 0.0, best, at_least=most)
    return best


def _lowest(space: Space, solver: Solver) -> Answer:
    solution = solver.lowest(space.problem)
    return Answer(solution, space.picked(solution))


def _asked(space: Space, solver: Solver, *, is_short: bool = False) -> tuple[Solver, ...]:
    """The solver; with the default one all others, where that takes little or memory is short."""
    is_alone = len(space.problem.calls) > FEW_CALLS and not is_short
    if is_alone or not isinstance(solver, Optimal):
        return (solver,)
    return (solver, *RIVALS, KeepAll())


def _faster(one: Answer | None, other: Answer | None) -> Answer | None:
    """The faster of two answers; of equal ones the first."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda answer: answer.picoseconds)


def _moved_lowest(
    space: Space, lowest: Answer, budget_bytes: int, least_seconds: float, best: Answer | None
) -> Answer | None:
    """The answer with the lowest peak, with what it is still over moved; or the best if faster."""
    if best is not None and best.picoseconds <= lowest.picoseconds:
        return best
    # Hooks hold a little, be it that of a call which is left alone in the end.
    with_hooks = [
        (part, space.parts.hook(part)[0] if option.engine is Engine.UNTOUCHED else option)
        for part, option in lowest.picked
    ]
    moved = find_offload(space.profile, with_hooks, budget_bytes, least_seconds)
    if moved is None:
        return best
    rows = zip(lowest.picked, with_hooks, moved, strict=True)
    used = [with_hook if own else alone for alone, with_hook, own in rows]
    found = Answer(lowest.solution, used, tuple(moved), space.profile.copy_seconds)
    return _faster(best, found)


def _searched(
    space: Space,
    solver: Solver,
    budget_bytes: int,
    least_seconds: float,
    best: Answer | None,
    *,
    at_least: int = 0,
) -> Answer | None:
    """The fastest answer that takes no less than so many picoseconds; or the best if faster."""
    search = _Search(space, solver, budget_bytes, least_seconds, at_least, best)
    if search.rooms.most_bytes and search.rooms.fixed_bytes <= budget_bytes:
        search.between(0, 1 << DEPTH)
    return search.best


@dataclass
class _Search:
    """Halve the steps between which the right one lies."""

    space: Space
    solver: Solver
    budget_bytes: int
    least_seconds: float
    at_least: int
    best: Answer | None
    rooms: Rooms = field(init=False)
    step_bytes: int = field(init=False)
    ahead_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.rooms = self.space.roomier(self.least_seconds)
        problem = self.space.problem
        most = min(self.rooms.most_bytes, problem.peak_bytes(problem.kept))
        self.step_bytes = max(1, most // STEPS_OF_ROOM)
        self.ahead_bytes = most if len(problem.calls) <= FEW_CALLS else self.step_bytes

    def between(self, low: int, high: int) -> None:
        """Look at the steps between two."""
        if high - low <= 1:
            return
        middle = (low + high) // 2
        level = middle * self.step_bytes
        if level >= self.budget_bytes + self.ahead_bytes:
            self.between(low, middle)
            return
        # What is lower than all the room fits alone, and where nothing fits less does not either.
        picked = None
        if level + self.rooms.most_bytes > self.budget_bytes:
            picked = self._picked(level)
        if picked is None:
            self.between(middle, high)
            return
        times = [(option, round(option.seconds * PICOSECONDS)) for _, option in picked[1]]
        time, hooks = sum(own for _, own in times), self.rooms.hooked.values()
        # Hooks that nothing came of are left away.
        least = sum(own for option, own in times if option not in hooks)
        if self.best is not None and least >= self.best.picoseconds:
            # Below it they are slower yet.
            self.between(middle, high)
            return
        answer = self._moved(*picked) if time >= self.at_least else None
        if answer is None:
            self.between(low, middle)
            return
        self.best = _faster(self.best, answer)
        self.between(middle, high)
        copy = round(self.space.profile.copy_seconds * PICOSECONDS)
        if self.best is not None and time + copy < self.best.picoseconds:
            # Slower before it is moved, and with fewer copies.
            self.between(low, middle)

    def _picked(self, level: int) -> tuple[Solution, list[tuple[Part, Option]]] | None:
        """What is picked for a level in the problem with more room; worked out once."""
        notebook, name = self.rooms.problem.notebook, f"{self.solver!r} at {level}"
        if name not in notebook:
            notebook[name] = self._solved(level)
        return notebook[name]  # type: ignore[return-value]  # what it was given above

    def _solved(self, level: int) -> tuple[Solution, list[tuple[Part, Option]]] | None:
        solver, problem = self.solver, self.rooms.problem
        # What the greedy drops beyond the lists has no room there: to ask for it takes time alone.
        solve = solver.listed if isinstance(solver, Optimal) else solver.solve
        solution = solve(problem, level)
        return (solution, self.space.picked_in(self.rooms, solution)) if solution.is_found else None

    def _moved(self, solution: Solution, picked: list[tuple[Part, Option]]) -> Answer | None:
        profile, hooks = self.space.profile, self.rooms.hooked.values()
        # What takes hooks for it moves something, whatever the budget: so its time is the same.
        owed = [place for place, (_, option) in enumerate(picked) if option in hooks]
        key = tuple(map(id, solution.picks))
        if key not in self.rooms.offloaders:
            own = Offloader(profile, link_of(profile), picked, self.least_seconds)
            self.rooms.offloaders[key] = own
        moved = self.rooms.offloaders[key].fitting(self.budget_bytes, owed)
        if moved is None:
            return None
        pairs = zip(picked, moved, strict=True)
        used = [
            (part, UNTOUCHED if option in hooks and not own else option)
            for (part, option), own in pairs
        ]
        return Answer(solution, used, tuple(moved), profile.copy_seconds)
