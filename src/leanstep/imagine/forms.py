"""Functions that run as other ops on CUDA than on the CPU.

Each takes the function that was called, for the cases that are alike on both, and its arguments by
their names in torch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from leanstep.imagine.attention import attention
from leanstep.torch_private.fake import (
    log_softmax_gradient,
    log_softmax_to_float32,
    softmax_gradient,
    softmax_to_float32,
)

Original = Callable[..., torch.Tensor]

_REDUCTIONS = ("none", "mean", "sum")


def dropout(func: Original, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """One op that keeps a mask of one byte an element."""
    if not train or not 0.0 < p < 1.0 or input.numel() == 0:
        return func(input, p, train)
    return torch.native_dropout(input, p, True)[0]


def rms_norm(
    func: Original,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """One op on CUDA; layer norm keeps and costs the same, and exists here."""
    if weight is not None and weight.dtype is not input.dtype:
        return func(input, normalized_shape, weight, eps)
    return torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 0.0)[0]


class SoftmaxToFloat32(torch.autograd.Function):
    """A softmax whose kernel casts from 16 bits to float32, and its gradient back.

    Torch 2.13 knows the result's shape for float16 alone, so bfloat16 goes by that name.
    """

    @staticmethod
    def forward(ctx: Any, is_log: bool, input: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the softmax or its logarithm."""
        kernel = log_softmax_to_float32 if is_log else softmax_to_float32
        out: torch.Tensor = kernel(input.view(torch.float16), dim)
        ctx.is_log, ctx.dim, ctx.dtype = is_log, dim, input.dtype
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return a gradient of 16 bits."""
        kernel = log_softmax_gradient if ctx.is_log else softmax_gradient
        (out,) = ctx.saved_tensors
        gradient = kernel(gradients[0], out, ctx.dim, torch.float16)
        return None, gradient.view(ctx.dtype), None


def softmax_to_float32_of(input: torch.Tensor, dim: int, *, is_log: bool) -> torch.Tensor:
    """A softmax in float32 straight from 16 bits."""
    out: torch.Tensor = SoftmaxToFloat32.apply(is_log, input, dim)  # type: ignore[no-untyped-call]
    return out


def softmax(
    is_log: bool, func: Original, input: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The kernel itself casts from 16 bits to float32."""
    if is_low(input) and dtype is torch.float32:
        return softmax_to_float32_of(input, dim, is_log=is_log)
    return func(input, dim, dtype=dtype)


def cross_entropy_loss(
    func: Original,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Under autocast scores in the type of the logits, cast for the loss of them.

    The CPU's autocast casts the logits.
    """
    rest = (target, weight, reduction, ignore_index, label_smoothing)
    if not (torch.is_autocast_enabled("cpu") and is_low(input)):
        return func(input, *rest)
    with torch.autocast("cpu", enabled=False):
        if target.is_floating_point() or label_smoothing:
            return func(input, *rest)
        scores = functional.log_softmax(input, min(input.dim() - 1, 1))
        return functional.nll_loss(
            scores.float(),
            target,
            weight,
            ignore_index=ignore_index,
            reduction=_REDUCTIONS[reduction],
        )


def scaled_dot_product_attention(_: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """One fused kernel."""
    return attention(*args, **kwargs)


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "cross_entropy_loss": cross_entropy_loss,
    "dropout": dropout,
    "log_softmax": functools.partial(softmax, True),
    "rms_norm": rms_norm,
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "softmax": functools.partial(softmax, False),
}


def is_low(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one of the 16-bit types."""
    return tensor.dtype in (torch.float16, torch.bfloat16)
