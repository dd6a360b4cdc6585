"""Answers that fit because something moves to the host: solved with more room, then moved."""

from dataclasses import dataclass

from leanstep.ir import Engine, Offload
from leanstep.planner.offload import capacity_bytes, find_offload
from leanstep.planner.option import Option
from leanstep.planner.replay_options import hooked
from leanstep.planner.segments import Part
from leanstep.planner.space import Space
from leanstep.solvers.base import Solution, Solver
from leanstep.solvers.optimal import Optimal

# How much of what the link could move is tried first; then halfway between what was too much and
# what was not, as often as `MOST_SHARES` allows: each is a solve.
FIRST_SHARES = (1.0, 0.9)
MOST_SHARES = 5
# And where every copy costs time, what it would be to move less.
SMALLER_SHARES = (0.5, 0.25, 0.12, 0.06)


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


def with_the_host(
    space: Space, solver: Solver, budget_bytes: int, least_seconds: float
) -> Answer | None:
    """An answer that moves something to the host; where copies cost time, also with fewer."""
    best = with_more_room(space, solver, budget_bytes, least_seconds)
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


def with_more_room(
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
