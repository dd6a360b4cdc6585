"""Why no plan fits a budget, and what can be asked for instead."""

from collections.abc import Sequence

from leanstep.errors import BudgetError
from leanstep.ir import Timeline
from leanstep.ir.exclusion import left_out
from leanstep.planner.lower import effects
from leanstep.planner.offload import LEAST_SECONDS, capacity_bytes
from leanstep.planner.overrides import Rule
from leanstep.planner.space import Space, prepared
from leanstep.planner.with_host import with_the_host
from leanstep.simulator import peak_op, timeline
from leanstep.solvers.base import Solver

# The least peak with the host's help is found to within this share of it, by trying budgets.
FLOOR_TOLERANCE = 0.002
FLOOR_TRIALS = 9


def refusal(space: Space, solver: Solver, budget_bytes: int, *, offload: bool) -> BudgetError:
    """What is raised where no plan of a space fits."""
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
        if with_the_host(space, solver, middle, LEAST_SECONDS) is not None:
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
    freer = prepared(space.profile, space.engine, left, exact=space.exact)
    return solver.solve(freer.problem, budget_bytes).is_found
