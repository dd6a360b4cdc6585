"""The public verbs that need torch, each one stage of the pipeline."""

import dataclasses
from typing import Any

import torch

from leanstep import engines
from leanstep.engines.attach import is_attached
from leanstep.errors import InputError, MeasureError, PlanError
from leanstep.ir import Plan, Profile, Verdict
from leanstep.ir.check import check_blocks, check_graph
from leanstep.profiler import measure, with_recipes
from leanstep.profiler.cache import device_name
from leanstep.recorder import record
from leanstep.recorder.blocks import find_blocks
from leanstep.recorder.signatures import Signatures
from leanstep.simulator import simulate, static_bytes
from leanstep.state import untouched
from leanstep.step import Loss, TrainingStep, make_step
from leanstep.truth import median_seconds, peak_rise_bytes, resident_bytes
from leanstep.verifier import judge, look


def profile(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    gradients_kept: bool = False,
) -> Profile:
    """Record one training step of a model, find its blocks, and time its ops.

    Runs a handful of steps and leaves no trace of them. Without an optimizer the step ends with
    backward. `gradients_kept` profiles a step that adds to existing gradients.
    """
    step = make_step(model, batch, loss, optimizer, gradients_kept=gradients_kept)
    refuse_fitted(model)
    return profile_step(step)


def profile_step(step: TrainingStep) -> Profile:
    """Profile a step that has been checked."""
    signatures = Signatures()
    with untouched(step):
        # Optimizer state is made at the first step; it must be there before the recorded one.
        step.first_run()
        seconds = median_seconds(step.run, step.device)
        resident = resident_bytes(step)
        graph = record(step, signatures)
        check_graph(graph)
        rise = _measured_rise(step)
    worth = [False] * len(signatures.specs)
    for op in graph.ops:
        worth[op.cost] |= bool(op.writes)
    costs, notes = measure(signatures.specs, worth, step.device)
    blocks = find_blocks(step.model, graph)
    check_blocks(graph, blocks)
    draft = Profile(
        graph=graph,
        blocks=blocks,
        costs=tuple(with_recipes(costs, signatures.specs, step.device)),
        step_seconds=seconds,
        other_bytes=0,
        peak_bytes=0,
        device=device_name(step.device),
        torch_version=torch.__version__,
        model=fingerprint(step.model),
        gradients_kept=step.gradients_kept,
        notes=tuple(notes),
    )
    return _with_peak(draft, max(0, resident - static_bytes(draft)), rise)


def _measured_rise(step: TrainingStep) -> int:
    """The peak above what is resident, by the allocator; 0 where it cannot be measured."""
    try:
        return peak_rise_bytes(step.run, step.device)
    except MeasureError:
        return 0


def _with_peak(draft: Profile, other_bytes: int, measured_rise: int) -> Profile:
    whole = dataclasses.replace(draft, other_bytes=other_bytes)
    recorded_rise = simulate(whole).peak_bytes - static_bytes(whole)
    whole = dataclasses.replace(whole, slack_bytes=max(0, measured_rise - recorded_rise))
    return dataclasses.replace(whole, peak_bytes=simulate(whole).peak_bytes)


def fingerprint(model: torch.nn.Module) -> str:
    """Name a model by its class and what its parameters look like."""
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    name = type(model).__name__
    return f"{name}, {len(parameters)} tensors, {count} parameters"


def apply(model: torch.nn.Module, plan: Plan) -> engines.Applied:
    """Let a model train as a plan says; `remove()` of what comes back undoes it."""
    refuse_fitted(model)
    refuse_other_model(model, plan)
    return engines.apply(model, plan)


def verify(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan,
    gradients_kept: bool = False,
) -> Verdict:
    """Run the untouched and the planned step from the same state and compare every number."""
    step = make_step(model, batch, loss, optimizer, gradients_kept=gradients_kept)
    refuse_fitted(model)
    refuse_other_model(model, plan)
    before = look(step)
    applied = engines.apply(model, plan)
    try:
        return judge(step, applied, before)
    finally:
        applied.remove()


def refuse_other_model(model: torch.nn.Module, plan: Plan) -> None:
    """Say so when a plan was made for a model of another shape."""
    if plan.model != fingerprint(model):
        raise PlanError(
            f"the plan is for another model: it was made for {plan.model}, "
            f"this one is {fingerprint(model)}"
        )


def refuse_fitted(model: torch.nn.Module) -> None:
    """Say so when a plan is already in force."""
    if any(is_attached(module) for module in model.modules()):
        raise InputError("this model is already fitted: call remove() on what fit returned first")
