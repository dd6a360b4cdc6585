"""Try the cheap replays of a recording on the device: are their bits the op's, what do they cost?

Each distinct call of an op with a recipe runs once on made-up numbers, then its recipe runs on what
the op left, and every bit of the rebuilt output is compared. A recipe that fails is not there.
"""

import dataclasses
from collections.abc import Sequence

import torch

from leanstep.ir import Cost, RecipeCost
from leanstep.profiler.measure import forked, made_up, median_run_seconds
from leanstep.recipes import RECIPES
from leanstep.recorder.facts import OpInfo, op_info, tensors_in
from leanstep.recorder.recipes import recipe_call
from leanstep.recorder.signatures import CallSpec
from leanstep.truth import OpMeter, allocated_bytes

# Two draws: one that happens to round alike everywhere is rare, two are none.
_DRAWS = 2


def with_recipes(
    costs: Sequence[Cost], specs: Sequence[CallSpec], device: torch.device
) -> list[Cost]:
    """The costs, each with that of its cheap replay where there is one."""
    return [
        dataclasses.replace(cost, recipe=dry_run(spec, device))
        if cost.signature in RECIPES
        else cost
        for cost, spec in zip(costs, specs, strict=True)
    ]


def dry_run(spec: CallSpec, device: torch.device) -> RecipeCost | None:
    """Run an op and its recipe; None where there is no recipe or it does not run here."""
    info = op_info(spec.func)
    if info.name not in RECIPES:
        return None
    try:
        with torch.no_grad(), forked(device):
            found = [_try(spec, info, device) for _ in range(_DRAWS)]
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
        return None
    tried = [cost for cost in found if cost is not None]
    if len(tried) < _DRAWS:
        return None
    return dataclasses.replace(tried[-1], exact=all(cost.exact for cost in tried))


def _try(spec: CallSpec, info: OpInfo, device: torch.device) -> RecipeCost | None:
    args, kwargs = made_up(spec)
    for tensor in tensors_in([*args, *kwargs.values()]):
        if tensor.is_floating_point():
            # Made-up numbers lie between 0 and 1; signs and a wider range tell more.
            tensor.sub_(0.4).mul_(3.0)
    outputs = list(tensors_in(spec.func(*args, **kwargs)))
    call = recipe_call(info, args, kwargs, outputs)
    if call is None:
        return None
    with OpMeter(device) as meter, meter.op():
        rebuilt = call.func(*call.args)
    wanted = outputs[RECIPES[info.name].output]
    if not same_layout(wanted, rebuilt):
        return None
    return RecipeCost(
        seconds=median_run_seconds(lambda: call.func(*call.args), device),
        exact=same_bits(wanted, rebuilt),
        workspace_bytes=max(0, meter.rises()[0] - allocated_bytes(rebuilt, device)),
    )


def same_layout(wanted: torch.Tensor, rebuilt: torch.Tensor) -> bool:
    """Whether one tensor's storage can stand for the other's; views of it are taken by offset."""
    looks = [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.untyped_storage().nbytes())
        for t in (wanted, rebuilt)
    ]
    return looks[0] == looks[1]


def same_bits(wanted: torch.Tensor, rebuilt: torch.Tensor) -> bool:
    """Whether two tensors laid out alike have the same bits, whatever numbers they stand for."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wanted.dtype.itemsize]
    return bool(torch.equal(wanted.view(whole), rebuilt.view(whole)))
