"""Every private name of torch for tensors without memory, and for ops of an absent device."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Tensors with shapes and types but without memory.
from torch._subclasses import fake_tensor as _fake_tensor

from leanstep.torch_private.modes import past_every_mode


class FakeTensorMode(_fake_tensor.FakeTensorMode):
    """A mode in which every new tensor has a shape and a type but no memory.

    Its own work on tensors is hidden from function modes.
    """

    def __init__(self) -> None:
        # Real tensors that closures bring in are taken for fakes of their shape.
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one op."""
        with torch._C.DisableTorchFunction():
            return super().__torch_dispatch__(*args, **kwargs)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own."""
    return isinstance(tensor, _fake_tensor.FakeTensor)


def is_imagined(types: Sequence[type]) -> bool:
    """Whether an op is run for its shapes alone, as DTensor does to plan its own.

    A mode of torch's own, such as that of fake tensors, is asked after all others.
    """
    if any(issubclass(kind, _fake_tensor.FakeTensor) for kind in types):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def operator_that_asked(error: BaseException) -> str | None:
    """The operator that could not go on because a fake tensor holds no data; None: other causes."""
    if isinstance(
        error,
        (
            _fake_tensor.DataDependentOutputException,
            _fake_tensor.DynamicOutputShapeException,
        ),
    ):
        return str(error.func)
    # `.numpy()` and its like say so in words only.
    return ".numpy()" if "not supported for tensor subclasses" in str(error) else None


def operator_without_form(error: BaseException) -> str | None:
    """The operator that nobody has told how to run on fake tensors; None for other causes."""
    is_missing = isinstance(error, _fake_tensor.UnsupportedOperatorException)
    return str(error.func) if is_missing else None  # type: ignore[attr-defined]


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The fused attention of CUDA for 16-bit types; keeps its inputs, output and log-sum-exp."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, is_causal, False, scale=scale
    )[0]
    return out


def efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The fused attention of CUDA that takes masks and 32-bit types."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout, is_causal, scale=scale
    )[0]
    return out


def plain_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention from matrix products and softmax, where no fused kernel applies."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(*args, **kwargs)[0]
    return out


# Softmax from 16 bits to float32 in one op, and the gradient back; on CUDA alone.
softmax_to_float32 = functools.partial(torch._softmax, half_to_float=True)
softmax_gradient = torch._softmax_backward_data
log_softmax_to_float32 = functools.partial(torch._log_softmax, half_to_float=True)
log_softmax_gradient = torch._log_softmax_backward_data


@contextmanager
def conversions_by_data() -> Iterator[None]:
    """Let `module.to(...)` convert fake parameters as it converts real ones: in place.

    Torch 2.11 to 2.13 swaps fake parameters for new ones, which fails for those with weak
    references (each fake tensor has one).
    """

    def apply(
        module: torch.nn.Module,
        convert: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            apply(child, convert)
        for parameter in module._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    converted = convert(parameter)
                if converted is not parameter:
                    parameter.data = converted
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        return module

    original = torch.nn.Module._apply
    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = original  # type: ignore[method-assign]


def replace_tensors(
    module: torch.nn.Module, stand_in: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Put stand-ins in the place of a module's own parameters, buffers and other tensors."""
    places: list[dict[str, Any]] = [module._parameters, module._buffers, vars(module)]
    for own in places:
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                own[name] = stand_in(tensor)


@contextmanager
def layouts_of_shards_apart() -> Iterator[None]:
    """Let DTensor find out past every mode how large what it makes would be as a whole.

    It runs the op on fakes of the whole tensors. Where the step is one of fakes itself, torch 2.11
    does so in its mode and at every op: as if that were part of the step.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def apart(*args: Any, **kwargs: Any) -> Any:
        with past_every_mode():
            return original(*args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = apart  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]
