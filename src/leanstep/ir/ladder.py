"""A plan for every budget: what each block call keeps, from the untouched peak downwards."""

from dataclasses import dataclass, field
from typing import NamedTuple

from leanstep.ir.codec import Saved


class Share(NamedTuple):
    """What one block call keeps on the device, runs again for, and moves to the host."""

    name: str
    kept_bytes: int
    dropped_bytes: int
    moved_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rung:
    """The plan for one budget.

    `batch_growth` says how many times larger the batch could be under the same budget with some
    plan of the ladder, and `untouched_growth` without a plan: predicted from the one batch that was
    profiled, with activations and temporaries growing as the batch does. `batch_extra_seconds` is
    the extra time of that plan, in a step of the profiled batch.
    """

    budget_bytes: int
    peak_bytes: int
    extra_seconds: float
    bound_seconds: float
    host_bytes: int
    shares: tuple[Share, ...] = field(repr=False)
    batch_growth: float = 0.0
    batch_extra_seconds: float = 0.0
    untouched_growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Ladder(Saved):
    """The plans of one solver by falling budget; `batch` is that of the profile, 0 if unknown."""

    solver: str
    batch: int
    step_seconds: float
    unplanned_peak_bytes: int
    rungs: tuple[Rung, ...] = field(repr=False)
