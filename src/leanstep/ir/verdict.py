"""What was promised and what was measured, side by side."""

from dataclasses import dataclass

from leanstep.ir.codec import Saved

# The share of the peak beyond which gaps in what the allocator holds are worth a word.
_MUCH_WASTED = 0.1

# The CPU is what a step waits for if issuing it takes nearly all of its time; that is worth a word
# where the step is that much slower than promised.
_MOSTLY = 0.85
_MUCH_SLOWER = 1.05

# The share of a step's time beyond which the distance of its repeats is worth a word.
_FAR_APART = 0.1


@dataclass(frozen=True, slots=True)
class Verdict(Saved):
    """The comparison of the untouched step with the planned one.

    `different` names what was not equal; it is empty when `gradients_equal`, `buffers_equal`,
    `loss_equal` and `random_state_equal` all hold. `within_spread` names what differs from run to
    run in the untouched model too (on CUDA) and no more than there. `assumptions` are sentences
    about the step that was measured.

    With `inexact_allowed` the plan may rebuild values by cheap replays with other bits:
    `largest_difference` is then the largest relative difference of the loss or a gradient, and
    `beyond_tolerance` names what is further off than the square root of its type's precision.

    Where the untouched step does not fit on the device (`baseline_fits`), its peak and time are
    predicted, and its numbers come from a run with activations in host memory.

    The reserved bytes are the most that the allocator took from the device for a step, with the
    gaps between what was allocated; 0 where there is no such pool (CPU), or where the untouched
    step does not fit. With `expandable_segments` it can use most of the gaps.

    `issue_seconds` is what the CPU takes to issue the planned step to a GPU; 0 on a CPU.

    Times are medians of several steps. The spread is what lay between the fastest and the slowest
    of them; 0 where it was not noted, or nothing was measured.
    """

    budget_bytes: int
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    baseline_seconds: float
    predicted_seconds: float
    measured_seconds: float
    loss_equal: bool
    gradients_equal: bool
    buffers_equal: bool
    random_state_equal: bool
    different: tuple[str, ...]
    within_spread: tuple[str, ...]
    assumptions: tuple[str, ...]
    inexact_allowed: bool = False
    largest_difference: float = 0.0
    beyond_tolerance: tuple[str, ...] = ()
    baseline_fits: bool = True
    baseline_reserved_bytes: int = 0
    measured_reserved_bytes: int = 0
    expandable_segments: bool = False
    issue_seconds: float = 0.0
    baseline_spread_seconds: float = 0.0
    measured_spread_seconds: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every number compared was bit-equal."""
        return not self.different and not self.within_spread

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is inside the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def slowdown(self) -> float:
        """How often the untouched step's time the planned one takes."""
        return self.measured_seconds / max(1e-12, self.baseline_seconds)

    @property
    def wasted_bytes(self) -> int:
        """What the allocator took beyond the peak, where that is much and can be helped; else 0."""
        gaps_bytes = self.measured_reserved_bytes - self.measured_peak_bytes
        is_much = gaps_bytes > _MUCH_WASTED * self.measured_peak_bytes
        return gaps_bytes if is_much and not self.expandable_segments else 0

    @property
    def waits_for_cpu(self) -> bool:
        """Whether the planned step is slow because the device waits for what the CPU issues."""
        is_issued_late = self.issue_seconds >= _MOSTLY * self.measured_seconds
        return is_issued_late and self.measured_seconds > _MUCH_SLOWER * self.predicted_seconds

    @property
    def baseline_spread(self) -> float:
        """How far the repeats of the untouched step were apart, as a share of its time."""
        return self.baseline_spread_seconds / max(1e-12, self.baseline_seconds)

    @property
    def measured_spread(self) -> float:
        """The same of the planned step."""
        return self.measured_spread_seconds / max(1e-12, self.measured_seconds)

    @property
    def has_uncertain_time(self) -> bool:
        """Whether the repeats were so far apart that the step times should not be relied on."""
        return max(self.baseline_spread, self.measured_spread) > _FAR_APART
