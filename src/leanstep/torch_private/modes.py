"""Modes that see ops below autograd, work that they do not see, and what ops are called with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode


class TorchDispatchMode(_TorchDispatchMode):
    """Sees every op below autograd while it is active; torch's own has no annotations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


# Whether autocast is on for any device, in one call.
any_autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def is_traced() -> bool:
    """Whether ops are written down for another program, or transformed; both want plain code.

    The tensors of a transform of torch.func (vmap, grad) have no storage.
    """
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    return is_transformed or torch._C._is_tracing() or torch.compiler.is_compiling()


def operator_arguments(operator: Any) -> list[Any]:
    """The arguments of an operator's schema, each with its name and what it aliases."""
    arguments: list[Any] = operator._schema.arguments
    return arguments


@contextmanager
def past_every_mode() -> Iterator[None]:
    """Work on real tensors as if no mode were active."""
    # Setting modes aside takes longer than a small op: mostly there are none.
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    with torch._C.DisableTorchFunction(), _disable_current_modes() if has_modes else nullcontext():
        yield


def generator_bytes(state: torch.Tensor | None = None) -> bytes:
    """The state of the CPU's generator, or one taken earlier; read past every mode."""
    with past_every_mode():
        return (torch.get_rng_state() if state is None else state).numpy().tobytes()


def modes_are_active() -> bool:
    """Whether a dispatch mode watches ops: compiled code would not run then, and not again."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


def is_innermost(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode is the one that sees ops first."""
    return _get_current_dispatch_mode() is mode
