"""Say cheaply whether a block call is like one that was recorded.

Compared on every call: the tensor arguments' shapes, strides, dtypes, devices and which of them
share a storage, the other arguments, the plain attributes, hooks and children of the block's
modules and of the objects they hold, where their own generators of random numbers stand, global
variables that their methods name, which parameters want gradients, autocast and the default dtype.
What cannot be seen from here (a number that a function of the user's makes up) is left to the
audits.
"""

from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from leanstep.generators import HeldGenerators
from leanstep.torch_private import storage_address, tree_flatten

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (FunctionType, BuiltinFunctionType)
_MISSING = object()
_MODULE_OWN = frozenset(vars(nn.Module()))


class UncacheableError(Exception):
    """A call that cannot be compared with another one, since it has arguments of unknown kind."""


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """What a call's arguments and torch's modes look like, and its tensor arguments."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors: list[torch.Tensor] = []
    looks: list[Any] = []
    first_with: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # Two arguments with one storage are two sources in a call where they are not.
            alias = first_with.setdefault(storage_address(leaf), len(tensors))
            looks.append((_tensor_look(leaf), alias))
            tensors.append(leaf)
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
        tensor.is_conj(),
        tensor.is_neg(),
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
            (names, name)
            for names in self._owners
            for name, value in names.items()
            if isinstance(value, (*_PLAIN, *_CODE)) or _is_plain_tuple(value)
        ]
        self._attributes.extend(_globals(modules))
        self._generators = HeldGenerators(modules)
        # By name, not by object: another object may stand there at the next call.
        self._held = [
            (own, name)
            for own in self._owners
            for name, value in own.items()
            if name not in _MODULE_OWN and _is_watched(value)
        ]

    def state(self) -> list[Any]:
        """The attributes as they are now; compare two with `same`."""
        state = [own.get(name, _MISSING) for own, name in self._attributes]
        state.extend(tuple(_plain_items(own.get(name))) for own, name in self._held)
        state.extend(self._generators.states())
        for own in self._owners:
            state.append(len(own))
            state.append((*own["_forward_hooks"], *own["_forward_pre_hooks"]))
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


def _is_watched(value: Any) -> bool:
    """Whether an attribute is a collection, or an object such as a configuration."""
    if type(value) in (list, dict):
        return True
    unwatched = (torch.Tensor, nn.Module, type, ModuleType, *_CODE)
    return hasattr(value, "__dict__") and not isinstance(value, unwatched)


def _globals(modules: list[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    """The global variables that the methods of the user's modules name."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    functions = (
        function
        for kind in kinds
        if not kind.__module__.startswith(("torch.", "builtins"))
        for function in vars(kind).values()
        if isinstance(function, FunctionType)
    )
    return [
        (function.__globals__, name)
        for function in functions
        for name in function.__code__.co_names
        if isinstance(function.__globals__.get(name, _MISSING), _PLAIN)
    ]


def _plain_items(value: Any) -> list[Any]:
    """The plain parts of a collection or an object, each with its name where it has one."""
    if type(value) is list:
        return [item for item in value if isinstance(item, _PLAIN) or _is_plain_tuple(item)]
    named = value if type(value) is dict else getattr(value, "__dict__", {})
    return [
        (name, item)
        for name, item in named.items()
        if isinstance(item, (*_PLAIN, *_CODE)) or _is_plain_tuple(item)
    ]


def _is_plain_tuple(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(item, _PLAIN) for item in value)
