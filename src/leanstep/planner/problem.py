"""From options to numbers: the problem that solvers are given.

The step is cut at every position where any decision about any call could change the level: where
something of a call begins or ends to live, or is asked for. Inside such a stretch the highest level
stands for all its ops.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from leanstep.ir import Engine, Profile
from leanstep.planner.cut import find_projects
from leanstep.planner.option import CallOptions, Option
from leanstep.rebuild.block import BlockGraph
from leanstep.simulator import base_levels, rises
from leanstep.solvers.base import Bytes, Call, Candidate, Choice

Starts = npt.NDArray[np.intp]


class Layers:
    """Lay options over the stretches of a step, as rows of bytes."""

    def __init__(self, profile: Profile, views: Sequence[BlockGraph]) -> None:
        self.profile, self.bases = profile, base_levels(profile)
        self.starts = _stretch_starts(len(self.bases), views)

    @property
    def tops(self) -> Bytes:
        """The highest level of the untouched step in each stretch."""
        tops: Bytes = np.maximum.reduceat(self.bases + rises(self.profile.graph), self.starts)
        return tops

    def call(self, view: BlockGraph, options: CallOptions, span: tuple[int, int]) -> Call:
        """One call as a solver sees it; `span` are the calls of the step it stands for."""

        # A run's first request comes when its last call is reached: too early for a border.
        is_run = span[1] - span[0] > 1

        def drop(dropped: frozenset[int]) -> Choice | None:
            option = options.drop(dropped)
            return None if option is None else self.choice(option, is_run=is_run)

        asked = self._first_requests(view)
        first = min(asked.values(), default=len(self.bases))
        start, stop, begin = np.searchsorted(
            self.starts, [view.block.start, view.block.stop, first]
        )
        return Call(
            name=view.block.name,
            choices=tuple(self.choice(option, is_run=is_run) for option in options.options),
            start=int(start),
            stop=int(stop),
            first=int(begin),
            drop=drop,
            find_candidates=lambda: tuple(self._candidates(view, options, asked)),
            border_choices=tuple(self.choice(option) for option in options.border_options),
            span=span,
        )

    def choice(self, option: Option, *, is_run: bool = False) -> Choice:
        """One option as a row of bytes and the tops of its replays."""
        changes = np.zeros(len(self.starts) + 1, dtype=np.int64)
        lasting = option.shift_starts < option.shift_stops
        nbytes = option.shift_bytes[lasting]
        np.add.at(changes, np.searchsorted(self.starts, option.shift_starts[lasting]), nbytes)
        np.subtract.at(changes, np.searchsorted(self.starts, option.shift_stops[lasting]), nbytes)
        # Of the replays in a stretch the highest one counts.
        places = np.searchsorted(self.starts, option.replay_positions)
        stretches, where = np.unique(places, return_inverse=True)
        tops = np.zeros(len(stretches), dtype=np.int64)
        np.maximum.at(tops, where, self.bases[option.replay_positions] + option.replay_bytes)
        return Choice(
            dropped=option.dropped,
            seconds=option.seconds,
            deltas=np.cumsum(changes)[:-1],
            replay_stretches=stretches,
            replay_tops=tops,
            drops_border=option.drops_border,
            takes_border=option.engine is Engine.REPLAY and not is_run,
            reads_border_early=option.reads_border_early,
        )

    def _first_requests(self, view: BlockGraph) -> dict[int, int]:
        """The position where backward first asks for each save of a call."""
        asked: dict[int, int] = {}
        for unpack in view.unpacks:
            asked[unpack.save] = min(unpack.position, asked.get(unpack.save, unpack.position))
        return asked

    def _candidates(
        self, view: BlockGraph, options: CallOptions, asked: dict[int, int]
    ) -> Iterator[Candidate]:
        if not options.droppable or options.options[-1].engine is not Engine.REPLAY:
            return
        projects = find_projects(self.profile, view, options.droppable)
        sources = _sources(view, options.droppable)
        for place, number in enumerate(projects.storages):
            storage = view.graph.storages[number]
            saves = [s for s in view.block.saves if view.graph.saves[s].value.storage == number]
            first = min((asked[s] for s in saves if s in asked), default=storage.death + 1)
            lives = [storage.natural_death, first, storage.death]
            forward, backward, last = (self._stretch(position) for position in lives)
            yield Candidate(
                storage=number,
                nbytes=projects.freed_bytes[place],
                ops=projects.ops(place),
                sources=sources[number],
                last_forward=forward,
                first_backward=backward,
                last_backward=last,
            )

    def _stretch(self, position: int) -> int:
        return max(0, int(np.searchsorted(self.starts, position, side="right")) - 1)


def _stretch_starts(num_positions: int, views: Sequence[BlockGraph]) -> Starts:
    positions = {0}
    for view in views:
        positions.update(_turns(view))
    return np.array(sorted(p for p in positions if 0 <= p < num_positions), dtype=np.intp)


def _turns(view: BlockGraph) -> Iterator[int]:
    """Every position where a decision about a call may change the level."""
    graph, block = view.graph, view.block
    yield from (block.start, block.stop)
    yield from (unpack.position for unpack in view.unpacks)
    yield from (save.release for save in view.saves)
    if view.borders:
        # There a rebuilt border lets go of what it was rebuilt from.
        yield view.border_request + 1
    touched = set(view.own_storages)
    for op in graph.ops[block.start : block.stop]:
        touched.update(value.storage for value in op.reads)
    for number in touched:
        storage = graph.storages[number]
        yield from (storage.natural_death + 1, storage.death + 1)


def _sources(view: BlockGraph, droppable: frozenset[int]) -> dict[int, frozenset[int]]:
    """For each candidate the other candidates that its ops read."""
    found = {}
    for number in droppable:
        reads = {value.storage for value in view.alone(number).all_sources}
        found[number] = frozenset(reads & droppable) - {number}
    return found
