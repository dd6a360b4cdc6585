"""The linear relaxation of the choice of options: a lower bound, and prices that prune.

Calls may mix their choices. One row a gap: freed bytes of the open calls >= gap - budget; one row
a call: freed bytes of the calls before it >= its mixed inside bytes - budget. Least time by
HiGHS. The multipliers of the rows say what a freed byte is worth at each place of the chain; any
multipliers give a valid bound for the rest of the chain (Lagrange), these the best one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from leanstep.solvers.chain import Chain

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The least picoseconds of the mixed problem, and the price of a byte in each row."""

    bound_picoseconds: float
    gap_prices: Floats
    inside_prices: Floats


def relax(chain: Chain, budget_bytes: int) -> Relaxation | None:
    """Solve the relaxation; None where even mixing does not fit."""
    num_calls = len(chain.links)
    if num_calls == 0:
        return Relaxation(0.0, np.zeros(1), np.zeros(0))
    times = np.concatenate([link.picoseconds for link in chain.links]).astype(float)
    rows, needs = _rows(chain, budget_bytes)
    # HiGHS wants numbers near one: bytes are 1e9, picoseconds too.
    time_scale, byte_scale = max(times.max(), 1.0), max(np.abs(rows).max(), 1.0)
    answer = linprog(
        times / time_scale,
        A_ub=-rows / byte_scale,
        b_ub=-needs / byte_scale,
        A_eq=_one_choice_each(chain),
        b_eq=np.ones(num_calls),
        bounds=_ranges(chain, budget_bytes),
        method="highs",
    )
    if not answer.success or answer.fun is None:
        return None
    prices = np.maximum(0.0, -answer.ineqlin.marginals) * (time_scale / byte_scale)
    return Relaxation(
        bound_picoseconds=max(0.0, answer.fun * time_scale),
        gap_prices=prices[: num_calls + 1],
        inside_prices=prices[num_calls + 1 :],
    )


def _call_of(chain: Chain) -> npt.NDArray[np.intp]:
    return np.repeat(np.arange(len(chain.links)), [len(link.places) for link in chain.links])


def _rows(chain: Chain, budget_bytes: int) -> tuple[Floats, Floats]:
    """The rows `freed - mixed inside >= need`: gaps first, then calls."""
    freed = np.concatenate([link.freed for link in chain.links]).astype(float)
    inside = np.concatenate([link.inside for link in chain.links]).astype(float)
    call_of, order = _call_of(chain), np.arange(len(chain.links) + 1)
    gaps = np.where(call_of[None, :] < order[:, None], freed[None, :], 0.0)
    insides = gaps[:-1] - np.where(call_of[None, :] == order[:-1, None], inside[None, :], 0.0)
    gap_needs = chain.gaps.astype(float) - budget_bytes
    inside_needs = np.full(len(chain.links), -float(budget_bytes))
    return np.vstack([gaps, insides]), np.concatenate([gap_needs, inside_needs])


def _ranges(chain: Chain, budget_bytes: int) -> list[tuple[float, float]]:
    """What share each choice may have: none where it fits after no selection at all."""
    ranges: list[tuple[float, float]] = []
    most_freed = 0
    for link in chain.links:
        fits = link.inside - most_freed <= budget_bytes
        ranges.extend((0.0, float(share)) for share in fits)
        most_freed += int(link.freed.max())
    return ranges


def _one_choice_each(chain: Chain) -> Floats:
    rows: Floats = (_call_of(chain)[None, :] == np.arange(len(chain.links))[:, None]).astype(float)
    return rows
