"""The devices that a profile can be made for without having one; figures in `devices.toml`."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leanstep.errors import unknown_name

_FIGURES = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True, slots=True)
class Device:
    """What the cost model knows about a device; `devices.toml` says what each figure means."""

    name: str
    memory_bytes: int
    bandwidth: float
    link: float
    collective: float
    launch_seconds: float
    peak_flops: Mapping[str, float]
    efficiency: Mapping[str, float]


def find_device(key: str) -> Device:
    """The device of a short name such as `"h200"`."""
    known = known_devices()
    if not isinstance(key, str) or key.lower() not in known:
        raise unknown_name("device", key, known)
    return known[key.lower()]


@functools.cache
def known_devices() -> dict[str, Device]:
    """Every device by its short name."""
    figures = tomllib.loads(_FIGURES.read_text())
    return {key: Device(**entry) for key, entry in figures.items()}
