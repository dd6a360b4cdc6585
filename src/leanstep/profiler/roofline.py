"""Estimate what each distinct op call costs on a device that is not there.

The roofline: an op takes as long as its arithmetic at the speed the device computes, or as its
bytes at the speed of its memory, whichever is longer, and never less than a kernel's launch.
Arithmetic is counted for products, convolutions and attention, by torch's own formulas; everything
else is bound by memory. Each speed is the datasheet's peak times the share that torch's kernels
reach (`devices.toml`). Williams et al., Roofline, 2009. A collective takes as long as the bytes
that one rank receives at the speed of such exchanges, and nothing overlaps with it.

Each call is made once on fake tensors, for the shapes of its results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from leanstep.devices import Device
from leanstep.ir import Cost, Fact
from leanstep.recorder.facts import named_arguments, op_info, tensor_arguments, tensors_in
from leanstep.recorder.signatures import CallSpec, TensorSpec
from leanstep.torch_private.fake import FakeTensorMode
from leanstep.torch_private.tensors import storage_address

# They allocate and write nothing.
FREE = ("aten.empty", "aten.new_empty")

# They read as much of their table as comes out.
LOOKUPS = ("aten.embedding.", "aten.index_select.", "aten.gather.", "aten.index.Tensor")

BOUND_BY_MEMORY = ("elementwise", "normalization", "batch_norm")

# Ops that reduce, by a part of their names.
REDUCTIONS = ("norm", "softmax", "sum", "mean", "nll_loss", "var", "amax", "prod")


def estimate(
    specs: Sequence[CallSpec], worth_pricing: Sequence[bool], device: Device
) -> list[Cost]:
    """The cost of each distinct call; calls that do no work cost nothing."""
    with FakeTensorMode(), torch.no_grad():
        return [
            Cost(op_info(spec.func).name, call_seconds(spec, device) if worth else 0.0)
            for spec, worth in zip(specs, worth_pricing, strict=True)
        ]


def call_seconds(spec: CallSpec, device: Device) -> float:
    """How long one call would take; use it inside a mode of fake tensors."""
    info = op_info(spec.func)
    name = info.name
    if name.startswith(FREE):
        return 0.0
    if Fact.COLLECTIVE in info.facts:
        return _received_bytes(spec) / device.collective + device.launch_seconds
    args = [_argument(arg) for arg in spec.args]
    kwargs = {key: _argument(arg) for key, arg in spec.kwargs}
    try:
        out = spec.func(*args, **kwargs)
    except Exception:
        # What asks for data or refuses made-up inputs is priced by what it reads.
        out = None
    kind = kind_of(name)
    flops = _flops(spec.func, args, kwargs, out)
    share = device.efficiency[kind if kind in BOUND_BY_MEMORY else "elementwise"]
    moving = _moved_bytes(spec.func, args, kwargs, out) / (device.bandwidth * share)
    computing = flops / (_peak_flops(device, kind, args) * device.efficiency[kind])
    return max(moving, computing) / _layout_share(device, kind, args) + device.launch_seconds


def _received_bytes(spec: CallSpec) -> int:
    """What one rank receives in a collective: the whole less its own part.

    Where whole and part are as large, as in an all-reduce, all of it goes out and comes back.
    """
    sizes = [_nbytes(_argument(tensor)) for tensor in _tensor_specs(spec.args)]
    if not sizes:
        return 0
    return max(sizes) - min(sizes) or 2 * max(sizes)


def _tensor_specs(arguments: Any) -> Iterator[TensorSpec]:
    for argument in arguments:
        if isinstance(argument, TensorSpec):
            yield argument
        elif isinstance(argument, tuple):
            yield from _tensor_specs(argument)


def kind_of(name: str) -> str:
    """The entry of a device's efficiencies that an op goes by."""
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution"
    if any(product in name for product in ("mm.", "matmul", "linear")):
        return "matmul"
    if "batch_norm" in name:
        return "batch_norm"
    return "normalization" if any(part in name for part in REDUCTIONS) else "elementwise"


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    formula = flop_registry.get(func.overloadpacket)
    if formula is None or out is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=out))
    named = dict(named_arguments(op_info(func), args, kwargs))
    # A causal kernel skips the half that is masked; torch counts the whole.
    return flops / 2 if named.get("is_causal") else flops


def _peak_flops(device: Device, kind: str, args: Sequence[Any]) -> float:
    floats = (t.dtype for t in tensors_in(list(args)) if t.is_floating_point())
    dtype = str(next(floats, torch.float32)).removeprefix("torch.")
    if dtype == "float32" and _allows_tfloat32(kind):
        dtype = "tfloat32"
    return device.peak_flops.get(dtype, device.peak_flops["float32"])


def _layout_share(device: Device, kind: str, args: Sequence[Any]) -> float:
    """How much slower kernels for images are when the channels do not come last."""
    if kind not in ("convolution", "batch_norm"):
        return 1.0
    # The first is the image or its gradient; a weight of 1 × 1 is in both formats at once.
    image = next(tensors_in(list(args)))
    is_first = image.dim() == 4 and not image.is_contiguous(memory_format=torch.channels_last)
    return device.efficiency["channels_first"] if is_first and image.element_size() == 2 else 1.0


def _allows_tfloat32(kind: str) -> bool:
    if kind == "convolution":
        return bool(torch.backends.cudnn.allow_tf32)
    return torch.get_float32_matmul_precision() != "highest"


def _moved_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """What an op reads and writes, each tensor once."""
    info = op_info(func)
    inputs = list(tensor_arguments(info, args, kwargs))
    known = {storage_address(tensor) for tensor, _ in inputs}
    made = sum(_nbytes(t) for t in tensors_in(out) if storage_address(t) not in known)
    rewritten = sum(_nbytes(tensor) for tensor, is_written in inputs if is_written)
    read = made if info.name.startswith(LOOKUPS) else sum(_nbytes(t) for t, _ in inputs)
    return made + rewritten + read


def _nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's distinct elements: those of an expanded one are read from cache."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(size for size, stride in sides if stride)


def _argument(spec: Any) -> Any:
    if isinstance(spec, TensorSpec):
        return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
    return [_argument(item) for item in spec] if isinstance(spec, tuple) else spec
