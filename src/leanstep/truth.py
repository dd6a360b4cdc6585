"""The measured peak, from the allocator itself.

On CUDA the allocator keeps the figure. On the CPU the only witness is the stream of memory events
of torch's profiler, and it has two traps: it does not report the return of what was allocated
before the profiler started (so the level seems to grow), and it may know stale sizes from an
earlier run. So one profiler run holds a whole warm step and then the measured one, and a reading
whose net change over the measured step is not zero is refused.

To find one's place in the stream, a marker is allocated and freed: a size nobody else asks for.
"""

import gc
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from leanstep.errors import MeasureError
from leanstep.step.training import TrainingStep
from leanstep.torch_private.tensors import local_tensor, memory_event_bytes, storage_address

_MARKER_BYTES = 1_000_003

# The CUDA caching allocator hands out multiples of this, and counts them.
_CUDA_ROUNDING_BYTES = 512

# It hands a block out whole, and counts it so, where cutting it would leave less than 1 MiB.
# Planned steps were seen up to 1.02 MiB above the account for it.
UNCUT_BYTES = 2 << 20

# Kineto reports every start and stop on standard error unless told otherwise before its first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def allocated_bytes(tensor: torch.Tensor, device: torch.device) -> int:
    """What a tensor's storage takes from a device's allocator; 0 if it lies elsewhere."""
    return storage_bytes(tensor.untyped_storage(), device)


def storage_bytes(storage: torch.UntypedStorage, device: torch.device) -> int:
    """What a storage takes from a device's allocator; 0 if it lies elsewhere."""
    if storage.device.type != device.type:
        return 0
    return cuda_bytes(storage.nbytes()) if device.type == "cuda" else storage.nbytes()


def cuda_bytes(nbytes: int) -> int:
    """What CUDA's allocator counts for so many bytes."""
    return -(-nbytes // _CUDA_ROUNDING_BYTES) * _CUDA_ROUNDING_BYTES


@dataclass(frozen=True, slots=True)
class Peak:
    """What the allocator saw of one step.

    `rise_bytes` is how far the level rose above its start. `reserved_bytes` is the most that the
    allocator held of the device for it, gaps included; the CPU's keeps no such pool: 0.
    """

    rise_bytes: int
    reserved_bytes: int = 0


def peak_rise_bytes(step: Callable[[], object], device: torch.device) -> int:
    """How far the level rises above its start in a step, after one warm step."""
    return measured_peak(step, device).rise_bytes


def measured_peak(step: Callable[[], object], device: torch.device) -> Peak:
    """What the allocator sees of a step, after one warm step."""
    if device.type == "cuda":
        return _cuda_peak(step, device)
    for _ in range(3):
        changes = _cpu_changes(step)
        if sum(changes) == 0:
            return Peak(_highest(changes))
    raise MeasureError(
        f"the step's memory does not return to its start ({sum(changes):+,} bytes): "
        "does something in it keep tensors from step to step?"
    )


def resident_bytes(step: TrainingStep) -> int:
    """What is allocated on the device between steps; on the CPU, what belongs to the step."""
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
        return torch.cuda.memory_allocated(step.device)
    storages = {
        storage_address(t): allocated_bytes(t, step.device)
        for t in map(local_tensor, step.tensors())
        if t.layout is torch.strided
    }
    return sum(storages.values())


def return_cached(device: torch.device) -> None:
    """Let the allocator give back what it only keeps for later: other sizes may be wanted next."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _cuda_peak(step: Callable[[], object], device: torch.device) -> Peak:
    # What earlier steps left in the pool would count as reserved by this one.
    return_cached(device)
    step()
    torch.cuda.synchronize(device)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    rise = torch.cuda.max_memory_allocated(device) - start
    return Peak(rise, torch.cuda.max_memory_reserved(device))


def has_expandable_segments(device: torch.device) -> bool:
    """Whether the allocator may join what it holds, so that gaps are of use."""
    if device.type != "cuda":
        return False
    segments = torch.cuda.memory_snapshot()
    return any(segment["is_expandable"] for segment in segments)


def _cpu_changes(step: Callable[[], object]) -> list[int]:
    """The allocator's events of the second of two runs of a step."""
    with _cpu_profiler() as profiler:
        step()
        _mark()
        step()
        _mark()
    parts = _split(memory_event_bytes(profiler))
    if len(parts) != 3:
        raise MeasureError(
            f"the step allocates blocks of {_MARKER_BYTES:,} bytes, the size leanstep marks its "
            "place with: change the batch by one row"
        )
    return parts[1]


@contextmanager
def _cpu_profiler() -> Iterator[profile]:
    """Torch's profiler with memory events.

    Its events of one cycle are all we read. Torch 2.11 warns that it keeps no others; asked to
    keep them, it would also parse every op, which takes longer than the step.
    """
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _without_warnings():
        profiler.start()
    try:
        yield profiler
    finally:
        with _without_warnings():
            profiler.stop()


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _mark() -> None:
    torch.empty(_MARKER_BYTES, dtype=torch.uint8)


def _split(events: list[int]) -> list[list[int]]:
    """Cut the stream at its markers; each marker is taken and given back at once."""
    parts: list[list[int]] = [[]]
    for nbytes in events:
        if nbytes == _MARKER_BYTES:
            parts.append([])
        elif nbytes != -_MARKER_BYTES:
            parts[-1].append(nbytes)
    return parts


def _highest(changes: list[int]) -> int:
    level = highest = 0
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest


class OpMeter:
    """Measure, for every op of a recorded step, how far the level rises inside it.

    `sees_fakes`: the step itself is imagined; elsewhere an op on fake tensors is no part of it.
    """

    sees_fakes = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rises: list[int] = []
        # An op that raises is none of the recording's: the model may catch it and go on.
        self._ended: list[bool] = []
        self._open = ExitStack()
        self._profiler: profile | None = None
        self._is_disturbed = False

    def __enter__(self) -> Self:
        if self.device.type != "cuda":
            self._profiler = self._open.enter_context(_cpu_profiler())
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is None:
            return
        try:
            self._open.close()
            parts = _split(memory_event_bytes(self._profiler))[1::2]
        except RuntimeError:
            # Torch 2.11 has nothing to stop where another profiler was stopped.
            parts = []
        self._is_disturbed = len(parts) != len(self._ended)
        ops = zip(parts, self._ended, strict=False)
        self._rises = [_highest(part) for part, has_ended in ops if has_ended]

    def op(self) -> AbstractContextManager[None]:
        """Hold one op."""
        return self._cuda_op() if self.device.type == "cuda" else self._cpu_op()

    @property
    def is_on_host(self) -> bool:
        """Whether the step runs on the CPU."""
        return self.device.type == "cpu"

    def nbytes(self, storage: torch.UntypedStorage) -> int:
        """What a storage takes from the allocator."""
        return storage_bytes(storage, self.device)

    def draws_on_host(self, result: torch.Tensor) -> bool:
        """Whether an op with this result draws from the host's generator."""
        return result.device.type == "cpu"

    def rises(self) -> list[int]:
        """The rise of each op in turn; known after the meter is closed."""
        if self._is_disturbed:
            raise MeasureError(
                "the memory of each op could not be read: another torch.profiler was started or "
                "stopped in the same step. Leave it out of this one"
            )
        return self._rises

    @contextmanager
    def _cpu_op(self) -> Iterator[None]:
        _mark()
        self._ended.append(False)
        try:
            yield
            self._ended[-1] = True
        finally:
            _mark()

    @contextmanager
    def _cuda_op(self) -> Iterator[None]:
        start = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        yield
        self._rises.append(torch.cuda.max_memory_allocated(self.device) - start)


class IdleMeter(OpMeter):
    """Measure nothing: for a recording whose memory is known, or of no interest."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._num_ops = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def op(self) -> AbstractContextManager[None]:
        """Hold one op."""
        self._num_ops += 1
        return nullcontext()

    def rises(self) -> list[int]:
        """Nothing is measured."""
        return [0] * self._num_ops


class Stopwatch:
    """The seconds between laps."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def lap(self) -> None:
        """Note the time."""
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each lap to the next."""
        return [after - before for before, after in itertools.pairwise(self._times)]


class CudaStopwatch(Stopwatch):
    """The same by the GPU's own clock: what the host does meanwhile does not count."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._events: list[torch.cuda.Event] = []
        torch.cuda.synchronize(device)
        # Work for the GPU while the host prepares the first kernels: else it waits for the host.
        busy = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        for _ in range(64):
            busy.zero_()

    def lap(self) -> None:
        """Note the time."""
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()

    def seconds(self) -> list[float]:
        """From each lap to the next."""
        torch.cuda.synchronize(self._device)
        pairs = itertools.pairwise(self._events)
        return [1e-3 * before.elapsed_time(after) for before, after in pairs]


def stopwatch(device: torch.device) -> Stopwatch:
    """A stopwatch for work on a device."""
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch()
