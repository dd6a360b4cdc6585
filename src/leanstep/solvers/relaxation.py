"""The linear relaxation of the choice of options: a lower bound, and prices that prune.

Calls may mix their choices. Beside the shares there is a variable for the bytes that are free after
each number of calls, in each era. It is bounded below by the gap behind these calls: gap - budget;
a row a call says that it is at least the call's mixed inside bytes - budget. Least time by HiGHS.
The multipliers of bounds and rows say what a freed byte is worth at each place of the chain; any
multipliers give a valid bound for the rest of the chain (Lagrange), these the best one.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import block_array, csr_array, eye_array

from leanstep.solvers.chain import Chain

Floats = npt.NDArray[np.float64]
Matrix = csr_array[np.float64, tuple[int, int]]


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
    # HiGHS wants numbers near one: bytes are 1e9, picoseconds too.
    time_scale, byte_scale = max(float(times.max()), 1.0), max(float(chain.gaps.max()), 1.0)
    num_free = num_eras * (num_calls + 1)
    insides, equalities = _rows(chain, byte_scale)
    # The stubs know no sparse rows; HiGHS does.
    answer = linprog(  # type: ignore[call-overload]
        np.concatenate([times / time_scale, np.zeros(num_free)]),
        A_ub=insides,
        b_ub=np.full(num_eras * num_calls, budget_bytes / byte_scale),
        A_eq=equalities,
        b_eq=np.concatenate([np.ones(num_calls), np.zeros(num_eras * num_calls)]),
        bounds=_ranges(chain, budget_bytes, byte_scale),
        method="highs",
    )
    if not answer.success or answer.fun is None:
        return None
    scale = time_scale / byte_scale
    gap_prices = np.maximum(0.0, answer.lower.marginals[len(times) :]) * scale
    gap_prices = gap_prices.reshape(num_eras, num_calls + 1)
    # Nothing is free before the first call: its bound is no row.
    gap_prices[:, 0] = 0.0
    inside_prices = np.maximum(0.0, -answer.ineqlin.marginals) * scale
    return Relaxation(
        bound_picoseconds=max(0.0, answer.fun * time_scale),
        gap_prices=gap_prices,
        inside_prices=inside_prices.reshape(num_eras, num_calls),
    )


def _rows(chain: Chain, byte_scale: float) -> tuple[Matrix, Matrix]:
    """The insides, `mixed inside - free <= budget`, and what defines shares and free bytes."""
    num_calls = len(chain.links)
    sizes = [len(link.places) for link in chain.links]
    call_of, column = np.repeat(np.arange(num_calls), sizes), np.arange(sum(sizes))
    shape = (num_calls, len(column))

    def mixed(numbers: list[npt.NDArray[np.int64]]) -> Matrix:
        entries = np.concatenate(numbers).astype(float) / byte_scale
        return csr_array((entries, (call_of, column)), shape=shape)

    before = eye_array(num_calls, num_calls + 1, format="csr")
    after = eye_array(num_calls, num_calls + 1, k=1, format="csr")
    insides, steps = [], []
    for era in range(chain.num_eras):
        others = [None] * era, [None] * (chain.num_eras - era - 1)
        inside = [np.maximum(link.inside[era], 0) for link in chain.links]
        insides.append([mixed(inside), *others[0], -before, *others[1]])
        freed = [link.freed[era] for link in chain.links]
        steps.append([-mixed(freed), *others[0], after - before, *others[1]])
    one_each = csr_array((np.ones(len(column)), (call_of, column)), shape=shape)
    equalities = block_array([[one_each, *[None] * chain.num_eras], *steps], format="csr")
    return block_array(insides, format="csr"), equalities


def _ranges(chain: Chain, budget_bytes: int, byte_scale: float) -> Floats:
    """The range of each share, and of the free bytes after each number of calls.

    A choice that fits after no selection at all has no share.
    """
    ranges: list[tuple[float, float]] = []
    most_freed = np.zeros((chain.num_eras, 1), dtype=np.int64)
    for link in chain.links:
        for place in range(len(link.places)):
            fits = bool(np.all(link.inside[:, [place]] - most_freed <= budget_bytes))
            ranges.append((0.0, float(fits)))
        most_freed += link.freed.max(axis=1, keepdims=True)
    for gaps in chain.gaps:
        needs = np.maximum((gaps - budget_bytes) / byte_scale, -np.inf)
        # Before the first call nothing is free, and that must do.
        ranges.append((0.0, 0.0) if needs[0] <= 0 else (1.0, 0.0))
        ranges.extend((float(need), np.inf) for need in needs[1:])
    return np.array(ranges)
