"""The memory of a step by category, op by op: what is drawn."""

from dataclasses import dataclass, field

from leanstep.ir.codec import Saved
from leanstep.ir.graph import Category, Phase


@dataclass(frozen=True, slots=True)
class MemoryCurve(Saved):
    """The bytes of each category at every op of a step, replayed ones included.

    Op number i runs from `starts[i]` seconds to `starts[i + 1]`; the last start is the step's end.
    The categories of one op add up to the highest level inside it: what that op itself allocates
    counts as temporary.
    """

    starts: tuple[float, ...] = field(repr=False)
    phases: tuple[Phase, ...] = field(repr=False)
    layers: tuple[tuple[Category, tuple[int, ...]], ...] = field(repr=False)

    @property
    def totals(self) -> tuple[int, ...]:
        """The highest level inside each op."""
        return tuple(map(sum, zip(*(levels for _, levels in self.layers), strict=True)))

    @property
    def phase_starts(self) -> tuple[tuple[Phase, float], ...]:
        """When each phase of the step begins."""
        first = {phase: self.starts[self.phases.index(phase)] for phase in set(self.phases)}
        return tuple(sorted(first.items(), key=lambda item: item[1]))
