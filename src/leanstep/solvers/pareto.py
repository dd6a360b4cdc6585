"""The exact answer on a chain, by a Pareto-list dynamic program.

A state after some calls is (bytes freed so far in each era, time so far). Everything that comes
later asks only for enough freed bytes, so a state that frees no more and takes no less time than
another can go: no answer is lost. A state also goes when what it freed cannot suffice for the rest,
or when its time and a Lagrangian bound for the rest exceed a plan that is already known. Freed
bytes above what the rest can ever need count as equal, so equal blocks merge.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leanstep.solvers.base import Bytes
from leanstep.solvers.chain import Chain
from leanstep.solvers.relaxation import Relaxation, relax

# The first, thinned pass keeps this many states a call: enough for a plan near the optimum.
THINNED_STATES = 200

Selection = tuple[int, ...]
Floats = npt.NDArray[np.float64]


def fastest(chain: Chain, budget_bytes: int) -> Selection | None:
    """The selection with the least time, and of those the lowest peak; None if none fits."""
    if _required(chain, budget_bytes)[0].max() > 0:
        return None
    relaxation = relax(chain, budget_bytes)
    best = _least_time(chain, budget_bytes, relaxation)
    return _lowered(chain, best, relaxation)


def lowest_peak_bytes(chain: Chain) -> int:
    """The lowest level that any selection reaches."""
    high = chain.peak_bytes([0] * len(chain.links))
    return _least(lambda budget_bytes: _required(chain, budget_bytes)[0].max() <= 0, 0, high)


def picoseconds(chain: Chain, selection: Sequence[int]) -> int:
    """The time of a selection."""
    pairs = zip(chain.links, selection, strict=True)
    return sum(int(link.picoseconds[place]) for link, place in pairs)


def _least(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number in a range for which a monotone claim holds; it holds for the highest."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _least_time(chain: Chain, budget_bytes: int, relaxation: Relaxation | None) -> Selection:
    thinned = _walk(chain, budget_bytes, relaxation, limit=None, most_states=THINNED_STATES)
    limit = None if thinned is None else picoseconds(chain, thinned)
    best = _walk(chain, budget_bytes, relaxation, limit=limit, most_states=None)
    assert best is not None, "the chain can be completed, so a walk must end"
    return best


def _lowered(chain: Chain, best: Selection, relaxation: Relaxation | None) -> Selection:
    """The selection with the lowest peak that takes no more time."""
    limit, low, high = picoseconds(chain, best), 0, chain.peak_bytes(best)
    asked = high - 1
    while low < high:
        lower = None
        if _required(chain, asked)[0].max() <= 0:
            lower = _walk(chain, asked, relaxation, limit=limit, most_states=None)
        if lower is None:
            low = asked + 1
        else:
            best, high = lower, chain.peak_bytes(lower)
        # Mostly nothing lower is as fast: the first question settles it.
        asked = (low + high) // 2
    return best


def _required(chain: Chain, budget_bytes: int) -> list[Bytes]:
    """The freed bytes after each number of calls without which the rest cannot fit, by era."""
    return _demands(chain, budget_bytes, np.minimum.reduce)


def _sufficient(chain: Chain, budget_bytes: int) -> list[Bytes]:
    """The freed bytes after each number of calls with which the rest fits whatever is picked."""
    return _demands(chain, budget_bytes, np.maximum.reduce)


def _demands(chain: Chain, budget_bytes: int, over_choices: Callable[..., Bytes]) -> list[Bytes]:
    demands = [chain.gaps[:, -1] - budget_bytes]
    for number in range(len(chain.links) - 1, -1, -1):
        link = chain.links[number]
        needs = np.maximum(link.inside - budget_bytes, demands[-1][:, None] - link.freed)
        here = over_choices(needs, axis=1)
        demands.append(np.maximum(chain.gaps[:, number] - budget_bytes, here))
    return demands[::-1]


@dataclass(frozen=True, slots=True)
class _States:
    """The Pareto list after a call; `parent` and `place` lead back to how it was reached.

    `freed` has a row an era and a column a state.
    """

    freed: Bytes
    time: Bytes
    parent: Bytes
    place: Bytes

    def at(self, chosen: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "_States":
        return _States(
            self.freed[:, chosen], self.time[chosen], self.parent[chosen], self.place[chosen]
        )


def _walk(
    chain: Chain,
    budget_bytes: int,
    relaxation: Relaxation | None,
    *,
    limit: int | None,
    most_states: int | None,
) -> Selection | None:
    """Go along the chain; None where no state within the limit is left."""
    required = _required(chain, budget_bytes)
    sufficient = _sufficient(chain, budget_bytes)
    constants, slopes, costs = _rest_bounds(chain, budget_bytes, relaxation)
    zero = np.zeros(1, dtype=np.int64)
    lists = [_States(np.zeros((chain.num_eras, 1), dtype=np.int64), zero, zero, zero)]
    for index in range(len(chain.links)):
        able = np.arange(len(costs[index]))
        if limit is not None:
            # What is this much dearer than the best choice here is in no plan within the limit.
            able = np.flatnonzero(costs[index] + constants[0] <= limit * (1 + 1e-6) + 1)
        states = _extended(chain, budget_bytes, index, lists[-1], able)
        states = states.at(_in_every_era(states.freed >= required[index + 1][:, None]))
        np.minimum(states.freed, sufficient[index + 1][:, None], out=states.freed)
        bounds = states.time + constants[index + 1] - slopes[index + 1] @ states.freed
        if limit is not None:
            # The prices are floats: a millionth keeps what they cannot tell apart.
            states = states.at((bounds <= limit * (1 + 1e-6) + 1) & (states.time <= limit))
        elif most_states is not None and len(bounds) > most_states:
            states = states.at(_thinned(states, bounds, most_states))
        lists.append(_pareto(states))
        if len(lists[-1].time) == 0:
            return None
    return _read_back(lists)


def _extended(
    chain: Chain,
    budget_bytes: int,
    index: int,
    states: _States,
    able: npt.NDArray[np.intp],
) -> _States:
    """Every state with every able choice that fits after it."""
    link = chain.links[index]
    needs = link.inside[:, able] - budget_bytes
    fits = _in_every_era(states.freed[:, :, None] >= needs[:, None, :])
    parent, column = np.nonzero(fits)
    place = able[column]
    return _States(
        states.freed[:, parent] + link.freed[:, place],
        states.time[parent] + link.picoseconds[place],
        parent,
        place,
    )


def _in_every_era(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    everywhere: npt.NDArray[np.bool_] = np.logical_and.reduce(holds, axis=0)
    return everywhere


def _thinned(states: _States, bounds: npt.NDArray[np.float64], most: int) -> npt.NDArray[np.intp]:
    """The most promising states, and those that free most so that the walk can end."""
    promising = np.argpartition(bounds, most - 1)[:most]
    return np.union1d(promising, np.argmax(states.freed, axis=1))


def _pareto(states: _States) -> _States:
    """The states that no other beats in freed bytes of every era and in time."""
    if len(states.freed) == 1:
        return states.at(_best(states.freed[0], states.time))
    first_eras = np.unique(states.freed[0])[::-1]
    kept = np.zeros(0, dtype=np.intp)
    # From most to fewest bytes freed in the first era: those before beat all that follow there.
    for freed_bytes in first_eras:
        group = np.flatnonzero(states.freed[0] == freed_bytes)
        both = np.concatenate([kept, group])
        best = both[_best(states.freed[1, both], states.time[both])]
        kept = np.union1d(kept, np.intersect1d(best, group)) if len(kept) else best
    return states.at(kept)


def _best(freed: Bytes, time: Bytes) -> npt.NDArray[np.intp]:
    """The places that no other beats in freed bytes and time; of equal ones the first."""
    order = np.lexsort((time, -freed))
    times = time[order]
    fastest_before = np.minimum.accumulate(times)
    keep = np.ones(len(order), dtype=bool)
    keep[1:] = times[1:] < fastest_before[:-1]
    best: npt.NDArray[np.intp] = order[keep]
    return best


def _read_back(lists: list[_States]) -> Selection:
    """The choices that led to the fastest last state."""
    state = int(np.argmin(lists[-1].time))
    selection = []
    for states in lists[:0:-1]:
        selection.append(int(states.place[state]))
        state = int(states.parent[state])
    return tuple(selection[::-1])


def _rest_bounds(
    chain: Chain, budget_bytes: int, relaxation: Relaxation | None
) -> tuple[Floats, Floats, list[Floats]]:
    """After each number of calls, the rest takes at least `constant - slope @ freed` picoseconds.

    Going backwards, `slope` is the sum of the prices of all later rows of an era; a call then costs
    at least the minimum of its time, less what it frees for later rows, plus its own priced rows.
    The third answer says for each choice of each call how much dearer it is than that minimum.
    """
    num_calls = len(chain.links)
    constants, slopes = np.zeros(num_calls + 1), np.zeros((num_calls + 1, chain.num_eras))
    dearer: list[Floats] = [np.zeros(len(link.places)) for link in chain.links]
    if relaxation is None:
        return constants, slopes, dearer
    for index in range(num_calls - 1, -1, -1):
        link = chain.links[index]
        gap_prices = relaxation.gap_prices[:, index + 1]
        inside_prices = relaxation.inside_prices[:, index]
        later = slopes[index + 1] + gap_prices
        costs = link.picoseconds - later @ link.freed + inside_prices @ (link.inside - budget_bytes)
        gap = gap_prices @ (chain.gaps[:, index + 1] - budget_bytes)
        dearer[index] = costs - costs.min()
        constants[index] = constants[index + 1] + gap + costs.min()
        slopes[index] = later + inside_prices
    return constants, slopes, dearer
