"""Keep measured costs on disk: one file for each device, torch version and thread count."""

import json
import math
import os
from pathlib import Path

import torch

from leanstep.recorder.signatures import CallSpec


def device_name(device: torch.device) -> str:
    """What a person calls the device: the card's name, or the CPU with its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"CPU, {count} thread{'s' if count > 1 else ''}"


class CostCache:
    """The seconds of op calls on one device."""

    def __init__(self, device: torch.device) -> None:
        words = f"{device_name(device)} torch {torch.__version__}".replace(",", "")
        self._path = _directory() / f"costs {words}.json".replace(" ", "-")
        self._seconds = _read(self._path)

    def __contains__(self, spec: CallSpec) -> bool:
        return str(spec) in self._seconds

    def seconds(self, spec: CallSpec) -> float:
        """The cost of a call that is known."""
        return self._seconds[str(spec)]

    def add(self, spec: CallSpec, seconds: float) -> None:
        """Remember the cost of a call."""
        self._seconds[str(spec)] = seconds

    def save(self) -> None:
        """Write the cache, with what another process may have added meanwhile."""
        self._seconds = _read(self._path) | self._seconds
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(self._seconds))
            scratch.replace(self._path)
        except OSError:
            # A read-only home costs time on the next run, nothing else.
            return


def _directory() -> Path:
    if chosen := os.environ.get("LEANSTEP_CACHE_DIR"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "leanstep"


def _read(path: Path) -> dict[str, float]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {call: seconds for call, seconds in found.items() if _is_seconds(seconds)}


def _is_seconds(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value >= 0
