"""The linear relaxation of the choice of options: a lower bound, and prices that prune.

Calls may mix their choices. One row a gap: freed bytes of the open calls >= gap - budget; one row
a call: freed bytes of the calls before it >= its mixed inside bytes - budget. Least seconds by
HiGHS. The multipliers of the rows say what a freed byte is worth at each place of the chain; any
multipliers give a valid bound for the rest of the chain (Lagrange), these the best one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from leanstep.solvers.base import Problem

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The least seconds of the mixed problem, and the price of a byte in each row."""

    bound_seconds: float
    gap_prices: Floats
    inside_prices: Floats


def relax(problem: Problem) -> Relaxation | None:
    """Solve the relaxation; None where even mixing does not fit."""
    num_calls = len(problem.calls)
    if num_calls == 0:
        return Relaxation(0.0, np.zeros(1), np.zeros(0))
    seconds = np.array([c.seconds for choices in problem.calls for c in choices])
    rows, needs = _rows(problem)
    # HiGHS wants numbers near one: bytes and seconds are 1e9 and 1e-3.
    time_scale, byte_scale = max(seconds.max(), 1e-12), max(np.abs(rows).max(), 1.0)
    answer = linprog(
        seconds / time_scale,
        A_ub=-rows / byte_scale,
        b_ub=-needs / byte_scale,
        A_eq=_one_choice_each(problem),
        b_eq=np.ones(num_calls),
        bounds=_ranges(problem),
        method="highs",
    )
    if not answer.success or answer.fun is None:
        return None
    prices = np.maximum(0.0, -answer.ineqlin.marginals) * (time_scale / byte_scale)
    return Relaxation(
        bound_seconds=max(0.0, answer.fun * time_scale),
        gap_prices=prices[: num_calls + 1],
        inside_prices=prices[num_calls + 1 :],
    )


def _rows(problem: Problem) -> tuple[Floats, Floats]:
    """The rows `freed - mixed inside >= need`: gaps first, then calls."""
    freed = np.array([c.freed_bytes for choices in problem.calls for c in choices], dtype=float)
    inside = np.array([c.inside_bytes for choices in problem.calls for c in choices], dtype=float)
    call_of = np.repeat(np.arange(len(problem.calls)), [len(c) for c in problem.calls])
    order = np.arange(len(problem.calls) + 1)
    gaps = np.where(call_of[None, :] < order[:, None], freed[None, :], 0.0)
    insides = gaps[:-1] - np.where(call_of[None, :] == order[:-1, None], inside[None, :], 0.0)
    gap_needs = np.array(problem.gap_bytes, dtype=float) - problem.budget_bytes
    inside_needs = np.full(len(problem.calls), -float(problem.budget_bytes))
    return np.vstack([gaps, insides]), np.concatenate([gap_needs, inside_needs])


def _ranges(problem: Problem) -> list[tuple[float, float]]:
    """What share each choice may have: none where it fits after no selection at all."""
    ranges: list[tuple[float, float]] = []
    most_freed = 0
    for choices in problem.calls:
        for choice in choices:
            fits = choice.inside_bytes - most_freed <= problem.budget_bytes
            ranges.append((0.0, 1.0 if fits else 0.0))
        most_freed += max(choice.freed_bytes for choice in choices)
    return ranges


def _one_choice_each(problem: Problem) -> Floats:
    sizes = [len(choices) for choices in problem.calls]
    call_of = np.repeat(np.arange(len(sizes)), sizes)
    rows: Floats = (call_of[None, :] == np.arange(len(sizes))[:, None]).astype(float)
    return rows
