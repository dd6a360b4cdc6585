"""What a measured step teaches: a profile that would have promised what was measured."""

from dataclasses import replace

from leanstep.ir import Plan, Profile, Verdict
from leanstep.simulator import simulate

# The share of the budget that may stay unused before a plan is made anew.
_MUCH_WASTED = 0.01

# Rounds in which the CPU's time is found; each leaves a fraction of the error.
_ROUNDS = 6


def with_missed_bytes(profile: Profile, verdict: Verdict) -> Profile:
    """The profile with what its account has left out."""
    missed = max(0, verdict.measured_peak_bytes - verdict.predicted_peak_bytes)
    return _with_slack(profile, missed)


def without_wasted_bytes(profile: Profile, verdict: Verdict) -> Profile | None:
    """The profile less what its account has too much, where that wastes some of the budget.

    Never so much that the untouched step would need more than is predicted for it.
    """
    wasted = min(verdict.predicted_peak_bytes, verdict.budget_bytes) - verdict.measured_peak_bytes
    excess = min(
        verdict.predicted_peak_bytes - verdict.measured_peak_bytes,
        profile.peak_bytes - verdict.baseline_peak_bytes,
    )
    is_wasted = wasted > _MUCH_WASTED * verdict.budget_bytes and excess > 0
    return _with_slack(profile, -excess) if is_wasted else None


def with_cpu_seconds(profile: Profile, plan: Plan, verdict: Verdict) -> Profile | None:
    """The profile with the CPU's time for what runs again, where the planned step waits for it.

    The untouched step may leave the CPU time to spare, so that a profile of it alone counts none.
    The time is such that the plan would have been predicted as it was measured. Compiled blocks
    were timed as they are issued.
    """
    is_counted = profile.is_compiled or profile.issue_seconds > 0
    if is_counted or not plan.changed or not verdict.waits_for_cpu:
        return None
    # A loss in chunks, which may save time, is not what runs again.
    of_loss = 0.0 if plan.loss is None else plan.loss.extra_seconds
    extra_seconds = verdict.measured_seconds - verdict.baseline_seconds - of_loss
    issue_seconds = verdict.issue_seconds
    for _ in range(_ROUNDS):
        found = simulate(profile.waiting_for_cpu(issue_seconds), plan).extra_seconds - of_loss
        if min(found, extra_seconds) <= 0:
            return None
        issue_seconds *= extra_seconds / found
    return profile.waiting_for_cpu(issue_seconds)


def _with_slack(profile: Profile, more_bytes: int) -> Profile:
    return replace(
        profile,
        slack_bytes=profile.slack_bytes + more_bytes,
        peak_bytes=profile.peak_bytes + more_bytes,
    )
