"""Compare the planned step with the untouched one: every number, peak and time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from leanstep.engines import Applied
from leanstep.ir import Verdict
from leanstep.recorder import in_host_memory
from leanstep.step.outcome import (
    Outcome,
    Spread,
    differences,
    distances,
    run_for_outcome,
    widened,
)
from leanstep.step.seconds import StepTime, median_time, step_time
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep
from leanstep.truth import Peak, has_expandable_segments, measured_peak, resident_bytes

# Runs of the untouched step to learn its spread, where the planned one differs.
MOST_UNTOUCHED_RUNS = 6

# Runs of the planned step to find one in which no call is recorded; there are blocks that always
# are.
_MOST_TRIES = 3


@dataclass(frozen=True)
class Look:
    """One step seen from all sides; its memory only if it fits on the device.

    `spread` is how far its numbers have moved from run to run, so far as that was looked at.
    """

    outcome: Outcome
    spread: Spread
    resident_bytes: int
    peak: Peak
    fits_device: bool = True


def look(step: TrainingStep) -> Look:
    """Run a step for its numbers, then for its memory; leave no trace."""
    outcome = _numbers(step, nullcontext)
    with untouched(step):
        # Optimizer state is made at the first step and counts in the peak from then on.
        step.first_run()
        resident = resident_bytes(step)
        peak = measured_peak(step.run, step.device)
    return Look(outcome, {}, resident, peak)


def look_at_untouched(step: TrainingStep, *, fits_device: bool) -> Look:
    """The same, before a plan is in force.

    A step that does not fit is run for its numbers alone, with its activations in host memory.
    """
    if fits_device:
        return look(step)
    return Look(_numbers(step, in_host_memory), {}, 0, Peak(0), fits_device=False)


def _numbers(step: TrainingStep, room: Callable[[], AbstractContextManager[None]]) -> Outcome:
    with untouched(step), room():
        return run_for_outcome(step)


def race(
    step: TrainingStep, applied: Applied, rounds: int = 3, *, fits_device: bool = True
) -> tuple[StepTime, StepTime]:
    """The median times of the untouched and the planned step, in turns on a noisy machine.

    An untouched step that cannot run takes what the plan says.
    """
    before, after = [], []
    with untouched(step):
        for _ in range(rounds):
            if fits_device:
                with applied.paused():
                    step.run()
                    before.append(step_time(step.run, step.device))
            else:
                before.append(StepTime(applied.plan.step_seconds))
            step.run()
            after.append(_unrecorded_time(step, applied))
    return median_time(before), median_time(after)


def _unrecorded_time(step: TrainingStep, applied: Applied) -> StepTime:
    """The time of a planned step as it will be: some calls of the first ones are recorded anew."""
    for _ in range(_MOST_TRIES):
        num_recorded = applied.rounds.num_recorded
        took = step_time(step.run, step.device)
        if applied.rounds.num_recorded == num_recorded:
            break
    return took


def judge(step: TrainingStep, applied: Applied, before: Look) -> Verdict:
    """Judge the planned step, now in force, against a look at the untouched one."""
    plan, after, fits_device = applied.plan, look(step), before.fits_device
    baseline, measured = race(step, applied, fits_device=fits_device)
    on_cpu = step.device.type == "cpu"
    before = _with_spread(step, applied, before, after.outcome)
    different, spread = differences(before.outcome, after.outcome, before.spread)
    apart = {} if plan.exact else distances(before.outcome, after.outcome)
    # The CPU's allocator cannot tell what it holds: what the recording saw counts there too.
    known = plan.peak_bytes - plan.movable_bytes if on_cpu else 0
    return Verdict(
        budget_bytes=plan.budget_bytes,
        baseline_peak_bytes=before.peak.rise_bytes + max(before.resident_bytes, known)
        if fits_device
        else plan.unplanned_peak_bytes,
        predicted_peak_bytes=plan.peak_bytes,
        measured_peak_bytes=after.peak.rise_bytes + max(after.resident_bytes, known),
        baseline_seconds=baseline.seconds,
        predicted_seconds=baseline.seconds + plan.extra_seconds,
        measured_seconds=measured.seconds,
        loss_equal="the loss" not in different,
        gradients_equal=not any(name.startswith("gradient") for name in different),
        buffers_equal=not any(name.startswith("buffer") for name in different),
        random_state_equal=not any(name.startswith("random") for name in different),
        different=different,
        within_spread=spread,
        assumptions=assumptions(step, fits_device=fits_device),
        baseline_fits=fits_device,
        inexact_allowed=not plan.exact,
        largest_difference=max((distance for distance, _ in apart.values()), default=0.0),
        baseline_reserved_bytes=before.peak.reserved_bytes,
        measured_reserved_bytes=after.peak.reserved_bytes,
        expandable_segments=has_expandable_segments(step.device),
        issue_seconds=measured.issue_seconds,
        baseline_spread_seconds=baseline.spread_seconds,
        measured_spread_seconds=measured.spread_seconds,
        beyond_tolerance=tuple(name for name, (far, most) in apart.items() if not far <= most),
    )


def _with_spread(step: TrainingStep, applied: Applied, before: Look, new: Outcome) -> Look:
    """Where the planned step differs, run the untouched one again: it may not repeat itself.

    The CPU does not sum in another order from run to run: what moves there at all is drawn anew,
    and one more run shows it. Many CUDA kernels sum in the order they finish.
    """
    on_cpu = step.device.type == "cpu"
    room = nullcontext if before.fits_device else in_host_memory
    for _ in range(1 if on_cpu else MOST_UNTOUCHED_RUNS):
        if not differences(before.outcome, new, before.spread)[0]:
            break
        with applied.paused():
            again = _numbers(step, room)
        spread = widened(before.spread, before.outcome, again, sums_in_order=on_cpu)
        before = replace(before, spread=spread)
    return before


def assumptions(step: TrainingStep, *, fits_device: bool = True) -> tuple[str, ...]:
    """What was measured, in sentences a person can check against their own loop."""
    if step.gradients_kept:
        start = "gradients are alive when the step starts (accumulation), and stay"
    else:
        start = "gradients are None when the step starts, and set to None at its end"
    update = "optimizer.step() is part of it" if step.optimizer else "it has no optimizer"
    if step.optimizer and step.gradients_kept:
        update = "optimizer.step() is not part of it, its state is there"
    said = ("one batch of the shapes given", start, update, "outputs are dropped after backward")
    if fits_device:
        return said
    return (
        *said,
        "the untouched step does not fit on the device: its peak and time are predicted, and its "
        "numbers were computed with activations in host memory",
    )
