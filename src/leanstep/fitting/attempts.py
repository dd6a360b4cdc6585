"""The closed loop behind `fit`: a plan is tried, judged by a measured step, and made again.

A dry run sends the planner back around what cannot be done; a measured peak above the budget, bytes
of it left unused, or a device that waits for the CPU, with what was learned.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from leanstep import engines
from leanstep.api import unplanned_plan
from leanstep.engines import Applied
from leanstep.errors import BudgetError, MeasureError, VerifyError
from leanstep.ir import Exclusion, Plan, Profile, Verdict
from leanstep.planner.corrections import with_cpu_seconds, with_missed_bytes, without_wasted_bytes
from leanstep.stages import stage
from leanstep.step.training import TrainingStep
from leanstep.truth import return_cached
from leanstep.units import format_bytes
from leanstep.verifier import Look, judge, look_at_untouched

# The share of the step's time that a second plan must promise to save.
_WORTH_A_TRY = 0.02

# How often a plan whose measured peak is above the budget is made anew. Once is enough where the
# step is always the same; where sizes follow the data, as in mixtures of experts, no account is.
_MOST_CORRECTIONS = 3

PlanFor = Callable[[Profile], Plan]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan in force: the profile it was made by, and what a measured step says, if one was."""

    profile: Profile
    applied: Applied
    verdict: Verdict | None = None

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.applied.plan

    @property
    def judged(self) -> Verdict:
        """The verdict, where there is one."""
        assert self.verdict is not None, "asked only of what was measured"
        return self.verdict


def verified(step: TrainingStep, recorded: Profile, plan_for: PlanFor) -> Attempt:
    """The best of the plans that measured steps lead to, with its verdict."""
    # Looked at before anything is planned.
    before = _look_at_unplanned(step, recorded)
    attempt = _judged(step, recorded, before, plan_for)
    if attempt.judged.within_budget:
        for improve in (_with_more_bytes, _with_less_waiting):
            with _taken_back_on_error(attempt.applied):
                attempt = improve(step, attempt, before, plan_for)
        return attempt
    for _ in range(_MOST_CORRECTIONS):
        # The measured step knows what the account left out.
        attempt.applied.remove()
        known = with_missed_bytes(attempt.profile, attempt.judged)
        with stage("again, as the measured peak is above the budget"):
            attempt = _judged(step, known, before, plan_for)
        if attempt.judged.within_budget:
            break
    return attempt


def _with_more_bytes(
    step: TrainingStep, first: Attempt, before: Look, plan_for: PlanFor
) -> Attempt:
    """Use what the first plan has left of the budget, if that is worth anything."""
    known = without_wasted_bytes(first.profile, first.judged)
    before_seconds = first.plan.extra_seconds
    if known is None or plan_for(known).extra_seconds >= before_seconds:
        return first

    def is_better(second: Attempt) -> bool:
        return second.plan.extra_seconds < before_seconds

    with stage("again, as some of the budget was left"):
        return _tried(step, first, before, known, plan_for, is_better)


def _with_less_waiting(
    step: TrainingStep, first: Attempt, before: Look, plan_for: PlanFor
) -> Attempt:
    """Let the CPU have less to do, where the device was seen to wait for it."""
    verdict = first.judged
    known = with_cpu_seconds(first.profile, first.plan, verdict)
    if known is None:
        return first
    promised_seconds = verdict.baseline_seconds + plan_for(known).extra_seconds
    if promised_seconds > (1 - _WORTH_A_TRY) * verdict.measured_seconds:
        return first

    def is_better(second: Attempt) -> bool:
        # Each by its own race with the untouched step: the machine may be another by now.
        return second.judged.slowdown < verdict.slowdown

    with stage("again, as the device waits for the CPU"):
        return _tried(step, first, before, known, plan_for, is_better)


def _look_at_unplanned(step: TrainingStep, recorded: Profile) -> Look:
    """A look at the untouched step; where blocks are compiled, at the step with these unplanned."""
    applied = engines.apply(step.model, unplanned_plan(recorded)) if recorded.is_compiled else None
    try:
        with stage("measuring the untouched step"):
            return look_at_untouched(step, fits_device=recorded.fits_device)
    finally:
        if applied is not None:
            applied.remove()


def _tried(
    step: TrainingStep,
    first: Attempt,
    before: Look,
    known: Profile,
    plan_for: PlanFor,
    is_better: Callable[[Attempt], bool],
) -> Attempt:
    """Try once what is planned with another profile; the first plan stays unless it is beaten."""
    first.applied.set_aside()
    try:
        second = _measured(step, rehearsed(step, known, plan_for), before)
    except (BudgetError, MeasureError, VerifyError, torch.OutOfMemoryError) as error:
        # It does not fit after all, or is wrong; what does and is not is at hand.
        if isinstance(error, VerifyError):
            text = f"leanstep keeps its first plan, the second is wrong: {error}"
            warnings.warn(text, stacklevel=2)
        first.applied.resume()
        return first
    if second.judged.within_budget and is_better(second):
        return second
    second.applied.remove()
    first.applied.resume()
    return first


def rehearsed(step: TrainingStep, recorded: Profile, plan_for: PlanFor) -> Attempt:
    """Plan, and plan around all that a dry run cannot do: blocks that do not repeat, the loss."""
    again: AbstractContextManager[None] = nullcontext()
    while True:
        with again:
            applied = engines.apply(step.model, plan_for(recorded))
        return_cached(step.device)
        try:
            with stage("dry run"), _taken_back_on_error(applied):
                failed = _failed(step, applied)
        except (RuntimeError, TypeError) as error:
            if applied.plan.loss is None:
                raise
            # If it was something else, it comes again.
            recorded = replace(recorded, whole_loss=f"the step then raised {error!r}")
            again = stage("again, as the step raised with the loss in chunks")
            continue
        if not failed and applied.has_met_loss:
            return Attempt(recorded, applied)
        applied.remove()
        again = stage("again, around what the dry run could not do")
        recorded = replace(recorded, exclusions=(*recorded.exclusions, *failed))
        if not applied.has_met_loss:
            recorded = replace(recorded, whole_loss="no call of it was seen that could be")


def _failed(step: TrainingStep, applied: Applied) -> tuple[Exclusion, ...]:
    try:
        return engines.rehearse(step, applied)
    except torch.OutOfMemoryError as error:
        peak = format_bytes(applied.plan.peak_bytes)
        raise MeasureError(
            f"the planned step ran out of memory on {step.device}, although its peak is predicted "
            f"to be {peak}: ask for a smaller budget, or see what else holds memory there. {error}"
        ) from None


def _judged(step: TrainingStep, recorded: Profile, before: Look, plan_for: PlanFor) -> Attempt:
    """Plan and judge; once more with the loss as a whole, if in chunks it has other bits."""
    attempt = rehearsed(step, recorded, plan_for)
    try:
        return _measured(step, attempt, before)
    except VerifyError:
        if attempt.plan.loss is None:
            raise
    reason = "in chunks it had other bits on this device"
    recorded = replace(attempt.profile, whole_loss=reason)
    with stage("again, as the loss in chunks has other bits"):
        return _measured(step, rehearsed(step, recorded, plan_for), before)


def _measured(step: TrainingStep, attempt: Attempt, before: Look) -> Attempt:
    return_cached(step.device)
    with stage("measuring the planned step"), _taken_back_on_error(attempt.applied):
        verdict = judge(step, attempt.applied, before)
        if verdict.different and not verdict.inexact_allowed:
            raise VerifyError(verdict.different)
    return replace(attempt, verdict=verdict)


@contextmanager
def _taken_back_on_error(applied: Applied) -> Iterator[None]:
    try:
        yield
    except BaseException:
        applied.remove()
        raise
