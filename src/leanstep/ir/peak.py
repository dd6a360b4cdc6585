"""The highest point of a step: where it is, what is live there, and what would lower it."""

from dataclasses import dataclass
from typing import NamedTuple

from leanstep.ir.graph import Category, Phase


class Holder(NamedTuple):
    """Bytes of one category that a block call or module holds; without owner, the whole model."""

    category: Category
    owner: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The op at which a step has its peak.

    `live_bytes` is the level when it starts, `peak_bytes` the highest while it runs; what the op
    itself allocates is among the holders as a temporary. `other_live_bytes` is the level at the
    same place in the other step: of the untouched one for the planned peak, of the planned one for
    the unplanned peak. `block` is empty outside every block.
    """

    op: str
    phase: Phase
    is_replayed: bool
    module: str
    block: str
    source: str
    live_bytes: int
    peak_bytes: int
    other_live_bytes: int
    holders: tuple[Holder, ...]
    advice: str = ""

    @property
    def by_category(self) -> dict[Category, int]:
        """The bytes of each category, the largest first."""
        totals: dict[Category, int] = {}
        for holder in self.holders:
            totals[holder.category] = totals.get(holder.category, 0) + holder.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def place(self) -> str:
        """Where it is, in words."""
        again = ", run again for backward," if self.is_replayed else ""
        module = f" of {self.module}" if self.module else ""
        source = f" ({self.source})" if self.source else ""
        phase = Phase.BACKWARD if self.is_replayed else self.phase
        return f"{self.op}{again} in {phase.value}{module}{source}"
