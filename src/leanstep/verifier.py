"""Compare the planned step with the untouched one: every number, peak and time."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from leanstep.engines import Applied
from leanstep.ir import Verdict
from leanstep.recorder import in_host_memory
from leanstep.state import untouched
from leanstep.step import TrainingStep
from leanstep.truth import (
    Peak,
    has_expandable_segments,
    measured_peak,
    median_seconds,
    resident_bytes,
)


@dataclass(frozen=True)
class Outcome:
    """Everything a step computes, in host memory."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_states: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Look:
    """One step seen from all sides; its memory only if it fits on the device."""

    outcome: Outcome
    again: Outcome
    resident_bytes: int
    peak: Peak
    fits_device: bool = True


def look(step: TrainingStep) -> Look:
    """Run a step for its numbers, then for its memory; leave no trace."""
    outcome, again = _outcomes(step, nullcontext)
    with untouched(step):
        # Optimizer state is made at the first step and counts in the peak from then on.
        step.first_run()
        resident = resident_bytes(step)
        peak = measured_peak(step.run, step.device)
    return Look(outcome, again, resident, peak)


def look_at_untouched(step: TrainingStep, *, fits_device: bool) -> Look:
    """The same, before a plan is in force.

    A step that does not fit is run for its numbers alone, with its activations in host memory.
    """
    if fits_device:
        return look(step)
    return Look(*_outcomes(step, in_host_memory), 0, Peak(0), fits_device=False)


def _outcomes(
    step: TrainingStep, room: Callable[[], AbstractContextManager[None]]
) -> tuple[Outcome, Outcome]:
    with untouched(step), room():
        outcome = again = _outcome(step)
    if step.device.type == "cuda":
        # Many CUDA kernels sum in the order they finish: a second run shows the model's own spread.
        with untouched(step), room():
            again = _outcome(step)
    return outcome, again


def race(
    step: TrainingStep, applied: Applied, rounds: int = 3, *, fits_device: bool = True
) -> tuple[float, float]:
    """The median seconds of the untouched and the planned step, in turns on a noisy machine.

    An untouched step that cannot run takes what the plan says.
    """
    untouched_seconds, planned_seconds = [], []
    with untouched(step):
        for _ in range(rounds):
            if fits_device:
                with applied.paused():
                    step.run()
                    untouched_seconds.append(median_seconds(step.run, step.device, repeats=1))
            else:
                untouched_seconds.append(applied.plan.step_seconds)
            step.run()
            planned_seconds.append(median_seconds(step.run, step.device, repeats=1))
    middle = rounds // 2
    return sorted(untouched_seconds)[middle], sorted(planned_seconds)[middle]


def _outcome(step: TrainingStep) -> Outcome:
    loss = step.compute_loss()
    loss.backward()
    names = {id(p): name for name, p in step.model.named_parameters()}
    states = [torch.get_rng_state()]
    if step.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(step.device))
    return Outcome(
        loss=_host(loss),
        gradients={
            names.get(id(p), f"optimizer parameter {place}"): None
            if p.grad is None
            else _host(p.grad)
            for place, p in enumerate(step.parameters())
        },
        buffers={name: _host(buffer) for name, buffer in step.model.named_buffers()},
        random_states=tuple(states),
    )


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def judge(step: TrainingStep, applied: Applied, before: Look) -> Verdict:
    """Judge the planned step, now in force, against a look at the untouched one."""
    plan, after, fits_device = applied.plan, look(step), before.fits_device
    baseline_seconds, measured_seconds = race(step, applied, fits_device=fits_device)
    on_cpu = step.device.type == "cpu"
    different, spread = differences(before, after.outcome, on_cpu=on_cpu)
    if different and before.again is before.outcome:
        # Is it the plan, or does the untouched model not repeat itself?
        room = nullcontext if fits_device else in_host_memory
        with applied.paused():
            before = replace(before, again=_outcomes(step, room)[0])
        different, spread = differences(before, after.outcome, on_cpu=on_cpu)
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
        baseline_seconds=baseline_seconds,
        predicted_seconds=baseline_seconds + plan.extra_seconds,
        measured_seconds=measured_seconds,
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
        beyond_tolerance=tuple(name for name, (far, most) in apart.items() if not far <= most),
    )


def differences(
    before: Look, new: Outcome, *, on_cpu: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is not bit-equal: beyond the untouched model's own spread, and within it."""
    beyond: list[str] = []
    within: list[str] = []
    old, again, found = (_named(o) for o in (before.outcome, before.again, new))
    for name, tensor in old.items():
        if _same(tensor, found.get(name)):
            continue
        unstable = not _same(tensor, again.get(name))
        # The CPU does not sum in another order from run to run: what moves there is drawn anew.
        near = unstable and (on_cpu or _is_near(tensor, again.get(name), found.get(name)))
        (within if near else beyond).append(name)
    return tuple(beyond), tuple(within)


def distances(before: Outcome, new: Outcome) -> dict[str, tuple[float, float]]:
    """How far the loss and each gradient are off, relative to their size, and the tolerance."""
    found = _named(new)
    return {
        name: _distance(tensor, found.get(name))
        for name, tensor in _named(before).items()
        if tensor is not None and tensor.is_floating_point()
    }


def _distance(old: torch.Tensor, new: torch.Tensor | None) -> tuple[float, float]:
    most = float(torch.finfo(old.dtype).eps) ** 0.5
    if _same(old, new):
        return 0.0, most
    if new is None or new.shape != old.shape:
        return float("inf"), most
    size = float(old.double().norm())
    apart = float((new.double() - old.double()).norm())
    return (apart / size if size else float("inf")), most


def _named(outcome: Outcome) -> dict[str, torch.Tensor | None]:
    return {
        "the loss": outcome.loss,
        **{f"gradient of {name}": g for name, g in outcome.gradients.items()},
        **{f"buffer {name}": b for name, b in outcome.buffers.items()},
        **{f"random state {place}": s for place, s in enumerate(outcome.random_states)},
    }


# Two runs of the untouched model sample its spread; a third may lie somewhat further out.
_SPREADS = 4.0


def _is_near(
    old: torch.Tensor | None, again: torch.Tensor | None, new: torch.Tensor | None
) -> bool:
    if old is None or again is None or new is None:
        return False
    if not old.is_floating_point():
        # A count or a random state has no distance: it is enough that it moves by itself.
        return True
    spread = (again.double() - old.double()).norm()
    return bool((new.double() - old.double()).norm() <= _SPREADS * spread)


def _same(old: torch.Tensor | None, new: torch.Tensor | None) -> bool:
    """Whether two tensors have the same bits, NaN included; a missing one must stay missing."""
    if old is None or new is None:
        return old is None and new is None
    if (old.shape, old.dtype, old.layout) != (new.shape, new.dtype, new.layout):
        return False
    if old.layout is torch.sparse_coo:
        old, new = old.coalesce(), new.coalesce()
        return _same(old.indices(), new.indices()) and _same(old.values(), new.values())
    flat_old, flat_new = old.contiguous().view(-1), new.contiguous().view(-1)
    return torch.equal(flat_old.view(torch.uint8), flat_new.view(torch.uint8))


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
