"""Find the fastest selection whose exact peak is within the budget.

A solver's level is never below the exact one, so its answer for a budget fits. But where it is
above, the answer for a somewhat larger budget may fit too, and be faster. So the answers are tried
from the largest budget that can matter downwards, and the first whose exact peak fits is taken. An
answer is a step function of the budget alone; hence more budget is never slower, and less budget
never higher. The last of all is the lowest selection, which does not depend on the budget: when
even that does not fit, its exact peak is the floor, and asking for the floor finds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanstep.planner.chain import Chain
from leanstep.solvers import Outcome, Solver, relax

# Answers tried above the budget before taking the one for the budget itself. Beyond that more
# budget could in rare cases be slower; no recorded model has needed more than a few.
MOST_ANSWERS_ABOVE = 12

MOST_SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Selected:
    """A selection with its exact peak; `bound_seconds` holds for every selection that fits."""

    selection: tuple[int, ...]
    peak_bytes: int
    seconds: float
    bound_seconds: float = 0.0


def select(chain: Chain, solver: Solver, budget_bytes: int) -> Selected:
    """Return the fastest selection that fits, else the one with the lowest peak."""
    lowest = find_lowest(chain, solver)
    if lowest.peak_bytes > budget_bytes:
        return lowest
    fitting = [lowest]
    for answer in _answers(chain, solver, budget_bytes):
        if answer.peak_bytes <= budget_bytes:
            fitting.append(answer)
            break
    best = min(fitting, key=lambda selected: (selected.seconds, selected.peak_bytes))
    return replace(best, bound_seconds=min(best.seconds, _bound_seconds(chain, budget_bytes)))


def find_lowest(chain: Chain, solver: Solver) -> Selected:
    """Return the selection with the lowest exact peak that is found."""
    solution = solver.lowest(chain.problem)
    lowest = _selected(chain, solution.selection)
    if solution.outcome is not Outcome.OPTIMAL:
        return lowest
    # The solver proved its own level least; where levels are exact there is nothing to gain.
    if chain.slack_bytes(lowest.peak_bytes - 1) == 0:
        return lowest
    return _descended(chain, lowest)


def _answers(chain: Chain, solver: Solver, budget_bytes: int) -> Iterator[Selected]:
    """The solver's answers from the largest budget that can matter down to the given one."""
    level = budget_bytes + chain.slack_bytes(budget_bytes)
    for _ in range(MOST_ANSWERS_ABOVE):
        if level <= budget_bytes:
            break
        solution = solver.solve(replace(chain.problem, budget_bytes=level))
        if not solution.is_found:
            return
        yield _selected(chain, solution.selection)
        level = min(level, chain.problem.peak_bytes(solution.selection)) - 1
    solution = solver.solve(replace(chain.problem, budget_bytes=min(level, budget_bytes)))
    if solution.is_found:
        yield _selected(chain, solution.selection)


def _selected(chain: Chain, selection: tuple[int, ...]) -> Selected:
    return Selected(selection, chain.peak_bytes(selection), chain.problem.seconds(selection))


def _bound_seconds(chain: Chain, budget_bytes: int) -> float:
    """A lower bound for all selections whose exact peak fits."""
    level = budget_bytes + chain.slack_bytes(budget_bytes)
    relaxation = relax(replace(chain.problem, budget_bytes=level))
    return 0.0 if relaxation is None else relaxation.bound_seconds


def _descended(chain: Chain, start: Selected) -> Selected:
    """Change one call at a time while the exact peak falls."""
    best = start
    for _ in range(MOST_SWEEPS):
        before = best.peak_bytes
        for index, choices in enumerate(chain.problem.calls):
            for place in range(len(choices)):
                selection = (*best.selection[:index], place, *best.selection[index + 1 :])
                best = min(
                    best, _selected(chain, selection), key=lambda s: (s.peak_bytes, s.seconds)
                )
        if best.peak_bytes == before:
            break
    return best
