"""What a call may drop and replay: sets from the search inside it, calmer ones, and borders."""

import functools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from leanstep.effects import replay_effect
from leanstep.ir import Engine, Profile
from leanstep.planner.fingerprint import Positions
from leanstep.planner.inside import drop_sets
from leanstep.planner.option import UNTOUCHED, CallOptions, Option, option_of
from leanstep.planner.overrides import Wishes
from leanstep.rebuild.block import BlockGraph
from leanstep.rebuild.program import UnreachableError
from leanstep.simulator import base_levels, rises

# Sets of a second kind in one call: every one costs planning time in all calls.
FEW_SETS = 16

# Simulations of one call times the storages in each, while looking for calmer replays: a scan over
# time has hundreds of storages, and trying all of them again and again takes minutes. A call with
# up to 64 of them is searched whole for eight rounds.
MOST_WORK = 1 << 15
LEAST_ROUNDS = 8


def by_replay(
    profile: Profile,
    view: BlockGraph,
    droppable: frozenset[int],
    wished: Wishes,
    *,
    is_joined: bool,
) -> CallOptions:
    """The options of a call that drop some of its storages.

    A call that stands for several has two: to keep all, and to drop all.
    """
    sets = [droppable] if is_joined else _sets(profile, view, droppable)
    found = _of_sets(profile, view, droppable, droppable & wished.recompute, sets)
    if is_joined or not (len(found.options) > 1 or found.forced):
        return found
    return _with_borders(profile, view, _with_calmer(profile, view, found), wished)


def _sets(profile: Profile, view: BlockGraph, droppable: frozenset[int]) -> list[frozenset[int]]:
    """The sets worth dropping: by all bytes, and by those that come free as soon as forward ends.

    What autocast holds until it ends frees nothing for a peak in the loss.
    """
    sets = drop_sets(profile, view, droppable)
    storages = view.graph.storages
    # An output of the call lives a little longer too, while the next ops read it.
    after = view.block.stop + (view.block.stop - view.block.start)
    late = {number for number in droppable if storages[number].natural_death > after}
    if late and late != droppable:
        sets[-1:-1] = drop_sets(profile, view, droppable - late, FEW_SETS)
    return sets


def _of_sets(
    profile: Profile,
    view: BlockGraph,
    droppable: frozenset[int],
    forced: frozenset[int],
    sets: Iterable[frozenset[int]],
) -> CallOptions:
    # Equal calls ask for the same sets, and so does one solver after the other.
    @functools.cache
    def simulated(dropped: frozenset[int]) -> Option | None:
        return _replayed(profile, view, dropped)

    def drop(dropped: frozenset[int]) -> Option | None:
        return simulated((dropped & droppable) | forced)

    every = [forced, *(chosen | forced for chosen in sets)]
    options = filter(None, (drop(chosen) for chosen in dict.fromkeys(every)))
    return CallOptions(tuple(options) or (UNTOUCHED,), droppable, forced, drop)


def _with_calmer(profile: Profile, view: BlockGraph, known: CallOptions) -> CallOptions:
    """Add options whose replays need less memory at a time than those that drop all.

    Dropping everything rebuilds everything inside the call's backward pass, and what is rebuilt
    early waits there. Keep storages, one by one, while the highest level in that pass falls.
    """
    bases, tops = base_levels(profile), base_levels(profile) + rises(profile.graph)
    *options, everything = known.options
    current, level = everything, _inner_level(view, bases, tops, everything)
    tries = MOST_WORK // max(1, len(everything.dropped))
    most = max(1, tries // LEAST_ROUNDS)
    while tries > 0:
        fewer = _one_less(current.dropped, known.forced, most=most)
        tries -= len(fewer)
        tried = filter(None, map(known.drop, fewer))
        levels = [(_inner_level(view, bases, tops, o), o.seconds, o) for o in tried]
        best = min(levels, key=lambda one: one[:2], default=None)
        if best is None or best[0] >= level:
            break
        level, _, current = best
        options.append(current)
    # What drops all it may stays the last one.
    return replace(known, options=(*options, everything))


def _with_borders(
    profile: Profile, view: BlockGraph, known: CallOptions, wished: Wishes
) -> CallOptions:
    """Add options that drop the call's output, and one that keeps all but takes a dropped input.

    The output is rebuilt before anything else of the call, from what is kept: what it starts from
    is not dropped with it.
    """
    borders = [number for number in view.borders if number not in wished.keep | known.droppable]
    found = [hooked(profile, view)] if not known.forced else []
    if borders:
        border = max(borders, key=lambda number: view.graph.storages[number].nbytes)
        program = view.program([border])
        used = {value.storage for value in program.all_sources}
        used.update(value.storage for op in program.reruns.values() for value in op.writes)
        if not used & known.forced:
            sets = dict.fromkeys((option.dropped - used) | {border} for option in known.options)
            stride = -(-len(sets) // FEW_SETS)
            # Every so manieth, and the one that drops most.
            few = [*list(sets)[:-1:stride], list(sets)[-1]]
            found.extend(_bordered(profile, view, chosen) for chosen in few)
    return replace(known, border_options=tuple(found))


def hooked(profile: Profile, view: BlockGraph) -> Option:
    """The option that keeps everything with hooks in place."""
    return option_of(profile, Engine.REPLAY, (), replay_effect(view, (), border_in=True))


def _bordered(profile: Profile, view: BlockGraph, dropped: frozenset[int]) -> Option:
    option = option_of(profile, Engine.REPLAY, dropped, replay_effect(view, dropped))
    early = bool(view.reads_input_early(dropped))
    return replace(option, drops_border=True, reads_border_early=early)


def _one_less(
    dropped: frozenset[int], forced: frozenset[int], *, most: int
) -> list[frozenset[int]]:
    """The set without one of its storages, for each of them or for so many of them, spread out."""
    numbers = sorted(dropped - forced) if len(dropped) > 1 else []
    stride = -(-len(numbers) // most)
    return [dropped - {number} for number in numbers[:: max(1, stride)]]


def _inner_level(view: BlockGraph, bases: Positions, tops: Positions, option: Option) -> int:
    """The highest level of the step while backward is in the call, with an option alone."""
    start, stop = view.first_request, view.last_release
    changes = np.zeros(len(bases) + 1, dtype=np.int64)
    np.add.at(changes, np.minimum(option.shift_starts, len(bases)), option.shift_bytes)
    np.subtract.at(changes, np.minimum(option.shift_stops, len(bases)), option.shift_bytes)
    added = np.cumsum(changes)[:-1]
    highest = int((tops + added)[start:stop].max(initial=0))
    replays = (bases + added)[option.replay_positions] + option.replay_bytes
    return max(highest, int(replays.max(initial=0)))


def _replayed(profile: Profile, view: BlockGraph, dropped: frozenset[int]) -> Option | None:
    if not dropped:
        return UNTOUCHED
    try:
        effect = replay_effect(view, dropped)
    except UnreachableError:
        return None
    return option_of(profile, Engine.REPLAY, dropped, effect)
