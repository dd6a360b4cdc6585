"""The linear relaxation of the choice of options: a lower bound, and prices that prune.

Calls may mix their choices. In each era one row a gap: freed bytes of the open calls >= gap -
budget; one row a call: freed bytes of the calls before it >= its mixed inside bytes - budget. Least
time by HiGHS. The multipliers of the rows say what a freed byte is worth at each place of the chain; any
multipliers give a valid bound for the rest of the chain (Lagrange), these the best one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array

from leanstep.solvers.chain import Chain

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Relaxation:
    """The least picoseconds of the mixed problem, and the price of a byte in each row.

    `gap_prices` and `inside_prices` have a row an era.
    """

    bound_picoseconds: float
    gap_prices: Floats
    inside_prices: Floats


def relax(chain: Chain, budget_bytes: int) -> Relaxation | None:
    """Solve the relaxation; None where even mixing does not fit."""
    num_calls, num_eras = len(chain.links), chain.num_eras
    if num_calls == 0:
        return Relaxation(0.0, np.zeros((num_eras, 1)), np.zeros((num_eras, 0)))
    times = np.concatenate([link.picoseconds for link in chain.links]).astype(float)
    rows, needs, matters = _rows(chain, budget_bytes)
    # HiGHS wants numbers near one: bytes are 1e9, picoseconds too.
    time_scale, byte_scale = max(times.max(), 1.0), max(np.abs(rows).max(initial=0), 1.0)
    answer = linprog(
        times / time_scale,
        A_ub=csr_array(-rows / byte_scale),
        b_ub=-needs / byte_scale,
        A_eq=_one_choice_each(chain),
        b_eq=np.ones(num_calls),
        bounds=_ranges(chain, budget_bytes),
        method="highs",
    )
    if not answer.success or answer.fun is None:
        return None
    prices = np.zeros(len(matters))
    prices[matters] = np.maximum(0.0, -answer.ineqlin.marginals) * (time_scale / byte_scale)
    by_era = prices.reshape(num_eras, 2 * num_calls + 1)
    return Relaxation(
        bound_picoseconds=max(0.0, answer.fun * time_scale),
        gap_prices=by_era[:, : num_calls + 1],
        inside_prices=by_era[:, num_calls + 1 :],
    )


def _call_of(chain: Chain) -> npt.NDArray[np.intp]:
    return np.repeat(np.arange(len(chain.links)), [len(link.places) for link in chain.links])


def _rows(chain: Chain, budget_bytes: int) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """The rows `freed - mixed inside >= need` that matter: in each era gaps first, then calls."""
    call_of, order = _call_of(chain), np.arange(len(chain.links) + 1)
    is_before, is_own = call_of[None, :] < order[:, None], call_of[None, :] == order[:-1, None]
    all_rows, all_needs = [], []
    for era in range(chain.num_eras):
        freed = np.concatenate([link.freed[era] for link in chain.links]).astype(float)
        inside = np.concatenate([link.inside[era] for link in chain.links]).astype(float)
        gaps = np.where(is_before, freed[None, :], 0.0)
        insides = gaps[:-1] - np.where(is_own, np.maximum(inside, 0.0)[None, :], 0.0)
        all_rows.extend([gaps, insides])
        all_needs.append(chain.gaps[era].astype(float) - budget_bytes)
        all_needs.append(np.full(len(chain.links), -float(budget_bytes)))
    rows, needs = np.vstack(all_rows), np.concatenate(all_needs)
    starts = np.searchsorted(call_of, order[:-1])
    # A row that no selection can break says nothing.
    matters = np.minimum.reduceat(rows, starts, axis=1).sum(axis=1) < needs
    return rows[matters], needs[matters], matters


def _ranges(chain: Chain, budget_bytes: int) -> list[tuple[float, float]]:
    """What share each choice may have: none where it fits after no selection at all."""
    ranges: list[tuple[float, float]] = []
    most_freed = np.zeros((chain.num_eras, 1), dtype=np.int64)
    for link in chain.links:
        fits = (link.inside - most_freed <= budget_bytes).all(axis=0)
        ranges.extend((0.0, float(share)) for share in fits)
        most_freed += link.freed.max(axis=1, keepdims=True)
    return ranges


def _one_choice_each(chain: Chain) -> csr_array[np.float64, tuple[int, int]]:
    rows = (_call_of(chain)[None, :] == np.arange(len(chain.links))[:, None]).astype(float)
    return csr_array(rows)
