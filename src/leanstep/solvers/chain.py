"""The problem as a chain of block calls: what each choice frees while its call is open.

While a call is *open*, between the end of its forward pass and the beginning of its backward pass,
its choice lowers the level by `freed` bytes. Backward runs in the opposite order, so the open calls
at any point are the first few of the chain. Every stretch is then either inside one call (`inside`:
the highest level there with nothing else freed; the calls before it are open) or in the gap behind
an open prefix of the chain.

Some bytes come free only later: autocast holds its copies of the weights until it ends, so dropping
one helps from there on. The step is therefore cut in two *eras* where the freed bytes of many calls
change at once; each era has its own freed bytes, insides and gaps.

Not every step is that orderly. What other calls do in a stretch beyond their freed bytes is added
at its worst over their choices. So the chain's level is never below the exact one, whatever the
order of backward; `slack_bytes` bounds by how much it can be above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leanstep.solvers.base import Bytes, Call, Choice, Places, Problem

# A level of what is not there: below every budget.
NOWHERE = -(2**60)


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The choices of one call as numbers: `places` are theirs in the call.

    `freed` and `inside` have a row an era and a column a choice.
    """

    places: Places
    picoseconds: Bytes
    freed: Bytes
    inside: Bytes


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Every call as a link; `gaps[era, i]` is the highest level while just the first i are open."""

    links: tuple[Link, ...]
    gaps: Bytes
    highest: Bytes
    slack: Bytes

    @property
    def num_eras(self) -> int:
        """How many eras there are: one or two."""
        return len(self.gaps)

    def slack_bytes(self, budget_bytes: int) -> int:
        """How far the chain's peak can be above the exact one, where the budget matters."""
        return int(self.slack[self.highest + self.slack > budget_bytes].max(initial=0))

    def peak_bytes(self, selection: Sequence[int]) -> int:
        """The chain's level for one entry of each link."""
        freed = np.zeros(self.num_eras, dtype=np.int64)
        peak = int(self.gaps[:, 0].max())
        for number, (link, place) in enumerate(zip(self.links, selection, strict=True), start=1):
            peak = max(peak, int((link.inside[:, place] - freed).max()))
            freed += link.freed[:, place]
            peak = max(peak, int((self.gaps[:, number] - freed).max()))
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
    era = _eras(problem, windows)
    num_eras = int(era.max(initial=0)) + 1
    windows = [
        _settled(problem, call, window, era) for call, window in zip(calls, windows, strict=True)
    ]
    owner, prefix = _owners(len(tops), windows)
    raised = _with_foreign_replays(problem, owner)
    others, slack, highest = np.zeros_like(tops), np.zeros_like(tops), raised.copy()
    freed = [
        _freed(tops, call, window, era, num_eras)
        for call, window in zip(calls, windows, strict=True)
    ]
    for index, call in enumerate(calls):
        deltas = np.stack([choice.deltas for choice in call.choices])
        highest += deltas.max(axis=0)
        relative = np.where(prefix > index, deltas + freed[index].T[:, era], deltas)
        relative[:, owner == index] = 0
        most = relative.max(axis=0)
        others += most
        slack += most - relative.min(axis=0)
    links = tuple(
        _link(call, freed[index], others, raised, np.where(owner == index, era, -1))
        for index, call in enumerate(calls)
    )
    levels = np.where(owner < 0, raised + others, NOWHERE)
    gaps = np.full((num_eras, len(calls) + 1), NOWHERE, dtype=np.int64)
    np.maximum.at(gaps, (era, prefix), levels)
    return Chain(links, gaps, highest, slack)


def _settled(problem: Problem, call: Call, window: _Window, era: Places) -> _Window:
    """The window, with its forward pass extended to where the call's levels have settled.

    A value that the caller still holds, or the next op still reads, goes a little after its call.
    """
    starts = [other.start for other in problem.calls if other.start >= window.stop]
    stretches = np.arange(window.stop, min([window.first, *starts]))
    if len(stretches) == 0:
        return window
    number = era[window.stop]
    open_ones = np.arange(window.stop, window.first)
    open_ones = open_ones[era[open_ones] == number]
    place = open_ones[np.argmax(problem.tops[open_ones])]
    unsettled = np.zeros(len(stretches), dtype=bool)
    for choice in call.choices:
        unsettled |= choice.deltas[stretches] != choice.deltas[place]
    unsettled &= era[stretches] == number
    return replace(window, stop=window.stop + int(np.max(np.flatnonzero(unsettled) + 1, initial=0)))


def _eras(problem: Problem, windows: Sequence[_Window]) -> Places:
    """The era of each stretch: the step is cut where most bytes come free while calls are open."""
    changes = np.zeros(len(problem.tops) + 1, dtype=np.int64)
    for call, window in zip(problem.calls, windows, strict=True):
        if window.stop + 1 < window.first:
            open_deltas = np.stack([c.deltas[window.stop : window.first] for c in call.choices])
            moves = np.abs(np.diff(open_deltas, axis=1)).max(axis=0)
            changes[window.stop + 1 : window.first] += moves
    era = np.zeros(len(problem.tops), dtype=np.intp)
    if changes.max(initial=0) > 0:
        era[int(np.argmax(changes)) :] = 1
    return era


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


def _freed(tops: Bytes, call: Call, window: _Window, era: Places, num_eras: int) -> Bytes:
    """The bytes each choice frees in each era, where the untouched step is highest there."""
    freed = np.zeros((num_eras, len(call.choices)), dtype=np.int64)
    for number in range(num_eras):
        stretches = np.arange(window.stop, max(window.stop, window.first))
        stretches = stretches[era[stretches] == number]
        if len(stretches):
            place = stretches[np.argmax(tops[stretches])]
            freed[number] = [-choice.deltas[place] for choice in call.choices]
    return freed


def _link(call: Call, freed: Bytes, others: Bytes, tops: Bytes, own_era: Places) -> Link:
    """`own_era` is the era of each stretch inside the call, -1 outside."""
    own = np.flatnonzero(own_era >= 0)
    bases = (tops + others)[own]
    inside = np.full_like(freed, NOWHERE)
    for place, choice in enumerate(call.choices):
        np.maximum.at(inside[:, place], own_era[own], bases + choice.deltas[own])
        here = choice.replay_stretches[own_era[choice.replay_stretches] >= 0]
        replay_tops = choice.replay_tops[own_era[choice.replay_stretches] >= 0]
        levels = replay_tops + others[here] + choice.deltas[here]
        np.maximum.at(inside[:, place], own_era[here], levels)
    seconds = np.array([choice.picoseconds for choice in call.choices], dtype=np.int64)
    return _undominated(seconds, freed, inside)


def _undominated(picoseconds: Bytes, freed: Bytes, inside: Bytes) -> Link:
    """The entries that are better than any other in some way; of equal ones the first."""
    order = np.lexsort((inside.max(axis=0), -freed[-1], picoseconds))
    kept: list[int] = []
    for place in order:
        held = np.array(kept, dtype=np.intp)
        frees = (freed[:, held] >= freed[:, [place]]).all(axis=0)
        fits = (inside[:, held] <= inside[:, [place]]).all(axis=0)
        if not np.any(frees & fits):
            kept.append(int(place))
    places = np.array(sorted(kept), dtype=np.intp)
    return Link(places, picoseconds[places], freed[:, places], inside[:, places])
