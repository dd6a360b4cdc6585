"""The whole pipeline in one call."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leanstep import engines, planner
from leanstep.api import WITHOUT_LIMIT, profile_for, refuse_fitted, unplanned_plan
from leanstep.config import read_config
from leanstep.corrections import with_cpu_seconds, with_missed_bytes, without_wasted_bytes
from leanstep.engines import Applied
from leanstep.errors import BudgetError, MeasureError, VerifyError
from leanstep.ir import Exclusion, Plan, Profile, Verdict
from leanstep.owners import Taken, taken_over
from leanstep.planner.options import check_engine
from leanstep.recorder.identity import identity_of
from leanstep.reduction import Reduction, reduce_gradients
from leanstep.reporters import render, render_html, report
from leanstep.sharing import (
    check_same,
    from_rank_0,
    num_ranks,
    refuse_communicating,
    shared_plan,
    together,
)
from leanstep.solvers.base import Solver
from leanstep.solvers.registry import find_solver
from leanstep.step import Loss, TrainingStep, make_step
from leanstep.truth import return_cached
from leanstep.units import check_budget, format_bytes, parse_budget
from leanstep.verifier import Look, judge, look_at_untouched

# The share of the step's time that a second plan must promise to save.
_WORTH_A_TRY = 0.02

# How often a plan whose measured peak is above the budget is made anew. Once is enough where the
# step is always the same; where sizes follow the data, as in mixtures of experts, no account is.
_MOST_CORRECTIONS = 3


@dataclass(frozen=True, repr=False)
class Fit:
    """A fitted model: its parts, a printed table, and the way back."""

    profile: Profile
    plan: Plan
    verdict: Verdict | None
    applied: Applied
    taken: Taken = field(default_factory=Taken)
    reduction: Reduction | None = None

    def __str__(self) -> str:
        """The table a person reads."""
        table = render(self.profile, self.plan, self.verdict)
        if not self.taken.put_back:
            return table
        return f"{table}\nswitched off until remove(): {', '.join(self.taken.names)}"

    def __repr__(self) -> str:
        """The same table: this is what a session shows."""
        return str(self)

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return render_html(self.profile, self.plan, self.verdict)

    def report(self, path: str | Path) -> None:
        """Write what was found as a page (`.html`), a figure (`.png`, `.svg`) or a trace (`.json`).

        Pages and figures need `pip install leanstep[report]`.
        """
        report([self.profile, self.plan, *([self.verdict] if self.verdict else [])], path)

    def remove(self) -> None:
        """Give the model back exactly as it was."""
        self.applied.remove()
        self.taken.give_back()
        if self.reduction is not None:
            self.reduction.remove()


def fit(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    budget: str | int = "60%",
    solver: str | Solver = "auto",
    engine: str = "auto",
    overrides: Mapping[str, str] | None = None,
    verify: bool = True,
    gradients_kept: bool = False,
    exact: bool = True,
    offload: bool = True,
    chunks: bool = True,
    takeover: bool = False,
) -> Fit:
    """Make a model train inside a memory budget, with the same numbers.

    Profiles one step, plans which activations to keep, applies the plan to the model in place,
    and (unless `verify=False`) runs both versions to compare every gradient, the peak and the
    time. Nothing but the model's blocks is changed, and `remove()` undoes it.

    Args:
        model: any `nn.Module`, on one device.
        batch: what the model is called with: a tensor, a tuple or list (in order), or a
            dict (keywords).
        loss: `loss(model, batch)` returns a scalar; by default the output's `.loss`, or the output.
        optimizer: counted in the peak and in the step; leave it out if there is none.
        budget: `"16GiB"`, `"16 GB"`, bytes, `"60%"` of the unplanned peak, or `"auto"` (the free
            memory of the GPU less a margin); it bounds the peak of everything on the device over
            the whole step.
        solver: `"auto"`, a name from `docs/solvers.md`, or a solver of one's own.
        engine: `"auto"`, `"replay"`, `"module"`, or `"inductor"`, which compiles the blocks: the
            budget's shares and the verdict are then about the compiled step.
        overrides: what to keep or recompute in any case:
            `{"encoder.*.attention": "recompute", "*::aten.mm": "keep"}`.
        verify: compare with the untouched model; costs about twenty steps.
        gradients_kept: plan for gradients alive at the start of the step (accumulation).
        exact: false also allows cheap replays that were not seen to give the same bits on this
            device; the verdict then says how far the gradients are from the untouched model's.
        offload: also move activations to pinned host memory and back while the GPU computes, as
            far as its link can without making the step wait; at most half of the free host memory.
        chunks: also compute the loss some rows at a time, with the same bits, where that saves time
            (a cross entropy in the model's own forward, which must not write into its logits after
            it unless it did in this first step).
        takeover: switch off checkpointing that the model already has, and `torch.compile`, until
            `remove()`; without it such a model is refused by the name of the other owner.
    """
    check_budget(budget)
    check_engine(engine)
    find_solver(solver)
    make = partial(make_step, model, batch, loss, optimizer, gradients_kept=gradients_kept)
    step = together(make)
    refuse_communicating(model)
    check_same(identity_of(model))
    with taken_over(model, takeover) as taken:
        make_plan = partial(
            planner.plan,
            solver=solver,
            engine=engine,
            overrides=overrides,
            exact=exact,
            offload=offload,
            chunks=chunks,
        )
        refuse_fitted(model)
        fitted = _fit_on_rank_0(
            model,
            lambda: _fit(
                step, profile_for(step, engine, exact=exact), budget, make_plan, verify=verify
            ),
        )
    return replace(fitted, taken=taken)


def from_config(
    model: torch.nn.Module,
    path: str | Path,
    *,
    batch: Any,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Fit:
    """Fit a model as a file says: `leanstep.yaml`, `pyproject.toml`, or a VISSL file as it is.

    See `docs/doors/vissl.md` for its keys. With `splits` as a number and no budget, the step is cut
    as the file says, whatever memory that takes. Gradients are averaged by hand where the file says
    so and there is a process group.

    Raises:
        InputError: a key or a value of the file means nothing; the message says what is near.
        BudgetError: no plan fits.
    """
    config = read_config(path)
    without_budget = "60%" if config.splits is None else WITHOUT_LIMIT
    fitted = fit(
        model,
        batch,
        loss,
        optimizer=optimizer,
        budget=without_budget if config.budget is None else config.budget,
        solver=config.chosen_solver,
        engine=config.engine,
        overrides=config.overrides,
        verify=config.verify,
        gradients_kept=config.gradients_kept,
        exact=config.exact,
        offload=config.offload and config.splits is None,
        chunks=config.chunks and config.splits is None,
        takeover=config.takeover,
    )
    if config.manual_gradient_reduction and num_ranks() > 1:
        fitted = replace(fitted, reduction=reduce_gradients(model))
    return fitted


def _fit_on_rank_0(model: torch.nn.Module, fit_here: Callable[[], Fit]) -> Fit:
    """Fit on rank 0, and apply its plan on all the others."""
    own: list[Fit] = []

    def work() -> tuple[Profile, Plan, Verdict | None]:
        own.append(fit_here())
        return own[0].profile, own[0].plan, own[0].verdict

    recorded, plan, verdict = from_rank_0(work)
    plan = shared_plan(lambda: plan)
    if own:
        return together(lambda: own[0])
    applied = together(lambda: engines.apply(model, plan))
    return Fit(recorded, plan, verdict, applied)


def _fit(
    step: TrainingStep,
    recorded: Profile,
    budget: str | int,
    make_plan: Callable[..., Plan],
    *,
    verify: bool,
) -> Fit:
    budget_bytes = _budget_bytes(budget, step, recorded)

    def plan_for(known: Profile) -> Plan:
        return make_plan(known, budget_bytes)

    # Looked at before anything is planned.
    before = _look_at_unplanned(step, recorded) if verify else None
    if before is None:
        recorded, applied = _rehearsed(step, recorded, plan_for)
        return Fit(recorded, applied.plan, None, applied)
    recorded, applied, verdict = _judged(step, recorded, before, plan_for)
    if verdict.within_budget:
        fitted = Fit(recorded, applied.plan, verdict, applied)
        for improve in (_with_more_bytes, _with_less_waiting):
            with _taken_back_on_error(fitted.applied):
                fitted = improve(step, fitted, before, plan_for)
        return fitted
    for _ in range(_MOST_CORRECTIONS):
        # The measured step knows what the account left out.
        applied.remove()
        known = with_missed_bytes(recorded, verdict)
        recorded, applied, verdict = _judged(step, known, before, plan_for)
        if verdict.within_budget:
            break
    return Fit(recorded, applied.plan, verdict, applied)


def _with_more_bytes(
    step: TrainingStep, first: Fit, before: Look, plan_for: Callable[[Profile], Plan]
) -> Fit:
    """Use what the first plan has left of the budget, if that is worth anything."""
    assert first.verdict is not None
    known = without_wasted_bytes(first.profile, first.verdict)
    before_seconds = first.plan.extra_seconds
    if known is None or plan_for(known).extra_seconds >= before_seconds:
        return first

    def is_better(second: Fit) -> bool:
        return second.plan.extra_seconds < before_seconds

    return _tried(step, first, before, known, plan_for, is_better)


def _with_less_waiting(
    step: TrainingStep, first: Fit, before: Look, plan_for: Callable[[Profile], Plan]
) -> Fit:
    """Let the CPU have less to do, where the device was seen to wait for it."""
    verdict = first.verdict
    assert verdict is not None
    known = with_cpu_seconds(first.profile, first.plan, verdict)
    if known is None:
        return first
    promised_seconds = verdict.baseline_seconds + plan_for(known).extra_seconds
    if promised_seconds > (1 - _WORTH_A_TRY) * verdict.measured_seconds:
        return first

    def is_better(second: Fit) -> bool:
        assert second.verdict is not None
        # Each by its own race with the untouched step: the machine may be another by now.
        return second.verdict.slowdown < verdict.slowdown

    return _tried(step, first, before, known, plan_for, is_better)


def _look_at_unplanned(step: TrainingStep, recorded: Profile) -> Look:
    """A look at the untouched step; where blocks are compiled, at the step with these unplanned."""
    applied = engines.apply(step.model, unplanned_plan(recorded)) if recorded.is_compiled else None
    try:
        return look_at_untouched(step, fits_device=recorded.fits_device)
    finally:
        if applied is not None:
            applied.remove()


def _tried(
    step: TrainingStep,
    first: Fit,
    before: Look,
    known: Profile,
    plan_for: Callable[[Profile], Plan],
    is_better: Callable[[Fit], bool],
) -> Fit:
    """Try once what is planned with another profile; the first plan stays unless it is beaten."""
    first.applied.set_aside()
    try:
        recorded, applied = _rehearsed(step, known, plan_for)
        verdict = _verdict(step, applied, before)
    except (BudgetError, MeasureError, VerifyError, torch.OutOfMemoryError) as error:
        # It does not fit after all, or is wrong; what does and is not is at hand.
        if isinstance(error, VerifyError):
            text = f"leanstep keeps its first plan, the second is wrong: {error}"
            warnings.warn(text, stacklevel=2)
        first.applied.resume()
        return first
    second = Fit(recorded, applied.plan, verdict, applied)
    if verdict.within_budget and is_better(second):
        return second
    applied.remove()
    first.applied.resume()
    return first


def _budget_bytes(budget: str | int, step: TrainingStep, recorded: Profile) -> int:
    free_bytes = None
    if step.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(step.device)
        free_bytes = free + torch.cuda.memory_reserved(step.device)
    return parse_budget(budget, unplanned_peak_bytes=recorded.peak_bytes, free_bytes=free_bytes)


def _rehearsed(
    step: TrainingStep, recorded: Profile, plan_for: Callable[[Profile], Plan]
) -> tuple[Profile, Applied]:
    """Plan, and plan around all that a dry run cannot do: blocks that do not repeat, the loss."""
    while True:
        applied = engines.apply(step.model, plan_for(recorded))
        return_cached(step.device)
        try:
            with _taken_back_on_error(applied):
                failed = _failed(step, applied)
        except (RuntimeError, TypeError) as error:
            if applied.plan.loss is None:
                raise
            # If it was something else, it comes again.
            recorded = replace(recorded, whole_loss=f"the step then raised {error!r}")
            continue
        if not failed and applied.has_met_loss:
            return recorded, applied
        applied.remove()
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


def _judged(
    step: TrainingStep, recorded: Profile, before: Look, plan_for: Callable[[Profile], Plan]
) -> tuple[Profile, Applied, Verdict]:
    """Plan and judge; once more with the loss as a whole, if in chunks it has other bits."""
    recorded, applied = _rehearsed(step, recorded, plan_for)
    try:
        return recorded, applied, _verdict(step, applied, before)
    except VerifyError:
        if applied.plan.loss is None:
            raise
    recorded = replace(recorded, whole_loss="in chunks it had other bits on this device")
    recorded, applied = _rehearsed(step, recorded, plan_for)
    return recorded, applied, _verdict(step, applied, before)


def _verdict(step: TrainingStep, applied: Applied, before: Look) -> Verdict:
    return_cached(step.device)
    with _taken_back_on_error(applied):
        verdict = judge(step, applied, before)
        if verdict.different and not verdict.inexact_allowed:
            raise VerifyError(verdict.different)
    return verdict


@contextmanager
def _taken_back_on_error(applied: Applied) -> Iterator[None]:
    try:
        yield
    except BaseException:
        applied.remove()
        raise
