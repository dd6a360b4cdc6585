"""What a step takes, and whether the device waits in it for the CPU that issues it."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from leanstep.step.training import TrainingStep

_ENOUGH_SECONDS = 3.0

# Issued in such a share of the device's time, forward is issued late: machines are moody.
_LATE_SHARE = 0.8

# As many launches can be issued before the device begins with the first.
_QUEUED_LAUNCHES = 1024


@dataclass(frozen=True, slots=True, order=True)
class StepTime:
    """What a step takes, and how long it takes the CPU to issue it; 0 where it was not measured.

    A CPU issues nothing: it runs the step at once. Of a median, `spread_seconds` lie between the
    fastest and the slowest of the repeats.
    """

    seconds: float = 0.0
    issue_seconds: float = 0.0
    spread_seconds: float = 0.0


def step_time(step: Callable[[], object], device: torch.device) -> StepTime:
    """The time of one step; both figures are of the same one, as machines are moody."""
    synchronize(device)
    start = time.perf_counter()
    step()
    issued = time.perf_counter()
    synchronize(device)
    seconds = time.perf_counter() - start
    return StepTime(seconds, issued - start if device.type == "cuda" else 0.0)


def median_step_time(
    step: Callable[[], object], device: torch.device, repeats: int = 3
) -> StepTime:
    """The median time of a warm step; steps of seconds are not repeated for long."""
    times: list[StepTime] = []
    while len(times) < repeats and sum(one.seconds for one in times) < _ENOUGH_SECONDS:
        times.append(step_time(step, device))
    return median_time(times)


def median_time(times: Sequence[StepTime]) -> StepTime:
    """The median of some repeats, and how far they are apart."""
    ordered = sorted(times)
    spread_seconds = ordered[-1].seconds - ordered[0].seconds
    return replace(ordered[len(ordered) // 2], spread_seconds=spread_seconds)


def forward_waits_for_cpu(step: TrainingStep, took: StepTime, num_launches: int) -> bool:
    """Whether the device has done all of forward as soon as the CPU has issued it.

    Backward may well leave the CPU time to spare, and the step on the whole: it has larger kernels.
    A forward that itself waits for the device, for a number, is issued late for another reason.
    """
    if not took.issue_seconds:
        return False
    repeats = 3 if 3 * took.seconds < _ENOUGH_SECONDS else 1
    shares = sorted(_forward_share(step) for _ in range(repeats))
    # Where there are more than the queue holds, the CPU waits for room in it, but not to the end.
    in_queue = _QUEUED_LAUNCHES / max(1, num_launches)
    return shares[repeats // 2] >= max(_LATE_SHARE, 1 - in_queue / 2)


def _forward_share(step: TrainingStep) -> float:
    """What of the time that the device takes for forward, the CPU takes to issue it.

    0 where the CPU waits for the device before forward has ended.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.current_stream(step.device)
    issue_seconds = 0.0

    def forward_ended() -> None:
        nonlocal issue_seconds
        issue_seconds = 0.0 if watch.has_waited() else time.perf_counter() - start
        end.record(stream)

    synchronize(step.device)
    begin.record(stream)
    with _WaitWatch() as watch:
        start = time.perf_counter()
        step.run_noting(forward_ended)
    synchronize(step.device)
    return issue_seconds / max(1e-9, 1e-3 * float(begin.elapsed_time(end)))


# What torch says then. That it may not see all, it says too, once.
_WAITED = "called a synchronizing CUDA operation"


class _WaitWatch:
    """See whether code waits for the device: torch warns of it, where it is asked to."""

    def __enter__(self) -> "_WaitWatch":
        self._mode = torch.cuda.get_sync_debug_mode()
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_sync_debug_mode(self._mode)
        self._catcher.__exit__(None, None, None)

    def has_waited(self) -> bool:
        """Whether the code has waited so far."""
        return any(_WAITED in str(one.message) for one in self._caught or ())


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was issued to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
