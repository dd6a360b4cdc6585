"""Measure what each distinct op call costs, once, outside any mode, on made-up inputs.

Only one op needs to fit in memory. Times are medians of several runs after a warm one. Views do
no work and are not timed. An op that refuses made-up inputs (an index out of range, say) is
priced by the bytes it moves, and the profile says so.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from leanstep.ir import Cost, Fact
from leanstep.profiler.cache import CostCache
from leanstep.recorder.facts import op_info
from leanstep.recorder.signatures import CallSpec, TensorSpec
from leanstep.stages import each
from leanstep.torch_private.tensors import tree_leaves

# Parts of names of operators that read numbers of a meaning of their own.
_RISKY = ("linalg", "lu_", "ldl", "cholesky", "ctc_loss", "segment_reduce", "packed", "quantize")

_REPEATS = 5
_ENOUGH_SECONDS = 0.25
_DRAWN = 2**20

# For ops that cannot be timed alone: a modest memory bandwidth.
_FALLBACK_BYTES_PER_SECOND = {"cpu": 10e9, "cuda": 2e12}


def measure(
    specs: Sequence[CallSpec],
    worth_timing: Sequence[bool],
    device: torch.device,
    *,
    again: bool = False,
) -> tuple[list[Cost], list[str]]:
    """The cost of each distinct call, and a note for each that could not be timed.

    What is known from an earlier run is timed `again` on request. The lesser figure stays: a busy
    machine only ever makes an op slower.
    """
    cache = CostCache(device)
    notes: list[str] = []
    missing = [
        spec
        for spec, worth in zip(specs, worth_timing, strict=True)
        if worth and (again or spec not in cache)
    ]
    # A guess is not for the disk: there it would pass for a measurement from the next run on.
    guesses: dict[CallSpec, float] = {}
    what = "timing ops again, as the machine was busy" if again else "timing ops"
    for spec in each(missing, what):
        try:
            _refuse_risky(spec)
            seconds = _seconds(spec, device)
            cache.add(spec, min(seconds, cache.seconds(spec)) if spec in cache else seconds)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            guesses[spec] = _moved_bytes(spec) / _FALLBACK_BYTES_PER_SECOND[device.type]
            notes.append(f"{op_info(spec.func).name} could not be timed alone: priced by its bytes")
    if len(missing) > len(guesses):
        cache.save()
    costs = [
        Cost(op_info(spec.func).name, _known(spec, cache, guesses) if worth else 0.0)
        for spec, worth in zip(specs, worth_timing, strict=True)
    ]
    return costs, sorted(set(notes))


def _refuse_risky(spec: CallSpec) -> None:
    """Raise ValueError for an op that may check what its input says.

    On CUDA a failed check ends the process. Zeros are good indices for nearly every op of torch's,
    but no pivots, lengths of words or arguments of somebody else's kernel.
    """
    name = op_info(spec.func).name
    if Fact.COLLECTIVE in op_info(spec.func).facts:
        # The other ranks are not there to take part.
        raise ValueError(f"{name} is not for one rank alone")
    tensors = [one for one in tree_leaves((spec.args, spec.kwargs)) if isinstance(one, TensorSpec)]
    has_indices = any(not one.dtype.is_floating_point for one in tensors)
    is_risky = not name.startswith("aten.") or any(word in name for word in _RISKY)
    if "assert" in name or (has_indices and is_risky):
        raise ValueError(f"{name} may not take made-up values")


def _known(spec: CallSpec, cache: CostCache, guesses: dict[CallSpec, float]) -> float:
    return guesses[spec] if spec in guesses else cache.seconds(spec)


def _seconds(spec: CallSpec, device: torch.device) -> float:
    # Forked before the arguments are made: they are drawn, too.
    with torch.no_grad(), forked(device):
        args, kwargs = made_up(spec)
        return median_run_seconds(lambda: spec.func(*args, **kwargs), device)


def forked(device: torch.device) -> AbstractContextManager[None]:
    """Leave the random generators where they are."""
    return torch.random.fork_rng(devices=_cuda_devices(device))


def made_up(spec: CallSpec) -> tuple[list[Any], dict[str, Any]]:
    """Made-up arguments for a call."""
    args = [_argument(arg) for arg in spec.args]
    return args, {name: _argument(arg) for name, arg in spec.kwargs}


def median_run_seconds(run: Callable[[], object], device: torch.device) -> float:
    """The time of a warm run."""
    run()
    return _time_cuda(run, device) if device.type == "cuda" else _time_cpu(run)


def _time_cpu(run: Callable[[], object]) -> float:
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _ENOUGH_SECONDS:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def _time_cuda(run: Callable[[], object], device: torch.device) -> float:
    events = []
    torch.cuda.synchronize(device)
    for _ in range(2 * _REPEATS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize(device)
    seconds = sorted(start.elapsed_time(stop) * 1e-3 for start, stop in events)
    return float(seconds[len(seconds) // 2])


def _cuda_devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _argument(spec: Any) -> Any:
    if isinstance(spec, TensorSpec):
        return _tensor(spec)
    if isinstance(spec, tuple):
        return [_argument(item) for item in spec]
    return spec


def _tensor(spec: TensorSpec) -> torch.Tensor:
    """A tensor of the same layout: zeros for indices, so that they are in range."""
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(spec.size, spec.stride, strict=True)
    )
    count = 0 if 0 in spec.size else extent
    if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
        base = _random(count, spec.device).to(spec.dtype)
    elif spec.dtype is torch.bool:
        base = torch.ones(count, dtype=spec.dtype, device=spec.device)
    else:
        base = torch.zeros(count, dtype=spec.dtype, device=spec.device)
    return base.as_strided(spec.size, spec.stride)


def _random(count: int, device: str) -> torch.Tensor:
    """Random numbers, repeated where they are many: drawing them all would take longest."""
    drawn = torch.rand(min(count, _DRAWN), device=device)
    if count <= _DRAWN:
        return drawn
    return drawn.repeat(-(-count // _DRAWN))[:count]


def _moved_bytes(spec: CallSpec) -> float:
    return float(sum(_bytes(arg) for arg in (*spec.args, *(arg for _, arg in spec.kwargs))))


def _bytes(spec: Any) -> int:
    if isinstance(spec, TensorSpec):
        return int(spec.dtype.itemsize * torch.Size(spec.size).numel())
    return sum(map(_bytes, spec)) if isinstance(spec, tuple) else 0
