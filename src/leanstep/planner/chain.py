"""The whole step as a chain of block calls: the numbers that solvers work with.

The step is cut where any option changes the level; inside such a *stretch* the highest level
stands for all its ops. So an option is a row of bytes over the stretches (`deltas`) and the tops of
its replays, and the exact peak of a plan is a sum of rows and a maximum.

Solvers see less: one number of freed bytes a call. Each stretch is given to a call (its own forward
pass, or from its first unpack on) or to the gap behind an open prefix of the chain. What other
calls do there beyond their freed bytes is added at its worst over their options. So the solver's
level is never below the exact one, whatever the order of backward; `slack_bytes` bounds by how much
it can be above.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leanstep.blockgraph import BlockGraph
from leanstep.ir import Profile
from leanstep.planner.options import Option
from leanstep.simulator import base_levels, rises
from leanstep.solvers import Choice, Problem

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Footprint:
    """One option on the stretches; a replay's top is its level with nothing else changed."""

    deltas: Bytes
    replay_stretches: npt.NDArray[np.intp]
    replay_tops: Bytes


@dataclass(frozen=True, slots=True)
class Chain:
    """Every option of every call on the stretches of the step, and the problem for solvers."""

    tops: Bytes
    footprints: tuple[tuple[Footprint, ...], ...]
    problem: Problem
    highest: Bytes
    slack: Bytes

    def peak_bytes(self, selection: Sequence[int]) -> int:
        """The exact peak of a selection."""
        totals, tops = np.zeros_like(self.tops), self.tops.copy()
        for footprints, place in zip(self.footprints, selection, strict=True):
            picked = footprints[place]
            totals += picked.deltas
            np.maximum.at(tops, picked.replay_stretches, picked.replay_tops)
        return int((totals + tops).max())

    def slack_bytes(self, budget_bytes: int) -> int:
        """How far a solver's peak can be above the exact one, where the budget matters."""
        return int(self.slack[self.highest + self.slack > budget_bytes].max(initial=0))


@dataclass(frozen=True, slots=True)
class _Window:
    """The stretches [start, stop) of a call's forward pass and [first, last) of its backward."""

    start: int
    stop: int
    first: int
    last: int


def build_chain(
    profile: Profile, views: Sequence[BlockGraph], options: Sequence[Sequence[Option]]
) -> Chain:
    """Lay every option over the stretches of the step, and reduce them to numbers."""
    bases = base_levels(profile)
    firsts = _first_unpacks(profile, views)
    starts = _stretch_starts(len(bases), views, firsts, options)
    tops: Bytes = np.maximum.reduceat(bases + rises(profile.graph), starts)
    footprints = tuple(
        tuple(_footprint(option, starts, bases) for option in call) for call in options
    )
    windows = [
        _window(view, first, starts, call)
        for view, first, call in zip(views, firsts, footprints, strict=True)
    ]
    return _reduced(tops, footprints, windows, options)


def _first_unpacks(profile: Profile, views: Sequence[BlockGraph]) -> list[int]:
    """The position where backward first asks for something of each call."""
    asked: dict[int, int] = {}
    for unpack in profile.graph.unpacks:
        asked[unpack.save] = min(unpack.position, asked.get(unpack.save, unpack.position))
    end = len(profile.graph.ops) + 1
    return [min((asked.get(save, end) for save in view.block.saves), default=end) for view in views]


def _stretch_starts(
    num_positions: int,
    views: Sequence[BlockGraph],
    firsts: Sequence[int],
    options: Sequence[Sequence[Option]],
) -> npt.NDArray[np.intp]:
    """Every position where a level may change by a decision, or where a window begins or ends."""
    positions = {0, *firsts}
    positions.update(position for view in views for position in (view.block.start, view.block.stop))
    for call in options:
        for option in call:
            for shift in option.effect.shifts:
                positions.update((shift.start, shift.stop))
            positions.update(replay.position for replay in option.effect.replays)
    return np.array(sorted(p for p in positions if 0 <= p < num_positions), dtype=np.intp)


def _footprint(option: Option, starts: npt.NDArray[np.intp], bases: Bytes) -> Footprint:
    changes = np.zeros(len(starts) + 1, dtype=np.int64)
    for shift in option.effect.shifts:
        if shift.start < shift.stop:
            changes[np.searchsorted(starts, shift.start)] += shift.nbytes
            changes[np.searchsorted(starts, shift.stop)] -= shift.nbytes
    positions = np.array([replay.position for replay in option.effect.replays], dtype=np.intp)
    peaks = np.array([replay.peak_bytes for replay in option.effect.replays], dtype=np.int64)
    return Footprint(
        deltas=np.cumsum(changes)[:-1],
        replay_stretches=np.searchsorted(starts, positions),
        replay_tops=bases[positions] + peaks,
    )


def _window(
    view: BlockGraph, first: int, starts: npt.NDArray[np.intp], call: Sequence[Footprint]
) -> _Window:
    touched = [int(np.max(np.nonzero(f.deltas)[0], initial=-1)) for f in call]
    replayed = [int(f.replay_stretches.max(initial=-1)) for f in call]
    start, stop, begin = np.searchsorted(starts, [view.block.start, view.block.stop, first])
    return _Window(int(start), int(stop), int(begin), max(*touched, *replayed) + 1)


def _reduced(
    tops: Bytes,
    footprints: tuple[tuple[Footprint, ...], ...],
    windows: Sequence[_Window],
    options: Sequence[Sequence[Option]],
) -> Chain:
    owner, prefix = _owners(len(tops), windows)
    tops_for_all = _with_foreign_replays(tops, footprints, owner)
    others, slack = np.zeros_like(tops), np.zeros_like(tops)
    highest = tops_for_all.copy()
    freed = [_freed(tops, call, window) for call, window in zip(footprints, windows, strict=True)]
    for index, call in enumerate(footprints):
        deltas = np.stack([footprint.deltas for footprint in call])
        highest += deltas.max(axis=0)
        relative = np.where(prefix > index, deltas + freed[index][:, None], deltas)
        relative[:, owner == index] = 0
        others += relative.max(axis=0)
        slack += relative.max(axis=0) - relative.min(axis=0)
    calls = tuple(
        _choices(options[index], freed[index], call, others, tops_for_all, owner == index)
        for index, call in enumerate(footprints)
    )
    levels = np.where(owner < 0, tops_for_all + others, 0)
    gaps = tuple(
        int(levels[prefix == index].max(initial=0)) for index in range(len(footprints) + 1)
    )
    return Chain(tops, footprints, Problem(0, calls, gaps), highest, slack)


def _owners(
    num_stretches: int, windows: Sequence[_Window]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
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


def _with_foreign_replays(
    tops: Bytes, footprints: Sequence[Sequence[Footprint]], owner: npt.NDArray[np.intp]
) -> Bytes:
    """The tops, raised by what any option of a call replays in a stretch that is not its own."""
    raised = tops.copy()
    for index, call in enumerate(footprints):
        for footprint in call:
            foreign = owner[footprint.replay_stretches] != index
            stretches = footprint.replay_stretches[foreign]
            np.maximum.at(raised, stretches, footprint.replay_tops[foreign])
    return raised


def _freed(tops: Bytes, call: Sequence[Footprint], window: _Window) -> Bytes:
    """The bytes each option frees where the untouched step is highest while the call is open."""
    if window.first <= window.stop:
        return np.zeros(len(call), dtype=np.int64)
    place = window.stop + int(np.argmax(tops[window.stop : window.first]))
    return np.array([-footprint.deltas[place] for footprint in call], dtype=np.int64)


def _choices(
    options: Sequence[Option],
    freed: Bytes,
    call: Sequence[Footprint],
    others: Bytes,
    tops: Bytes,
    is_own: npt.NDArray[np.bool_],
) -> tuple[Choice, ...]:
    choices = []
    for option, freed_bytes, footprint in zip(options, freed, call, strict=True):
        own_tops = tops.copy()
        np.maximum.at(own_tops, footprint.replay_stretches, footprint.replay_tops)
        levels = (own_tops + others + footprint.deltas)[is_own]
        choices.append(Choice(option.seconds, int(freed_bytes), int(levels.max(initial=0))))
    return tuple(choices)


def without_dominated(chain: Chain) -> tuple[tuple[int, ...], ...]:
    """For each call the places of the choices that are better than any other in some way."""
    return tuple(_undominated(choices) for choices in chain.problem.calls)


def _undominated(choices: Sequence[Choice]) -> tuple[int, ...]:
    last = len(choices) - 1
    order = sorted(
        range(len(choices)),
        key=lambda i: (choices[i].seconds, -choices[i].freed_bytes, choices[i].inside_bytes, i),
    )
    kept: list[int] = []
    for place in order:
        choice = choices[place]
        is_worse = any(
            choices[other].freed_bytes >= choice.freed_bytes
            and choices[other].inside_bytes <= choice.inside_bytes
            for other in kept
        )
        # The first and the last choice have a meaning of their own: keep everything, drop all.
        if not is_worse or place in (0, last):
            kept.append(place)
    return tuple(sorted(kept))


def restricted(chain: Chain, places: Sequence[Sequence[int]]) -> Chain:
    """The chain with only some of the options of each call."""
    calls = tuple(
        tuple(choices[place] for place in kept)
        for choices, kept in zip(chain.problem.calls, places, strict=True)
    )
    footprints = tuple(
        tuple(call[place] for place in kept)
        for call, kept in zip(chain.footprints, places, strict=True)
    )
    return replace(chain, footprints=footprints, problem=replace(chain.problem, calls=calls))
