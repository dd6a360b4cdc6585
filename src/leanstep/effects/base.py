"""Shifts, replays, and the effect they make up; and what more than one engine holds for itself."""

from dataclasses import dataclass

from leanstep.ir import Category, Graph, Profile, RecipeCost
from leanstep.rebuild.block import BlockGraph

# The state of torch's CPU generator, held for a block whose draws are replayed.
GENERATOR_BYTES = 5056


@dataclass(frozen=True, slots=True)
class Shift:
    """`nbytes` more (or less) are live at the start of every op p with start <= p < stop.

    They are those of a storage, or (-1) something that the engine holds for itself.
    """

    start: int
    stop: int
    nbytes: int
    category: Category
    storage: int = -1


@dataclass(frozen=True, slots=True)
class Replay:
    """An op run again before op `position`, by a recipe where there is one.

    `live_bytes` and `peak_bytes` are relative to the level at the start of op `position`.
    """

    op: int
    position: int
    live_bytes: int
    peak_bytes: int
    recipe: RecipeCost | None = None

    def seconds(self, profile: Profile) -> float:
        """The time it takes: on the device, or to issue it where the device waits for the CPU."""
        seconds = profile.seconds(self.op) if self.recipe is None else self.recipe.seconds
        return max(seconds, profile.launch_seconds)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one decision does to the step.

    `added_seconds` is what the block's own ops take longer, beside the replays; `num_copies` the
    values that wait on the host.
    """

    shifts: tuple[Shift, ...] = ()
    replays: tuple[Replay, ...] = ()
    added_seconds: float = 0.0
    num_copies: int = 0

    def seconds(self, profile: Profile) -> float:
        """What it adds to the step: the time of all that runs again, and of the call's own work."""
        if not self.shifts and not self.replays:
            return self.added_seconds
        replayed = sum(replay.seconds(profile) for replay in self.replays)
        copied = self.num_copies * profile.copy_seconds
        return self.added_seconds + replayed + copied + profile.call_seconds


def state_bytes(graph: Graph) -> int:
    """What a state of the CPU's generator takes of the memory that is planned."""
    return GENERATOR_BYTES if graph.is_on_host else 0


def outside_reads(view: BlockGraph) -> set[int]:
    """The storages a block call reads that were there before it."""
    block = view.block
    reads = {
        value.storage
        for index in range(block.start, block.stop)
        for value in view.graph.ops[index].reads
    }
    return reads - view.own_storages
