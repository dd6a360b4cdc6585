"""The memory of a step by category, op by op: what is drawn."""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Self

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

    def thinned(self, columns: int) -> Self:
        """The same with at most one op for each of so many equal stretches of time a phase.

        It is the op with the highest level there, so that no peak is lost.
        """
        totals, last = self.totals, self.starts[-1]

        def column(place: int) -> tuple[Phase, int]:
            share = self.starts[place] / last if last else 0.0
            return self.phases[place], min(columns - 1, int(columns * share))

        groups = [list(places) for _, places in groupby(range(len(totals)), key=column)]
        kept = [max(places, key=totals.__getitem__) for places in groups]
        return type(self)(
            starts=(*(self.starts[places[0]] for places in groups), last),
            phases=tuple(self.phases[place] for place in kept),
            layers=tuple(
                (key, tuple(levels[place] for place in kept)) for key, levels in self.layers
            ),
        )
