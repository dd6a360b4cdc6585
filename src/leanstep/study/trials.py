"""One batch size, tried: predicted from an estimated profile, or measured on the device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from leanstep import planner
from leanstep.api import profile
from leanstep.errors import BudgetError, MeasureError
from leanstep.fitting.fitter import fit
from leanstep.ir import Plan, Reading, Trial
from leanstep.study.isolation import alone
from leanstep.study.textbook import textbook
from leanstep.truth import return_cached

# Makes model, batch, loss and optimizer for a batch size.
Maker = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all trials of a study have in common; `device` is one that need not be there."""

    make: Maker
    budget_bytes: int
    device: str | None
    solver: str
    engine: str
    offload: bool
    exact: bool
    isolated: bool

    def trial(self, batch: int) -> Trial:
        """Try one batch size."""
        if self.device is not None:
            return predicted(self, batch)
        if not self.isolated:
            return measured(self, batch)
        found = alone(measured, self, batch)
        return found or Trial(batch, None, None, failure="its process was killed: out of memory?")


def predicted(conditions: Conditions, batch: int) -> Trial:
    """What a device that is not here would need and take."""
    make = partial(conditions.make, batch)
    known = profile(make, device=conditions.device, engine=conditions.engine)
    untried = Trial(
        batch,
        Reading(known.peak_bytes, known.step_seconds, measured=False),
        None,
        device=f"{known.device} (estimated)",
        textbook=textbook(known),
    )
    try:
        plan = planner.plan(
            known,
            conditions.budget_bytes,
            solver=conditions.solver,
            engine=conditions.engine,
            offload=conditions.offload,
            exact=conditions.exact,
        )
    except BudgetError as error:
        return replace(untried, floor_bytes=error.floor_bytes)
    return replace(untried, planned=_promised(plan), host_bytes=plan.host_bytes)


def _promised(plan: Plan) -> Reading:
    return Reading(plan.peak_bytes, plan.step_seconds + plan.extra_seconds, measured=False)


def measured(conditions: Conditions, batch: int) -> Trial:
    """What the device itself needs and takes; where memory runs out, the trial says so."""
    try:
        return _measured(conditions, batch)
    except (torch.OutOfMemoryError, MeasureError) as error:
        first_line = str(error).partition("\n")[0]
        return Trial(batch, None, None, failure=f"{type(error).__name__}: {first_line}")
    finally:
        # What a failed trial leaves behind would be counted in the next one.
        for index in range(torch.cuda.device_count()):
            return_cached(torch.device("cuda", index))


def _measured(conditions: Conditions, batch: int) -> Trial:
    model, data, *rest = conditions.make(batch)
    loss, optimizer = (*rest, None, None)[:2]
    try:
        fitted = fit(
            model,
            data,
            loss,
            optimizer=optimizer,
            budget=conditions.budget_bytes,
            solver=conditions.solver,
            engine=conditions.engine,
            offload=conditions.offload,
            exact=conditions.exact,
        )
    except BudgetError as error:
        known = profile(
            model,
            data,
            loss,
            optimizer=optimizer,
            engine=conditions.engine,
            exact=conditions.exact,
        )
        return Trial(
            batch,
            Reading(known.peak_bytes, known.step_seconds, known.fits_device),
            None,
            floor_bytes=error.floor_bytes,
            device=known.device,
            textbook=textbook(known),
        )
    verdict = fitted.verdict
    fitted.remove()
    assert verdict is not None, "fit verifies unless it is told not to"
    return Trial(
        batch,
        Reading(verdict.baseline_peak_bytes, verdict.baseline_seconds, verdict.baseline_fits),
        Reading(verdict.measured_peak_bytes, verdict.measured_seconds, measured=True),
        equal=verdict.exact,
        device=fitted.profile.device,
        promised=_promised(fitted.plan),
        host_bytes=fitted.plan.host_bytes,
        textbook=textbook(fitted.profile),
    )
