"""How torch runs the cheap replays of `leanstep.recipes`.

Each entry turns one call of an op, with its outputs, into the call that rebuilds an output: the
profiler tries it on the device, the engines run it in backward. What it is built from may be
tensors or anything that stands for them.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.recorder.facts import OpInfo, named_arguments


@dataclass(frozen=True, slots=True)
class RecipeCall:
    """The call that rebuilds an output."""

    func: Any
    args: tuple[Any, ...]


Builder = Callable[[Mapping[str, Any], Sequence[Any]], RecipeCall | None]


def recipe_call(
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Any]
) -> RecipeCall | None:
    """The call that rebuilds the output of an op's recipe; None where this call has none."""
    build = BUILDERS.get(info.name)
    return None if build is None else build(dict(named_arguments(info, args, kwargs)), outputs)


def _dropout(named: Mapping[str, Any], outputs: Sequence[Any]) -> RecipeCall | None:
    rate = named["p"]
    # Without training it is a copy, at rate 1 it is zeros: nothing is scaled.
    if named.get("train") is False or rate == 1.0:
        return None
    keep = 1.0 - rate
    if named["input"].dtype is not torch.float64 and _is_cuda(named["input"]):
        # CUDA's kernel divides by a rate of single precision, also for half and bfloat16.
        (keep,) = struct.unpack("f", struct.pack("f", keep))
    func = torch.ops.aten.native_dropout_backward.default
    return RecipeCall(func, (named["input"], outputs[1], 1.0 / keep))


def _batch_norm(named: Mapping[str, Any], outputs: Sequence[Any]) -> RecipeCall | None:
    # In evaluation there are no saved statistics, and on the CPU there is no such kernel.
    if not named["training"] or not _is_cuda(named["input"]):
        return None
    eps = named["eps"] if "eps" in named else named["epsilon"]
    given = (named["input"], named.get("weight"), named.get("bias"), outputs[1], outputs[2], eps)
    return RecipeCall(torch.ops.aten.batch_norm_elemt.default, given)


def _is_cuda(tensor: Any) -> bool:
    return torch.device(tensor.device).type == "cuda"


BUILDERS: dict[str, Builder] = {
    "aten.native_dropout.default": _dropout,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.cudnn_batch_norm.default": _batch_norm,
}
