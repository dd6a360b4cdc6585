"""From options to numbers: the problem that solvers are given.

The step is cut at every position where any decision about any call could change the level: where
something of a call begins or ends to live, or is asked for. Inside such a stretch the highest level
stands for all its ops.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from leanstep.blockgraph import BlockGraph
from leanstep.ir import Profile
from leanstep.planner.cut import find_projects
from leanstep.planner.options import CallOptions, Option
from leanstep.simulator import base_levels, rises
from leanstep.solvers.base import Bytes, Call, Candidate, Choice, Problem

Starts = npt.NDArray[np.intp]


def build_problem(
    profile: Profile, views: Sequence[BlockGraph], options: Sequence[CallOptions]
) -> Problem:
    """Lay every option over the stretches of the step."""
    bases = base_levels(profile)
    starts = _stretch_starts(len(bases), views)
    tops: Bytes = np.maximum.reduceat(bases + rises(profile.graph), starts)
    layers = _Layers(profile, starts, bases)
    pairs = zip(views, options, strict=True)
    return Problem(tops, tuple(layers.call(view, call) for view, call in pairs))


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
    touched = set(view.own_storages)
    for op in graph.ops[block.start : block.stop]:
        touched.update(value.storage for value in op.reads)
    for number in touched:
        storage = graph.storages[number]
        yield from (storage.natural_death + 1, storage.death + 1)


class _Layers:
    """Turn options into rows over the stretches."""

    def __init__(self, profile: Profile, starts: Starts, bases: Bytes) -> None:
        self.profile, self.starts, self.bases = profile, starts, bases

    def call(self, view: BlockGraph, options: CallOptions) -> Call:
        def drop(dropped: frozenset[int]) -> Choice | None:
            option = options.drop(dropped)
            return None if option is None else self.choice(option)

        asked = self._first_requests(view)
        first = min(asked.values(), default=len(self.bases))
        start, stop, begin = np.searchsorted(
            self.starts, [view.block.start, view.block.stop, first]
        )
        return Call(
            name=view.block.name,
            choices=tuple(self.choice(option) for option in options.options),
            start=int(start),
            stop=int(stop),
            first=int(begin),
            drop=drop,
            find_candidates=lambda: tuple(self._candidates(view, options, asked)),
        )

    def choice(self, option: Option) -> Choice:
        """One option as a row of bytes and the tops of its replays."""
        changes = np.zeros(len(self.starts) + 1, dtype=np.int64)
        lasting = option.shift_starts < option.shift_stops
        nbytes = option.shift_bytes[lasting]
        np.add.at(changes, np.searchsorted(self.starts, option.shift_starts[lasting]), nbytes)
        np.subtract.at(changes, np.searchsorted(self.starts, option.shift_stops[lasting]), nbytes)
        return Choice(
            dropped=option.dropped,
            seconds=option.seconds,
            deltas=np.cumsum(changes)[:-1],
            replay_stretches=np.searchsorted(self.starts, option.replay_positions),
            replay_tops=self.bases[option.replay_positions] + option.replay_bytes,
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
        if not options.droppable or options.options[-1].engine == "module":
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
                seconds=projects.seconds([place]),
                sources=sources[number],
                last_forward=forward,
                first_backward=backward,
                last_backward=last,
            )

    def _stretch(self, position: int) -> int:
        return max(0, int(np.searchsorted(self.starts, position, side="right")) - 1)


def _sources(view: BlockGraph, droppable: frozenset[int]) -> dict[int, frozenset[int]]:
    """For each candidate the other candidates that its ops read."""
    found = {}
    for number in droppable:
        reads = {value.storage for value in view.alone(number).all_sources}
        found[number] = frozenset(reads & droppable) - {number}
    return found
