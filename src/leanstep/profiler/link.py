"""How fast bytes move between the device and pinned host memory."""

import functools
import os

import torch

from leanstep.ir import Link

_PIECE_BYTES = 64 << 20
_REPEATS = 5


def measured_link(device: torch.device) -> Link | None:
    """The link of a device, measured once; None where there is none, or no room to measure it."""
    if device.type != "cuda":
        return None
    try:
        to_host, from_host = _rates(device.index or 0)
    except torch.OutOfMemoryError:
        return None
    return Link(to_host, from_host, _free_host_bytes())


@functools.cache
def _rates(device_index: int) -> tuple[float, float]:
    device = torch.device("cuda", device_index)
    there = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    return _rate(there, here), _rate(here, there)


def _rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes a second; the first copy is a warm one."""
    target.copy_(source, non_blocking=True)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(_REPEATS):
        target.copy_(source, non_blocking=True)
    stop.record()
    stop.synchronize()
    seconds = float(start.elapsed_time(stop)) * 1e-3
    return _REPEATS * _PIECE_BYTES / seconds


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
