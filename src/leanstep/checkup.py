"""Look at this machine: versions, devices, solvers, engines, models, the allocator's settings."""

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata

import torch

from leanstep.devices import known_devices
from leanstep.ir import Checkup, Finding
from leanstep.models import names
from leanstep.profiler.cache import device_name
from leanstep.solvers.registry import solver_names
from leanstep.units import format_bytes

_PACKAGES = (
    *("leanstep", "torch", "numpy", "scipy", "triton", "transformers", "plotly", "matplotlib"),
)

# A setting is `name:value`; a value may be a list with colons and commas of its own.
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,]*)")


def doctor() -> Checkup:
    """Say what leanstep finds on this machine, and which settings waste memory."""
    has_gpu = torch.cuda.is_available()
    return Checkup(
        (
            *_versions(),
            *_devices(has_gpu=has_gpu),
            Finding("planning", "solvers", ", ".join(solver_names())),
            *_engines(has_gpu=has_gpu),
            Finding("models", "built in", ", ".join(names())),
            *(allocator_findings(os.environ) if has_gpu else ()),
        )
    )


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", platform.python_version())
    for name in _PACKAGES:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            # Run from a checkout, the package itself is not installed either.
            version = "not installed"
        yield Finding("versions", name, version)


def _devices(*, has_gpu: bool) -> Iterator[Finding]:
    yield Finding("devices", "cpu", device_name(torch.device("cpu")))
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        free, total = torch.cuda.mem_get_info(index)
        name = device_name(torch.device("cuda", index))
        room = f"{format_bytes(free)} of {format_bytes(total)} free"
        yield Finding("devices", f"cuda:{index}", f"{name}, {room}")
    if not has_gpu:
        advice = "no GPU is here: --device h200 plans for one that is not"
        yield Finding("devices", "cuda", "none", advice)
    yield Finding("devices", "can be estimated", ", ".join(known_devices()))


def _engines(*, has_gpu: bool) -> Iterator[Finding]:
    yield Finding("engines", "replay", "ready")
    yield Finding("engines", "module", "ready")
    missing = list(_missing_for_compiling(has_gpu=has_gpu))
    if not missing:
        yield Finding("engines", "inductor", "ready")
        return
    what = " and ".join(missing)
    yield Finding("engines", "inductor", f"no {what}", f"install {what} for engine inductor")


def _missing_for_compiling(*, has_gpu: bool) -> Iterator[str]:
    """What Inductor needs: a C++ compiler for a CPU; Triton and C for its launchers on CUDA."""
    if has_gpu and importlib.util.find_spec("triton") is None:
        yield "triton"
    own = os.environ.get("CC" if has_gpu else "CXX")
    compilers = ("cc", "gcc", "clang") if has_gpu else ("c++", "g++", "clang++")
    if not any(shutil.which(name) for name in (own, *compilers) if name):
        yield "C compiler" if has_gpu else "C++ compiler"


def allocator_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What the environment tells CUDA's allocator, and what of it wastes memory or misleads."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    text = next((environment[name] for name in names if environment.get(name)), "")
    settings = dict(_SETTING.findall(text))
    for name, value in settings.items():
        yield Finding("allocator", name, value, _advice(name, value))
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") != "0":
        advice = "PYTORCH_NO_CUDA_MEMORY_CACHING asks the driver for every tensor: unset it"
        yield Finding("allocator", "caching", "off", advice)
    if "expandable_segments" not in settings:
        advice = (
            "set PYTORCH_ALLOC_CONF=expandable_segments:True before torch is imported: without it "
            "gaps between tensors stay unused"
        )
        yield Finding("allocator", "expandable_segments", "not set", advice)


def _advice(name: str, value: str) -> str:
    match name, value.lower():
        case "expandable_segments", "false":
            return "expandable_segments:False leaves gaps between tensors unused: set it to True"
        case "roundup_power2_divisions", _:
            return "roundup_power2_divisions makes tensors larger than they are: take it out"
        case "max_split_size_mb", _:
            return (
                "max_split_size_mb keeps large pieces whole, and their rest unused: "
                "expandable_segments:True does without"
            )
        case "backend", "cudamallocasync":
            return "backend:cudaMallocAsync keeps other accounts: measured peaks may differ"
    return ""
