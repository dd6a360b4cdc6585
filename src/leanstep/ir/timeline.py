"""The predicted memory and time of a step under a plan."""

from dataclasses import dataclass, field

from leanstep.ir.graph import Category


@dataclass(frozen=True, slots=True)
class Point:
    """One op of the planned step; `replayed` marks an op that runs a second time.

    `live_bytes` is the level at the op's start, `peak_bytes` the highest level inside it. It runs
    before op `position` of the recorded step, or is that op.
    """

    op: int
    replayed: bool
    live_bytes: int
    peak_bytes: int
    seconds: float
    position: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes at every op of the planned step, and the breakdown at the peak."""

    points: tuple[Point, ...] = field(repr=False)
    peak: int
    at_peak: tuple[tuple[Category, int], ...]
    seconds: float
    extra_seconds: float

    @property
    def peak_bytes(self) -> int:
        """The highest level of the whole step."""
        return self.points[self.peak].peak_bytes
