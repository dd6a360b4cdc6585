"""A tensor's storage, how often it was written, who holds it, and trees of tensors."""

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# Flattens nested arguments (tuples, dicts, registered dataclasses) into leaves.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten


def storage_address(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, valid while the storage lives."""
    return address_of(tensor.untyped_storage())


def address_of(storage: torch.UntypedStorage) -> int:
    """The identity of a storage, valid while it lives."""
    address: int = storage._cdata
    return address


# What a tensor class has that is made of others, as DTensor is; same name in torch 2.11 to 2.13.
_WRAPS = "__tensor_flatten__"


def wraps_others(kind: type) -> bool:
    """Whether tensors of a class are made of other tensors: they have no memory themselves."""
    return hasattr(kind, _WRAPS)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is spread over several; any other is itself."""
    if not wraps_others(type(tensor)):
        return tensor
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is None or not isinstance(tensor, loaded.DTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


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


def memory_event_bytes(profiler: torch.profiler.profile) -> list[int]:
    """The CPU allocator's events in order: bytes taken (positive) or given back (negative)."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return [event.nbytes() for event in results.events() if event.name() == "[memory]"]


def with_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """The tensor as one whose conjugate or negative is taken when it is read."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history; writes to either are counted for both.

    Below autograd, where dispatch modes run, `detach` alone would begin to count anew.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEWS):
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False):
        return tensor.detach()


# The layer of dispatch that lets a view share its base's count of writes.
_VIEWS = torch._C.DispatchKey.ADInplaceOrView


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's storage was written in place; shared by all its views.

    Nobody counts for tensors made in inference mode.
    """
    try:
        return tensor._version
    except RuntimeError:
        # Asked first, `is_inference` would take longer than the answer.
        return 0


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each of some tensors was written."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version(tensor) for tensor in tensors]


@contextmanager
def same_versions_after(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let what is written inside the block count as never written: contents are put back."""
    tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def on_storage_of(
    tensor: torch.Tensor, dtype: torch.dtype, place: tuple[Any, Sequence[int], Sequence[int]]
) -> torch.Tensor:
    """A tensor at a place (offset, size, strides) of another's storage.

    No view for autograd: autocast caches the casts of weights that are none.
    """
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), *place)
