"""Try the cheap replays of a recording on the device: are their bits the op's, what do they cost?

Each distinct call of an op with a recipe runs on made-up numbers, then its recipe runs on what the
op left, and every bit of the rebuilt output is compared: a few times over, many where the output is
small. A recipe that fails is not there.
"""

import dataclasses
from collections.abc import Sequence

import torch

from leanstep.ir import Cost, RecipeCost
from leanstep.profiler.measure import forked, made_up, median_run_seconds
from leanstep.rebuild.recipes import RECIPES
from leanstep.recorder.facts import OpInfo, op_info, tensors_in
from leanstep.recorder.recipes import RecipeCall, recipe_call
from leanstep.recorder.signatures import CallSpec
from leanstep.truth import OpMeter, allocated_bytes

# A recipe is called exact after at least two runs and this many numbers, all with the op's bits.
_ENOUGH_NUMBERS = 2**15
_MOST_RUNS = 256


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
            found, count = _measured(spec, info, device)
            if found is None or not found.exact:
                return found
            again = min(_MOST_RUNS, -(-_ENOUGH_NUMBERS // max(1, count)))
            exact = all(_is_exact(spec, info) for _ in range(again))
    except (RuntimeError, ValueError, LookupError, TypeError, AssertionError):
        return None
    return dataclasses.replace(found, exact=exact)


def estimated(spec: CallSpec, op_seconds: float) -> RecipeCost | None:
    """What the table alone says of a call's recipe, where there is no device to try it on."""
    recipe = RECIPES.get(op_info(spec.func).name)
    if recipe is None:
        return None
    outputs = [None] * (1 + max(recipe.output, *recipe.siblings))
    if recipe_call(op_info(spec.func), spec.args, dict(spec.kwargs), outputs) is None:
        return None
    return RecipeCost(recipe.time_share * op_seconds, exact=recipe.exact_by_design)


def _measured(spec: CallSpec, info: OpInfo, device: torch.device) -> tuple[RecipeCost | None, int]:
    """One run, with how many numbers were compared; its tensors are gone before the next."""
    wanted, call = _prepared(spec, info)
    if call is None:
        return None, 0
    with OpMeter(device) as meter, meter.op():
        rebuilt = call.func(*call.args)
    if not same_layout(wanted, rebuilt):
        return None, 0
    cost = RecipeCost(
        seconds=median_run_seconds(lambda: call.func(*call.args), device),
        exact=same_bits(wanted, rebuilt),
        workspace_bytes=max(0, meter.rises()[0] - allocated_bytes(rebuilt, device)),
    )
    return cost, wanted.numel()


def _is_exact(spec: CallSpec, info: OpInfo) -> bool:
    wanted, call = _prepared(spec, info)
    return call is not None and same_bits(wanted, call.func(*call.args))


def _prepared(spec: CallSpec, info: OpInfo) -> tuple[torch.Tensor, RecipeCall | None]:
    """Run an op on made-up numbers: what its recipe has to rebuild, and how."""
    args, kwargs = made_up(spec)
    for tensor in tensors_in([*args, *kwargs.values()]):
        if tensor.is_floating_point():
            # Made-up numbers lie between 0 and 1; signs and a wider range tell more.
            tensor.sub_(0.4).mul_(3.0)
    outputs = list(tensors_in(spec.func(*args, **kwargs)))
    return outputs[RECIPES[info.name].output], recipe_call(info, args, kwargs, outputs)


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
