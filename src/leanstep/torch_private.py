"""Every name of torch that begins with an underscore, with what it is for.

All of them were seen in torch 2.11 (CUDA) and 2.13 (CPU). When a new torch breaks leanstep, the
repair belongs in this file.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

# The step hooks that apply to every optimizer of the process.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode

# Flattens nested arguments (tuples, dicts, registered dataclasses) into leaves.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves


class TorchDispatchMode(_TorchDispatchMode):
    """Sees every op below autograd while it is active; torch's own has no annotations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def storage_address(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, valid while the storage lives."""
    address: int = tensor.untyped_storage()._cdata
    return address


def storage_use_count(address: int) -> int:
    """How many tensors share a storage that is alive and whose Python object was once made."""
    count: int = torch._C._storage_Use_Count(address)
    return count - _counts_of_python_object()


@functools.cache
def _counts_of_python_object() -> int:
    """What a storage's Python object adds to its count: none or one, by torch's version."""
    tensor = torch.empty(1)
    count: int = torch._C._storage_Use_Count(storage_address(tensor))
    return count - 1


def tensor_use_count(tensor: torch.Tensor) -> int:
    """How many references a tensor has in C++ and Python together."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


def current_node() -> Any | None:
    """The autograd node being run, or the last one while its gradients are handed on."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    """The number a node got when forward created it."""
    number: int = node._sequence_nr()
    return number


def next_node_number() -> int:
    """The number that the next node made on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def memory_event_bytes(profiler: torch.profiler.profile) -> list[int]:
    """The CPU allocator's events in order: bytes taken (positive) or given back (negative)."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return [event.nbytes() for event in results.events() if event.name() == "[memory]"]


def with_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """The tensor as one whose conjugate or negative is taken when it is read."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


def saving_hooks_work() -> bool:
    """Whether tensors that autograd saves can be replaced; under torch.func they cannot."""
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return enabled


def below_autograd() -> AbstractContextManager[None]:
    """Run ops as autograd runs them: nothing is recorded for backward, whatever the grad mode."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's storage was written in place; shared by all its views."""
    return tensor._version


def original_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The optimizer's own step, past what a learning-rate scheduler put in front of it."""
    step = type(optimizer).step
    return lambda: step(optimizer)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """The dictionaries that hold an optimizer's step hooks, and those of all optimizers."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The dictionaries that hold a module's forward hooks."""
    return [module._forward_pre_hooks, module._forward_hooks]


# Every call of a module goes through this function: its frame on the stack holds the module.
MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__


def operator_arguments(operator: Any) -> list[Any]:
    """The arguments of an operator's schema, each with its name and what it aliases."""
    arguments: list[Any] = operator._schema.arguments
    return arguments
