"""Where autograd is: in backward or not, at which node, and whose hooks take what it saves."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


def current_node() -> Any | None:
    """The autograd node being run, or the last one while its gradients are handed on."""
    return torch._C._current_autograd_node()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call something when the backward that runs now has ended; what DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def node_number(node: Any) -> int:
    """The number a node got when forward created it."""
    number: int = node._sequence_nr()
    return number


def next_node_number() -> int:
    """The number that the next node made on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def saving_hooks_work() -> bool:
    """Whether tensors that autograd saves can be replaced; under torch.func they cannot.

    Under vmap they are batches without a storage.
    """
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    # In forward mode a tensor carries a second one, which is not saved through hooks.
    return enabled and not is_transformed and torch.autograd.forward_ad._current_level < 0


def saving_hooks_are_set() -> bool:
    """Whether somebody's hooks take what autograd saves: `save_on_cpu`, or a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def top_saving_hooks() -> tuple[Any, Any] | None:
    """The innermost hooks that take what autograd saves."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def below_autograd() -> AbstractContextManager[None]:
    """Run ops as autograd runs them: nothing is recorded for backward, whatever the grad mode."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard
