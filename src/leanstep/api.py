"""The public verbs that need torch, each one stage of the pipeline."""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from leanstep import engines, planner
from leanstep.engines.attach import is_attached
from leanstep.engines.check import check_model, check_step
from leanstep.errors import InputError, MeasureError
from leanstep.estimator import estimated_profile
from leanstep.forms import profile_compiled
from leanstep.imagine import Factory, Ingredients, check_ranks
from leanstep.ir import Cost, Fact, Graph, Plan, Profile, Verdict
from leanstep.ir.check import check_blocks, check_graph
from leanstep.ir.codec import check_kind
from leanstep.marks import marks_of
from leanstep.owners import refuse_owners
from leanstep.planner.options import check_engine
from leanstep.profiler import measure, with_recipes
from leanstep.profiler.cache import device_name
from leanstep.profiler.link import measured_link
from leanstep.recorder import Attic, first_run_fits, record
from leanstep.recorder.blocks import find_blocks
from leanstep.recorder.company import Company
from leanstep.recorder.identity import identity_of
from leanstep.recorder.signatures import Signatures
from leanstep.simulator import simulate, static_bytes
from leanstep.stages import stage
from leanstep.step.seconds import StepTime, forward_waits_for_cpu, median_step_time
from leanstep.step.state import untouched
from leanstep.step.training import Loss, TrainingStep, make_step
from leanstep.truth import UNCUT_BYTES, peak_rise_bytes, resident_bytes
from leanstep.verifier import judge, look_at_untouched

# The share of a step's time beyond which it counts as all of it: what is left is measuring.
_MOSTLY = 0.85

# Ops one by one take less than the step. Where they take so many times as long, the machine was
# busy when they were timed: now, or in an earlier run that has left its figures on the disk.
_TOO_LONG = 1.5

# A budget that every step fits.
WITHOUT_LIMIT = 1 << 60

# Models whose first step `lean` waits for: it would take a step of ours for theirs.
WAITING: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()


def profile(
    model: torch.nn.Module | Factory,
    batch: Any = None,
    loss: Loss | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | None = None,
    gradients_kept: bool = False,
    engine: str = "auto",
    exact: bool = True,
    ranks: int | None = None,
) -> Profile:
    """Record one training step of a model, find its blocks, and time its ops.

    Runs a handful of steps and leaves no trace of them. Without an optimizer the step ends with
    backward. `gradients_kept` profiles a step that adds to existing gradients.

    With `device` (`"h200"`, `"a100-80gb"`, `"rtx4090"`, `"rtx3090"`) the profile is estimated for
    that device, which need not be there: nothing is run or allocated. The model may then be on
    `meta`, or in place of model and batch there may be a function without arguments that returns
    model, batch, loss and optimizer; it is called where new tensors take no memory.

    With `ranks` as well, that function's model is sharded over so many processes by FSDP2, block by
    block, and the profile is that of the one with the largest shards; none but this process is
    started. A function with a parameter `mesh` is given all of them as a mesh, to shard its model
    itself.

    With `engine="inductor"` the profile is that of the step with its blocks compiled: each kind of
    block is compiled in several forms, and each of them measured, which takes seconds a form. With
    `exact=False` fused kernels may round as they like, and forms whose bits differ are kept.
    """
    check_engine(engine)
    if device is not None and engine == "inductor":
        raise InputError("compiled blocks are measured on their device: leave out device=")
    if ranks is not None:
        _check_ranks(model, device, ranks)
    if device is not None:
        source = _source(model, batch, loss, optimizer)
        with stage(f"profiling for {device}"):
            return estimated_profile(source, device, gradients_kept=gradients_kept, ranks=ranks)
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"model is {type(model).__name__}, not a torch.nn.Module: "
            "a function that makes one goes with device="
        )
    step = make_step(model, batch, loss, optimizer, gradients_kept=gradients_kept)
    refuse_fitted(model)
    with stage(f"profiling {type(model).__name__}"):
        return profile_for(step, engine, exact=exact)


def _check_ranks(model: torch.nn.Module | Factory, device: str | None, ranks: int) -> None:
    check_ranks(ranks)
    if device is None:
        raise InputError("ranks= imagines processes on a device: name it, as in device='h200'")
    if isinstance(model, torch.nn.Module):
        raise InputError(
            "with ranks= the model is sharded: give a function that makes model, batch, loss and "
            "optimizer, not a model that you go on using"
        )


def _source(
    model: torch.nn.Module | Factory,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
) -> Ingredients | Factory:
    if isinstance(model, torch.nn.Module):
        refuse_fitted(model)
        return Ingredients(model, batch, loss, optimizer)
    if not callable(model):
        raise InputError(f"model is {type(model).__name__}, not a torch.nn.Module or a factory")
    if any(part is not None for part in (batch, loss, optimizer)):
        raise InputError("a factory returns batch, loss and optimizer: leave the arguments out")
    return model


def profile_for(step: TrainingStep, engine: str, *, exact: bool = True) -> Profile:
    """Profile a step that has been checked, as an engine will run it."""
    recorded = profile_step(step)
    if engine != "inductor":
        return recorded
    draft = profile_compiled(step, recorded, exact=exact)
    applied = engines.apply(step.model, unplanned_plan(draft))
    try:
        with stage("timing the compiled step"), untouched(step):
            fits = first_run_fits(step)
            unmeasured = StepTime(draft.step_seconds)
            took = median_step_time(step.run, step.device) if fits else unmeasured
            waits = fits and forward_waits_for_cpu(step, took, _num_forward_ops(recorded.graph))
            # Anew: what the compiler has left on the device stays there.
            other_bytes = max(0, resident_bytes(step) - static_bytes(draft) + draft.other_bytes)
            rise = _measured_rise(step, 1) if fits else 0
    finally:
        applied.remove()
    draft = dataclasses.replace(
        draft,
        step_seconds=took.seconds,
        fits_device=fits,
        slack_bytes=0,
        copy_seconds=recorded.copy_seconds_at(took.issue_seconds) if waits else 0.0,
    )
    return with_peak(draft, other_bytes, rise)


def unplanned_plan(profile: Profile) -> Plan:
    """The plan that changes nothing; of compiled blocks it says so explicitly."""
    return planner.plan(profile, WITHOUT_LIMIT, solver="keep_all")


def profile_step(step: TrainingStep) -> Profile:
    """Profile a step that has been checked."""
    signatures = Signatures()
    with untouched(step):
        # Optimizer state is made at the first step; it must be there before the recorded one.
        with stage("timing the step"):
            fits = first_run_fits(step)
            took = median_step_time(step.run, step.device) if fits else StepTime()
        resident = resident_bytes(step)
        company = Company()
        with stage("recording the step"):
            graph = record(step, signatures, attic=None if fits else Attic(), company=company)
            check_graph(graph)
        waits = fits and forward_waits_for_cpu(step, took, _num_forward_ops(graph))
        rise = _measured_rise(step, _repeats(graph)) if fits else 0
    draft = assemble(step, graph, signatures, company, took, fits_device=fits)
    if waits:
        copy_seconds = draft.copy_seconds_at(took.issue_seconds)
        draft = dataclasses.replace(draft, copy_seconds=copy_seconds)
    return with_peak(draft, max(0, resident - static_bytes(draft)), rise)


def assemble(
    step: TrainingStep,
    graph: Graph,
    signatures: Signatures,
    company: Company,
    took: StepTime,
    *,
    fits_device: bool = True,
) -> Profile:
    """Time the ops of a recorded step and find its blocks; the peak is not yet in."""
    specs, worth_timing = signatures.specs, signatures.that_write(graph)
    costs, notes = measure(specs, worth_timing, step.device)
    if took.seconds and _sum_seconds(graph, costs) > _TOO_LONG * took.seconds:
        costs, notes = measure(specs, worth_timing, step.device, again=True)
    ops_seconds = _sum_seconds(graph, costs)
    marks = marks_of(step.model)
    blocks = find_blocks(step.model, graph, [path for path, _ in marks])
    check_blocks(graph, blocks)
    found = Profile(
        graph=graph,
        blocks=blocks,
        costs=tuple(with_recipes(costs, signatures.specs, step.device)),
        step_seconds=took.seconds or ops_seconds,
        other_bytes=0,
        peak_bytes=0,
        device=device_name(step.device),
        torch_version=torch.__version__,
        model=identity_of(step.model, step.batch),
        gradients_kept=step.gradients_kept,
        marks=marks,
        notes=tuple(notes),
        fits_device=fits_device,
        company=tuple(company.notes(blocks)),
        link=measured_link(step.device),
    )
    is_bound = is_launch_bound(took.issue_seconds, ops_seconds, took.seconds)
    return found.waiting_for_cpu(took.issue_seconds) if is_bound else found


def _num_forward_ops(graph: Graph) -> int:
    return sum(op.phase == "forward" for op in graph.ops)


def _sum_seconds(graph: Graph, costs: Sequence[Cost]) -> float:
    """What the ops take one by one."""
    return sum(costs[op.cost].seconds for op in graph.ops)


def is_launch_bound(issue_seconds: float, ops_seconds: float, step_seconds: float) -> bool:
    """Whether the device waits for the CPU: ops that run again then cost the CPU's time.

    Issuing takes as long as the step also where the code waits for the device (for a number, for
    room in the queue); but then the device is busy all the time.
    """
    is_issue_slow = issue_seconds >= _MOSTLY * step_seconds
    return issue_seconds > 0 and is_issue_slow and ops_seconds < _MOSTLY * step_seconds


def _repeats(graph: Graph) -> int:
    """How many steps to measure: one, or several where sizes depend on the data.

    A mixture of experts sends other numbers of tokens to each expert in every step, for dropout
    alone.
    """
    return 6 if any(Fact.DYNAMIC_SHAPE in op.facts for op in graph.ops) else 1


def _measured_rise(step: TrainingStep, repeats: int) -> int:
    """The peak above what is resident, by the allocator; 0 where it cannot be measured."""

    def run() -> None:
        # In a row: measured one by one, every second step would go unseen as the warm one.
        for _ in range(repeats):
            step.run()

    try:
        return peak_rise_bytes(run, step.device)
    except MeasureError:
        return 0


def with_peak(draft: Profile, other_bytes: int, measured_rise: int) -> Profile:
    """The profile with its peak: by its account and, where that is known, by the allocator."""
    whole = dataclasses.replace(draft, other_bytes=other_bytes)
    recorded_rise = simulate(whole).peak_bytes - static_bytes(whole)
    # Where blocks are cut differs from plan to plan.
    uncut = 0 if draft.graph.is_on_host else UNCUT_BYTES
    slack = max(0, measured_rise - recorded_rise) + uncut
    whole = dataclasses.replace(whole, slack_bytes=slack)
    return dataclasses.replace(whole, peak_bytes=simulate(whole).peak_bytes)


def apply(
    model: torch.nn.Module, plan: Plan, batch: Any = None, loss: Loss | None = None
) -> engines.Applied:
    """Let a model train as a plan says; `remove()` of what comes back undoes it.

    With a batch the step is recorded anew, which leaves no trace, and every value that the plan
    names must be there. Without one only the model's class and parameters are compared, and each
    block is checked as it is first called.

    Raises:
        PlanError: the plan is for another model, batch or version of torch; it names what differs.
    """
    check_kind(plan, Plan)
    refuse_fitted(model)
    if batch is None:
        check_model(model, plan)
    else:
        check_step(make_step(model, batch, loss, None), plan)
    return engines.apply(model, plan, refuse_at_first_call=batch is None)


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
    check_kind(plan, Plan)
    step = make_step(model, batch, loss, optimizer, gradients_kept=gradients_kept)
    refuse_fitted(model)
    check_step(step, plan)
    applied = engines.apply(model, plan)
    try:
        with stage("measuring the untouched step"), applied.paused():
            before = look_at_untouched(step, fits_device=_fits(step))
        with stage("measuring the planned step"):
            return judge(step, applied, before)
    finally:
        applied.remove()


def _fits(step: TrainingStep) -> bool:
    with untouched(step):
        return first_run_fits(step)


def refuse_fitted(model: torch.nn.Module) -> None:
    """Say so when a plan is already in force or on its way, or somebody else's checkpointing."""
    if any(module in WAITING for module in model.modules()):
        raise InputError(
            "leanstep.lean waits for this model's first step: call remove() on what it returned "
            "first, or train on"
        )
    refuse_owned(model)


def refuse_owned(model: torch.nn.Module) -> None:
    """The same of a model that `lean` itself asks about."""
    if any(is_attached(module) for module in model.modules()):
        raise InputError("this model is already fitted: call remove() on what fit returned first")
    refuse_owners(model)
