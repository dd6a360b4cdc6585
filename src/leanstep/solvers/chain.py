"""The problem as a chain of block calls: one number of freed bytes a call.

While a call is *open*, between the end of its forward pass and the beginning of its backward pass,
its choice lowers the level by `freed`. Backward runs in the opposite order, so the open calls at
any point are the first few of the chain. Every stretch is then either inside one call (`inside`:
the highest level there with nothing else freed; the calls before it are open) or in the gap behind
an open prefix of the chain.

Not every backward pass is that orderly. What other calls do in a stretch beyond their freed bytes
is added at its worst over their choices. So the chain's level is never below the exact one,
whatever the order of backward; `slack_bytes` bounds by how much it can be above.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from leanstep.solvers.base import Bytes, Call, Choice, Places, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The choices of one call as numbers, one array entry each; `places` are theirs in the call."""

    places: Places
    picoseconds: Bytes
    freed: Bytes
    inside: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Every call as a link; `gaps[i]` is the highest level while just the first i are open."""

    links: tuple[Link, ...]
    gaps: Bytes
    highest: Bytes
    slack: Bytes

    def slack_bytes(self, budget_bytes: int) -> int:
        """How far the chain's peak can be above the exact one, where the budget matters."""
        return int(self.slack[self.highest + self.slack > budget_bytes].max(initial=0))

    def peak_bytes(self, selection: Sequence[int]) -> int:
        """The chain's level for one entry of each link."""
        freed, peak = 0, int(self.gaps[0])
        for link, place, gap in zip(self.links, selection, self.gaps[1:], strict=True):
            peak = max(peak, int(link.inside[place]) - freed)
            freed += int(link.freed[place])
            peak = max(peak, int(gap) - freed)
        return peak

    def picks(self, problem: Problem, selection: Sequence[int]) -> tuple[Choice, ...]:
        """The choices of the problem at the given entries."""
        return tuple(
            call.choices[int(link.places[place])]
            for call, link, place in zip(problem.calls, self.links, selection, strict=True)
        )


def chain_of(problem: Problem) -> Chain:
    """The problem as a chain; worked out once."""
    found = problem.notebook.get("chain")
    if not isinstance(found, Chain):
        found = problem.notebook["chain"] = _reduced(problem)
    return found


@dataclass(frozen=True, slots=True)
class _Window:
    """The stretches [start, stop) of a call's forward pass and [first, last) of its backward."""

    start: int
    stop: int
    first: int
    last: int


def _window(call: Call) -> _Window:
    touched = [int(np.max(np.nonzero(c.deltas)[0], initial=-1)) for c in call.choices]
    replayed = [int(c.replay_stretches.max(initial=-1)) for c in call.choices]
    return _Window(call.start, call.stop, call.first, max(*touched, *replayed) + 1)


def _reduced(problem: Problem) -> Chain:
    tops, calls = problem.tops, problem.calls
    windows = [_window(call) for call in calls]
    owner, prefix = _owners(len(tops), windows)
    raised = _with_foreign_replays(problem, owner)
    others, slack, highest = np.zeros_like(tops), np.zeros_like(tops), raised.copy()
    freed = [_freed(tops, call, window) for call, window in zip(calls, windows, strict=True)]
    for index, call in enumerate(calls):
        deltas = np.stack([choice.deltas for choice in call.choices])
        highest += deltas.max(axis=0)
        relative = np.where(prefix > index, deltas + freed[index][:, None], deltas)
        relative[:, owner == index] = 0
        most = relative.max(axis=0)
        others += most
        slack += most - relative.min(axis=0)
    links = tuple(
        _link(call, freed[index], others, raised, owner == index)
        for index, call in enumerate(calls)
    )
    levels = np.where(owner < 0, raised + others, 0)
    gaps = [int(levels[prefix == index].max(initial=0)) for index in range(len(calls) + 1)]
    return Chain(links, np.array(gaps, dtype=np.int64), highest, slack)


def _owners(num_stretches: int, windows: Sequence[_Window]) -> tuple[Places, Places]:
    """Give each stretch to a call, or to none (-1), and say how many first calls are open there."""
    places = np.arange(num_stretches)
    is_prefix_open = np.ones(num_stretches, dtype=bool)
    prefix = np.zeros(num_stretches, dtype=np.intp)
    owner = np.full(num_stretches, -1, dtype=np.intp)
    prefixes = []
    for window in windows:
        prefixes.append(is_prefix_open.copy())
        is_prefix_open &= (window.stop <= places) & (places < window.first)
        prefix += is_prefix_open
    # Where the backward windows of two calls overlap, the one that began last replays now.
    for index in sorted(range(len(windows)), key=lambda index: windows[index].first):
        window = windows[index]
        inside = (window.start <= places) & (places < window.stop)
        inside |= (window.first <= places) & (places < window.last)
        # A call can speak for a stretch only if all calls before it are open there.
        owner[inside & prefixes[index]] = index
    return owner, prefix


def _with_foreign_replays(problem: Problem, owner: Places) -> Bytes:
    """The tops, raised by what any choice of a call replays in a stretch that is not its own."""
    raised = problem.tops.copy()
    for index, call in enumerate(problem.calls):
        for choice in call.choices:
            foreign = owner[choice.replay_stretches] != index
            stretches = choice.replay_stretches[foreign]
            np.maximum.at(raised, stretches, choice.replay_tops[foreign])
    return raised


def _freed(tops: Bytes, call: Call, window: _Window) -> Bytes:
    """The bytes each choice frees where the untouched step is highest while the call is open."""
    if window.first <= window.stop:
        return np.zeros(len(call.choices), dtype=np.int64)
    place = window.stop + int(np.argmax(tops[window.stop : window.first]))
    return np.array([-choice.deltas[place] for choice in call.choices], dtype=np.int64)


def _link(
    call: Call, freed: Bytes, others: Bytes, tops: Bytes, is_own: npt.NDArray[np.bool_]
) -> Link:
    own = np.flatnonzero(is_own)
    bases = (tops + others)[own]
    inside = []
    for choice in call.choices:
        levels = bases + choice.deltas[own]
        here = is_own[choice.replay_stretches]
        stretches = choice.replay_stretches[here]
        replays = choice.replay_tops[here] + others[stretches] + choice.deltas[stretches]
        inside.append(max(int(levels.max(initial=0)), int(replays.max(initial=0))))
    seconds = np.array([choice.picoseconds for choice in call.choices], dtype=np.int64)
    return _undominated(seconds, freed, np.array(inside, dtype=np.int64))


def _undominated(picoseconds: Bytes, freed: Bytes, inside: Bytes) -> Link:
    """The entries that are better than any other in some way; of equal ones the first."""
    order = np.lexsort((np.arange(len(freed)), inside, -freed, picoseconds))
    kept: list[int] = []
    for place in order:
        held = np.array(kept, dtype=np.intp)
        if not np.any((freed[held] >= freed[place]) & (inside[held] <= inside[place])):
            kept.append(int(place))
    places = np.array(sorted(kept), dtype=np.intp)
    return Link(places, picoseconds[places], freed[places], inside[places])
