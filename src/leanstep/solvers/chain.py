"""The problem as a path through the block calls: what each move frees, and needs while it runs.

A *move* runs one call under one of its choices, or a run of calls as one where they can be joined.
While a call is *open*, between the end of its forward pass and the beginning of its backward pass,
its move lowers the level by `freed` bytes. Backward runs in the opposite order, so the open calls
at any point are the first few. Every stretch is then either inside one call (`inside`: the highest
level there with nothing else freed; the calls before it are open) or in the gap behind some number
of open calls.

Some bytes come free only later: autocast holds its copies of the weights until it ends, so dropping
one helps from there on. The step is therefore cut in two *eras* where the freed bytes of many calls
change at once; each era has its own freed bytes, insides and gaps.

A choice may drop the border between its call and the next. The output then comes back in the next
call's backward pass, so levels there depend on both: `inside` and `gaps` have a row for each *kind*
of border that the move before can have dropped; kind 0 is none.

Not every step is that orderly. What other calls do in a stretch beyond their freed bytes is added
at its worst over their choices. So the chain's level is never below the exact one, whatever the
order of backward; `slack_bytes` bounds by how much it can be above.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from leanstep.solvers.base import Bytes, Call, Places, Problem
from leanstep.solvers.borders import with_borders
from leanstep.solvers.moves import NOWHERE, Chain, Moves, inside_levels, together, undominated

# Runs of up to this many calls are looked at whatever the number of calls: all there are in a small
# step.
SHORT_RUN = 8


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
    open_calls = np.where(owner >= 0, owner, prefix)
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
    alone = (
        _moves(call, index, freed[index], raised, others, np.where(owner == index, era, -1))
        for index, call in enumerate(calls)
    )
    gaps = np.full((len(calls) + 1, num_eras), NOWHERE, dtype=np.int64)
    np.maximum.at(gaps, (prefix, era), np.where(owner < 0, raised + others, NOWHERE))
    by_place = tuple(gap[:, None] for gap in gaps)
    has_more = bool(problem.joints) or any(call.border_choices for call in calls)
    borders = tuple(choice for call in calls for choice in call.border_choices)
    chain = Chain(
        tuple(alone), by_place, highest, slack, open_calls, not problem.joints, left_out=borders
    )
    if has_more and not np.any(others):
        is_gap = owner < 0
        chain = with_borders(problem, _with_runs(problem, chain, era, is_gap), era, is_gap)
    # Last, when levels after every kind of border are known.
    return replace(chain, moves=tuple(undominated(moves) for moves in chain.moves))


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


def _moves(
    call: Call, index: int, freed: Bytes, tops: Bytes, others: Bytes, own_era: Places
) -> Moves:
    """A call's choices as moves; `own_era` is the era of each stretch inside it, -1 outside."""
    levels = [inside_levels(c, tops, others, own_era, len(freed)) for c in call.choices]
    inside = np.stack(levels, axis=1)
    seconds = np.array([choice.picoseconds for choice in call.choices], dtype=np.int64)
    stops = np.full(len(seconds), index + 1, dtype=np.intp)
    none = np.zeros(len(seconds), dtype=np.intp)
    choices = (call,) * len(seconds), call.choices
    return Moves(*choices, stops, seconds, freed, inside[:, None, :], none)


def _with_runs(problem: Problem, chain: Chain, era: Places, is_gap: npt.NDArray[np.bool_]) -> Chain:
    """The chain with runs of joined calls as further moves."""
    moves, has_all_runs = [], True
    for start, alone in enumerate(chain.moves):
        runs: list[Moves] = []
        for run in _runs(problem, start):
            # The gaps between its calls are inside it; what is open in its first gap is before it.
            opened = chain.open_calls
            own = (start <= opened) & (opened < run.span[1]) & ~(is_gap & (opened == start))
            found = list(_run_moves(problem, run, np.where(own, era, -1), era, chain))
            has_all_runs &= len(found) == len(run.choices) - 1
            runs.extend(found)
        moves.append(together([alone, *runs]))
    return replace(chain, moves=tuple(moves), has_all_runs=has_all_runs)


def loose_chain(problem: Problem, chain: Chain) -> Chain:
    """Everything that is listed as moves, for a bound: their levels on the chain are left open."""
    moves = []
    for start, call in enumerate(problem.calls):
        picks = [(call, choice) for choice in (*call.choices, *call.border_choices)]
        picks += [(run, choice) for run in _runs(problem, start) for choice in run.choices[1:]]
        # The calls of a problem may stand for several of the step: places are counted here.
        num_calls = [one.span[1] - one.span[0] if one is not call else 1 for one, _ in picks]
        stops = start + np.array(num_calls, dtype=np.intp)
        times = np.array([choice.picoseconds for _, choice in picks], dtype=np.int64)
        nothing = np.zeros((chain.num_eras, len(picks)), dtype=np.int64)
        calls, choices = tuple(one for one, _ in picks), tuple(choice for _, choice in picks)
        none = np.zeros(len(picks), dtype=np.intp)
        moves.append(Moves(calls, choices, stops, times, nothing, nothing[:, None, :], none))
    return replace(chain, moves=tuple(moves))


def run_stops(problem: Problem, start: int) -> Iterator[int]:
    """Where a run of calls that begins here may end, more than one call on."""
    # On an even chain of n calls, runs of √n are the lowest; every length costs a simulation.
    longest = max(SHORT_RUN, math.isqrt(len(problem.calls)) + 1)
    for stop in range(start + 2, min(len(problem.calls), start + longest) + 1):
        if stop - 1 not in problem.joints:
            return
        yield stop


def _runs(problem: Problem, start: int) -> Iterator[Call]:
    """The runs of more than one call that begin here."""
    for stop in run_stops(problem, start):
        run = problem.segment(start, stop)[0]
        if len(run.choices) > 1:
            yield run


def _run_moves(
    problem: Problem, run: Call, own_era: Places, era: Places, chain: Chain
) -> Iterator[Moves]:
    """The choices of a run that drop something, where they fit the picture of a chain."""
    is_open = chain.open_calls >= run.span[1]
    for choice in run.choices[1:]:
        freed = np.zeros(chain.num_eras, dtype=np.int64)
        for number in range(chain.num_eras):
            while_open = choice.deltas[is_open & (era == number)]
            freed[number] = -int(while_open[0]) if len(while_open) else 0
        expected = np.where(is_open, -freed[era], 0)
        is_orderly = np.array_equal(
            np.where(own_era >= 0, 0, choice.deltas), np.where(own_era >= 0, 0, expected)
        )
        if is_orderly and np.all(own_era[choice.replay_stretches] >= 0):
            zeros = np.zeros_like(problem.tops)
            inside = inside_levels(choice, problem.tops, zeros, own_era, chain.num_eras)
            yield Moves(
                (run,),
                (choice,),
                np.array([run.span[1]], dtype=np.intp),
                np.array([choice.picoseconds], dtype=np.int64),
                freed[:, None],
                inside[:, None, None],
                np.zeros(1, dtype=np.intp),
            )
