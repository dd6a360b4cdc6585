"""What a value looks like to the code that reads it: equal looks, equal behaviour.

A look is made of plain values, classes, functions' code and torch's own objects, so it can be kept
without keeping a tensor alive, and compared with ==. Tensors count by shape and type: what they
hold reaches the ops as an input. A value of unknown kind has no look.
"""

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Container
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from leanstep.engines.reach import contents, is_torch, is_users, named_parts
from leanstep.torch_private.tensors import storage_address

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, tuple, deque, torch.Size)
_MAPPINGS = (dict, OrderedDict, defaultdict)
ITSELF = (
    *(type, ModuleType, CodeType, torch.dtype, torch.device, Enum),
    # What stands in a class for attributes that are kept in C; the values are the objects' parts.
    *(GetSetDescriptorType, MemberDescriptorType, WrapperDescriptorType, MethodDescriptorType),
)

# Objects of these modules are read by their methods alone, and those count as pure.
_OPAQUE = frozenset(("logging", "re", "pathlib", "typing", "warnings", "functools", "abc"))

# A look at more than this costs more than recording a call.
_MOST_PARTS = 2_000
_SMALL_BYTES = 4096


class UncacheableError(Exception):
    """A call that cannot be compared with another one, since it reads values of unknown kind."""


class Looks:
    """Look at values, at those attributes of objects that have one of the names; None: at all.

    The classes of objects are collected in `kinds`. Tensors must lie `apart_from` others, which
    are given by the addresses of their storages.
    """

    def __init__(
        self,
        names: Collection[str] | None,
        kinds: set[type] | None = None,
        apart_from: Container[int] = frozenset(),
    ) -> None:
        self._names, self.kinds, self.apart_from = names, kinds, apart_from

    def of(self, value: Any) -> Any:
        """The look of a value."""
        # Most are plain, and stand for themselves: `same` compares types as well.
        return value if isinstance(value, PLAIN) else _Look(self).at(value)

    def parts(self, value: Any) -> dict[str, Any]:
        """The parts of an object that may be named."""
        return named_parts(value, self._names)


class _Look:
    """One look: counts its parts, and goes round no circle."""

    def __init__(self, looks: Looks) -> None:
        self._looks, self._seen, self._parts = looks, set[int](), 0

    def at(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return (type(value), value)
        if isinstance(value, ITSELF):
            return value
        if isinstance(value, torch.Tensor):
            if self._looks.apart_from and storage_address(value) in self._looks.apart_from:
                # An op that reads the one or the other: which is not to be told.
                raise UncacheableError("a tensor that is an argument too")
            return (torch.Tensor, tuple(value.shape), value.dtype, value.requires_grad)
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise UncacheableError("too many parts")
        if id(value) in self._seen:
            return "seen"
        self._seen.add(id(value))
        if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, functools.partial)):
            return self._at_callable(value)
        return self._at_collection(value)

    def _at_callable(self, value: Any) -> Any:
        match value:
            case FunctionType():
                parts = (value.__closure__ or (), value.__defaults__, value.__kwdefaults__)
                return (value.__code__, *map(self.at, parts), self._at_parts(value))
            case MethodType():
                return (self.at(value.__func__), self.at(value.__self__))
            case functools.partial():
                return tuple(map(self.at, (value.func, value.args, value.keywords)))
        return (value.__name__, self.at(value.__self__))

    def _at_collection(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SEQUENCES:
            return (kind, *map(self.at, value))
        if kind in _MAPPINGS:
            return (kind, *((self.at(name), self.at(item)) for name, item in value.items()))
        if kind in (set, frozenset):
            return (kind, frozenset(map(self.at, value)))
        if kind is CellType:
            return (kind, *map(self.at, contents(value)))
        return self._at_object(value)

    def _at_object(self, value: Any) -> Any:
        kind = type(value)
        root = kind.__module__.partition(".")[0]
        if kind.__module__.startswith("numpy") and getattr(value, "nbytes", 1 << 30) < _SMALL_BYTES:
            return (kind, value.dtype.str, value.shape, value.tobytes())
        if root in _OPAQUE or kind in (object, slice, range, type(...), property):
            return (kind, value if kind in (slice, range) else None)
        if isinstance(value, nn.Module):
            return (kind, value.training, self._at_parts(value))
        if is_torch(kind.__module__):
            return kind
        if not is_users(kind.__module__) or isinstance(value, _SEQUENCES + _MAPPINGS + (set,)):
            return self._at_derived(value)
        is_open = hasattr(value, "__dict__") or any("__slots__" in vars(k) for k in kind.__mro__)
        if hasattr(value, "__next__") or not is_open:
            raise UncacheableError(f"an iterator or something closed, {kind.__name__}")
        if self._looks.kinds is not None:
            self._looks.kinds.add(kind)
        return (kind, self._at_parts(value))

    def _at_derived(self, value: Any) -> Any:
        """A user's kind of tuple, list or dictionary, or an object of Python's own."""
        kind = type(value)
        if kind is SimpleNamespace:
            return (kind, self._at_parts(value))
        if not is_users(kind.__module__):
            raise UncacheableError(kind.__name__)
        items = value.items() if isinstance(value, dict) else value
        return (kind, *map(self.at, items), self._at_parts(value))

    def _at_parts(self, value: Any) -> Any:
        return tuple((name, self.at(part)) for name, part in self._looks.parts(value).items())
