"""The exact answer, by a Pareto-list dynamic program along the chain.

A state after some calls is (bytes freed so far, time so far). Everything that comes later asks
only for enough freed bytes, so a state that frees no more and takes no less time than another can
go: no answer is lost. A state also goes when what it freed cannot suffice for the rest, or when
its time and a Lagrangian bound for the rest exceed a plan that is already known. Freed bytes above
what the rest can ever need count as equal, so equal blocks merge.

Times are whole picoseconds: sums of floats in another order differ in their last bits, and states
that are equal would not be seen to be.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leanstep.solvers.base import Outcome, Problem, Solution
from leanstep.solvers.relaxation import Relaxation, relax

Integers = npt.NDArray[np.int64]

PICOSECONDS = 1e12

# The first, thinned pass keeps this many states a call: enough for a plan near the optimum.
THINNED_STATES = 48


@dataclass(frozen=True, slots=True)
class Optimal:
    """Least seconds over all choices, proved; of equally fast ones the lowest peak.

    Takes milliseconds for tens of calls with tens of choices. The default.
    """

    name: str = "optimal"

    def solve(self, problem: Problem) -> Solution:
        """Walk the chain; then lower the peak as far as it costs no time."""
        if _required(problem)[0] > 0:
            return Solution(Outcome.INFEASIBLE)
        relaxation = relax(problem)
        best = _least_time(problem, relaxation)
        limit = _picoseconds(problem, best)
        return Solution(Outcome.OPTIMAL, _lowered(problem, best, limit, relaxation))

    def lowest(self, problem: Problem) -> Solution:
        """Find the lowest peak by bisection, then the least time there."""
        low = 0
        high = problem.peak_bytes((0,) * len(problem.calls))

        def fits(budget_bytes: int) -> bool:
            return _required(replace(problem, budget_bytes=budget_bytes))[0] <= 0

        return self.solve(replace(problem, budget_bytes=_least(fits, low, high)))


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number in a range for which a monotone claim holds; it holds for the highest."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _least_time(problem: Problem, relaxation: Relaxation | None) -> tuple[int, ...]:
    thinned = _walk(problem, relaxation, limit=None, most_states=THINNED_STATES)
    limit = None if thinned is None else _picoseconds(problem, thinned)
    best = _walk(problem, relaxation, limit=limit, most_states=None)
    assert best is not None, "the chain can be completed, so a walk must end"
    return best


def _lowered(
    problem: Problem, best: tuple[int, ...], limit: int, relaxation: Relaxation | None
) -> tuple[int, ...]:
    """The selection with the lowest peak that takes no more than the limit."""
    found = {"best": best}

    def fits(budget_bytes: int) -> bool:
        tighter = replace(problem, budget_bytes=budget_bytes)
        if budget_bytes >= problem.peak_bytes(found["best"]):
            return True
        if _required(tighter)[0] > 0:
            return False
        selection = _walk(tighter, relaxation, limit=limit, most_states=None)
        if selection is None:
            return False
        found["best"] = selection
        return True

    _least(fits, 0, problem.peak_bytes(best))
    return found["best"]


def _picoseconds(problem: Problem, selection: tuple[int, ...]) -> int:
    return sum(round(choice.seconds * PICOSECONDS) for choice in problem.picked(selection))


def _required(problem: Problem) -> list[int]:
    """The freed bytes after each number of calls without which the rest cannot fit."""
    budget = problem.budget_bytes
    required = [problem.gap_bytes[-1] - budget]
    for choices, gap in zip(problem.calls[::-1], problem.gap_bytes[-2::-1], strict=True):
        least = min(max(c.inside_bytes - budget, required[-1] - c.freed_bytes) for c in choices)
        required.append(max(gap - budget, least))
    return required[::-1]


def _sufficient(problem: Problem) -> list[int]:
    """The freed bytes after each number of calls with which the rest fits whatever is picked."""
    budget = problem.budget_bytes
    sufficient = [problem.gap_bytes[-1] - budget]
    for choices, gap in zip(problem.calls[::-1], problem.gap_bytes[-2::-1], strict=True):
        most = max(max(c.inside_bytes - budget, sufficient[-1] - c.freed_bytes) for c in choices)
        sufficient.append(max(gap - budget, most))
    return sufficient[::-1]


@dataclass(frozen=True, slots=True)
class _States:
    """The Pareto list after a call; `parent` and `place` lead back to how it was reached."""

    freed: Integers
    time: Integers
    parent: Integers
    place: Integers

    def at(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "_States":
        return _States(
            self.freed[chosen], self.time[chosen], self.parent[chosen], self.place[chosen]
        )


def _walk(
    problem: Problem, relaxation: Relaxation | None, *, limit: int | None, most_states: int | None
) -> tuple[int, ...] | None:
    """Go along the chain; None where no state within the limit is left."""
    required, sufficient = _required(problem), _sufficient(problem)
    constants, slopes = _rest_bounds(problem, relaxation)
    zero = np.zeros(1, dtype=np.int64)
    lists = [_States(zero, zero, zero, zero)]
    for index in range(len(problem.calls)):
        states = _extended(problem, index, lists[-1])
        states = states.at(states.freed >= required[index + 1])
        np.minimum(states.freed, sufficient[index + 1], out=states.freed)
        bounds = states.time + constants[index + 1] - slopes[index + 1] * states.freed
        if limit is not None:
            # The prices are floats: a millionth keeps what they cannot tell apart.
            states = states.at((bounds <= limit * (1 + 1e-6) + 1) & (states.time <= limit))
        elif most_states is not None and len(bounds) > most_states:
            states = states.at(_thinned(states, bounds, most_states))
        lists.append(_pareto(states))
        if len(lists[-1].time) == 0:
            return None
    return _read_back(lists)


def _extended(problem: Problem, index: int, states: _States) -> _States:
    """Every state with every choice that fits after it."""
    choices = problem.calls[index]
    freed = np.array([c.freed_bytes for c in choices], dtype=np.int64)
    times = np.array([round(c.seconds * PICOSECONDS) for c in choices], dtype=np.int64)
    needs = np.array([c.inside_bytes for c in choices], dtype=np.int64) - problem.budget_bytes
    fits = states.freed[:, None] >= needs[None, :]
    parent, place = np.nonzero(fits)
    return _States(
        states.freed[parent] + freed[place], states.time[parent] + times[place], parent, place
    )


def _thinned(states: _States, bounds: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.intp]:
    """The most promising states, and the one that frees most so that the walk can end."""
    promising = np.argpartition(bounds, most - 1)[:most]
    return np.union1d(promising, np.argmax(states.freed))


def _pareto(states: _States) -> _States:
    order = np.lexsort((states.time, -states.freed))
    times = states.time[order]
    fastest_before = np.minimum.accumulate(times)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = times[1:] < fastest_before[:-1]
    return states.at(order[keep])


def _read_back(lists: list[_States]) -> tuple[int, ...]:
    """The choices that led to the fastest last state."""
    state = int(np.argmin(lists[-1].time))
    selection = []
    for states in lists[:0:-1]:
        selection.append(int(states.place[state]))
        state = int(states.parent[state])
    return tuple(selection[::-1])


def _rest_bounds(
    problem: Problem, relaxation: Relaxation | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """After each number of calls, the rest takes at least `constant - slope * freed` picoseconds.

    Going backwards, `slope` is the sum of the prices of all later rows; a call then costs at least
    the minimum of its seconds, less what it frees for later rows, plus its own priced row.
    """
    num_calls = len(problem.calls)
    constants, slopes = np.zeros(num_calls + 1), np.zeros(num_calls + 1)
    if relaxation is None:
        return constants, slopes
    budget = problem.budget_bytes
    for index in range(num_calls - 1, -1, -1):
        gap_price = relaxation.gap_prices[index + 1]
        inside_price = relaxation.inside_prices[index]
        later = slopes[index + 1] + gap_price
        call = min(
            c.seconds - later * c.freed_bytes + inside_price * (c.inside_bytes - budget)
            for c in problem.calls[index]
        )
        gap = gap_price * (problem.gap_bytes[index + 1] - budget)
        constants[index] = constants[index + 1] + gap + call
        slopes[index] = later + inside_price
    return constants * PICOSECONDS, slopes * PICOSECONDS
