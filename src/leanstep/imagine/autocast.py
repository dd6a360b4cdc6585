"""CUDA's autocast on fake CPU tensors.

It is torch's own autocast for the CPU, which casts the same ops to 16 bits, and a weight only once
however often it is used. What CUDA runs in float32 and the CPU does not, or runs in 16 bits and
the CPU does not, is added where Python calls it. The lists are those of ATen/autocast_mode.h in
torch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_IN_FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow rpow rdiv
rtruediv softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss_nd nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
"""
IN_FLOAT32 = frozenset(_IN_FLOAT32.split())

# Also in float32, but told so by their `dtype`: the kernel casts, without a copy of its input.
_TOLD_FLOAT32 = "prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum"
TOLD_FLOAT32 = frozenset(_TOLD_FLOAT32.split())

# In 16 bits on CUDA alone; attention is chosen by type before the CPU's autocast would see it.
IN_LOWER = frozenset(
    ["scaled_dot_product_attention", "prelu", "addmv", "addr", "mv", "chain_matmul"]
)


@contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Let `torch.autocast("cuda")` work where there is no CUDA, by way of the CPU's."""
    original = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            dtype, device_type = dtype or torch.get_autocast_dtype("cuda"), "cpu"
        original(self, device_type, dtype, enabled, cache_enabled)

    with mock.patch.object(torch.autocast, "__init__", init):
        yield


def call_with_casts(name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function inside autocast, with what CUDA does there and the CPU does not."""
    dtype = torch.get_autocast_dtype("cpu") if name in IN_LOWER else torch.float32
    if name in TOLD_FLOAT32 and any(map(_is_low, args)):
        if not any(isinstance(arg, torch.dtype) for arg in args):
            kwargs["dtype"] = kwargs.get("dtype") or dtype
    elif name in IN_LOWER or name in IN_FLOAT32:
        args = [_cast(arg, dtype) for arg in args]
        kwargs = {key: _cast(arg, dtype) for key, arg in kwargs.items()}
    else:
        return func(*args, **kwargs)
    # What it calls runs in the types it was given.
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def _is_low(argument: Any) -> bool:
    is_tensor = isinstance(argument, torch.Tensor)
    return is_tensor and argument.dtype in (torch.float16, torch.bfloat16)


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    if isinstance(argument, torch.Tensor):
        is_eligible = argument.is_floating_point() and argument.dtype is not torch.float64
        return argument.to(dtype) if is_eligible else argument
    if type(argument) in (list, tuple):
        return type(argument)(_cast(item, dtype) for item in argument)
    return argument
