"""What to change: one decision for each block call."""

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
    everything inside is dropped and `drop` is empty. `recipes` names, in the same way, what comes
    back by a cheap replay instead of its op. `why` is for people.
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
    recipes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision for each block call, and what the simulator says of them together.

    `bound_seconds` is a proved lower bound on the extra seconds of any plan in the same space,
    and `gap = (extra_seconds - bound_seconds) / max(bound_seconds, 1 % of the unplanned step)`.
    `movable_bytes` is the part of the peak that grows with the batch. `exact` is false where the
    user allowed cheap replays whose bits are not the op's own.
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
    exact: bool = True

    @property
    def gap(self) -> float:
        """How far from the lower bound the plan can be, as a share."""
        scale = max(self.bound_seconds, 0.01 * self.step_seconds)
        return max(0.0, self.extra_seconds - self.bound_seconds) / scale if scale else 0.0

    @property
    def changed(self) -> tuple[Decision, ...]:
        """The decisions that change a block."""
        return tuple(d for d in self.decisions if d.engine is not Engine.UNTOUCHED)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        codec.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that `save` wrote."""
        return codec.load(cls, Path(path))
