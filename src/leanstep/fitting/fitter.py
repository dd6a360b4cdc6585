"""The whole pipeline in one call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leanstep import engines, planner
from leanstep.api import WITHOUT_LIMIT, profile_for, refuse_fitted
from leanstep.config import read_config
from leanstep.engines import Applied
from leanstep.fitting.attempts import Attempt, rehearsed, verified
from leanstep.ir import Plan, Profile, Verdict
from leanstep.lazy.firststep import FirstStep
from leanstep.owners import Taken, taken_over
from leanstep.planner.options import check_engine
from leanstep.ranks.reduction import Reduction, reduce_gradients
from leanstep.ranks.sharing import (
    check_same,
    from_rank_0,
    num_ranks,
    refuse_communicating,
    shared_plan,
    together,
)
from leanstep.recorder.identity import identity_of
from leanstep.reporters import render, render_html, report
from leanstep.solvers.base import Solver
from leanstep.solvers.registry import find_solver
from leanstep.stages import stage
from leanstep.step.training import Loss, TrainingStep, make_step
from leanstep.units import check_budget, parse_budget


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
    # A loop that was interrupted in its first step has not told of its end, and would be measured.
    FirstStep.fail_open_ones()
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
        try_plans = verified if verify else rehearsed

        def fit_here() -> Attempt:
            with stage(f"fitting {type(model).__name__}"):
                recorded = profile_for(step, engine, exact=exact)
                budget_bytes = _budget_bytes(budget, step, recorded)
                return try_plans(step, recorded, lambda known: make_plan(known, budget_bytes))

        fitted = _fit_on_rank_0(model, fit_here)
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


def _fit_on_rank_0(model: torch.nn.Module, fit_here: Callable[[], Attempt]) -> Fit:
    """Fit on rank 0, and apply its plan on all the others."""
    own: list[Applied] = []

    def work() -> tuple[Profile, Plan, Verdict | None]:
        attempt = fit_here()
        own.append(attempt.applied)
        return attempt.profile, attempt.plan, attempt.verdict

    recorded, plan, verdict = from_rank_0(work)
    plan = shared_plan(lambda: plan)
    applied = together(lambda: own[0] if own else engines.apply(model, plan))
    return Fit(recorded, plan, verdict, applied)


def _budget_bytes(budget: str | int, step: TrainingStep, recorded: Profile) -> int:
    free_bytes = None
    if step.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(step.device)
        free_bytes = free + torch.cuda.memory_reserved(step.device)
    return parse_budget(budget, unplanned_peak_bytes=recorded.peak_bytes, free_bytes=free_bytes)
