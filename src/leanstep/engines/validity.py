"""Say cheaply whether a block call is like one that was recorded.

Compared on every call: the tensor arguments' shapes, strides, dtypes and devices, the other
arguments, the plain attributes, hooks and children of the block's modules, which parameters want
gradients, autocast and the default dtype. What cannot be seen from here (a global variable that
reaches an op as a number) is left to the audits.
"""

from typing import Any

import torch
from torch import nn

from leanstep.torch_private import tree_flatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()


class UncacheableError(Exception):
    """A call that cannot be compared with another one, since it has arguments of unknown kind."""


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """What a call's arguments and torch's modes look like, and its tensor arguments."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    looks: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            looks.append(_tensor_look(leaf))
        elif isinstance(leaf, (*_PLAIN, torch.dtype, torch.device)):
            # True equals 1 and 1 equals 1.0, but an op may treat them differently.
            looks.append((type(leaf), leaf))
        else:
            raise UncacheableError(type(leaf).__name__)
    return (structure, tuple(looks), _modes()), tensors


def _tensor_look(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        raise UncacheableError(type(tensor).__name__)
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


class Watch:
    """The attributes of a block's modules that its ops can depend on."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self._owners = [vars(module) for module in modules]
        self._attributes = [
            (own, name)
            for own in self._owners
            for name, value in own.items()
            if isinstance(value, _PLAIN) or _is_plain_tuple(value)
        ]

    def state(self) -> list[Any]:
        """The attributes as they are now; compare two with `same`."""
        state = [own.get(name, _MISSING) for own, name in self._attributes]
        for own in self._owners:
            state.append(len(own))
            state.append(len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"]))
            state.extend(map(id, own["_modules"].values()))
            state.extend(
                parameter is not None and parameter.requires_grad
                for parameter in own["_parameters"].values()
            )
        return state


def same(old: list[Any], new: list[Any]) -> bool:
    """Whether two states are equal, types included."""
    if len(old) != len(new):
        return False
    return all(a is b or (type(a) is type(b) and a == b) for a, b in zip(old, new, strict=True))


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(item, _PLAIN) for item in value)
