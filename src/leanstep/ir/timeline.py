"""The predicted memory and time of a step under a plan."""

from dataclasses import dataclass, field
from typing import NamedTuple

from leanstep.ir.graph import Category
from leanstep.ir.text import table
from leanstep.units import format_bytes, format_seconds


class Point(NamedTuple):
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

    def __str__(self) -> str:
        """Peak and time, and what the peak is made of."""
        parts = sorted(self.at_peak, key=lambda part: -part[1])
        rows = [("peak memory", format_bytes(self.peak_bytes))]
        rows += [(f"  {category.value}", format_bytes(nbytes)) for category, nbytes in parts]
        rows.append(("step time", format_seconds(self.seconds)))
        if self.extra_seconds:
            rows.append(("  ops that run again", format_seconds(self.extra_seconds)))
        return "\n".join(table(rows))

    @property
    def peak_bytes(self) -> int:
        """The highest level of the whole step."""
        return self.points[self.peak].peak_bytes
