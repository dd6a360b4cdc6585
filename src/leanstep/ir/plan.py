"""What to change: one decision for each block call."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from leanstep.ir import codec


class Engine(StrEnum):
    """How a block is run."""

    UNTOUCHED = "untouched"
    REPLAY = "replay"
    MODULE = "module"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one block call.

    `drop` names the storages that autograd shall not hold, each by the op that allocated it and
    its place among that op's new storages (`aten.addmm.default#3:0`). Under `module`
    everything inside is dropped and `drop` is empty. `why` is for people.

    An output that the next call saves, the border between the two, may be among them if the next
    decision says `border_in`: that call then runs with hooks (`replay`) even if it drops nothing
    itself, and its first request in backward brings the border back.
    """

    path: str
    occurrence: int
    children: tuple[str, ...]
    engine: Engine
    drop: tuple[str, ...]
    kept_bytes: int
    dropped_bytes: int
    extra_seconds: float
    why: str
    border_in: bool = False

    @property
    def takes_border(self) -> bool:
        """Whether the call gets its input in backward from the call before."""
        return self.border_in and self.engine is Engine.REPLAY


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision for each block call, and what the simulator says of them together.

    `bound_seconds` is a proved lower bound on the extra seconds of any plan in the same space,
    and `gap = (extra_seconds - bound_seconds) / max(bound_seconds, 1 % of the unplanned step)`.
    `movable_bytes` is the part of the peak that grows with the batch.
    """

    solver: str
    budget_bytes: int
    peak_bytes: int
    unplanned_peak_bytes: int
    movable_bytes: int
    step_seconds: float
    extra_seconds: float
    bound_seconds: float
    decisions: tuple[Decision, ...] = field(repr=False)
    model: str
    torch_version: str
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How far from the lower bound the plan can be, as a share."""
        scale = max(self.bound_seconds, 0.01 * self.step_seconds)
        return max(0.0, self.extra_seconds - self.bound_seconds) / scale if scale else 0.0

    @property
    def changed(self) -> tuple[Decision, ...]:
        """The decisions that change a block."""
        return tuple(d for d in self.decisions if d.engine is not Engine.UNTOUCHED)

    @property
    def pairs(self) -> Iterator[tuple[Decision, Decision | None]]:
        """Every decision with the one about the next call of the step."""
        return zip(self.decisions, (*self.decisions[1:], None), strict=False)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        codec.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that `save` wrote."""
        return codec.load(cls, Path(path))
