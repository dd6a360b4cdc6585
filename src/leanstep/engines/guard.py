"""Say that nothing has changed of all that a watch looks at, without looking at it again.

Most of what a block's code reads are numbers, words, functions and modules that stay the very same
objects from call to call. An object of a kind that cannot change looks as it did as long as it is
found in its place, so it is enough to compare identities, which Python does without a frame for
each. What can change (a tensor, an object, a dictionary) is looked at as ever.

A guard that holds proves that the state is the same; one that does not proves nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter, methodcaller
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from leanstep.engines.looks import ITSELF, PLAIN
from leanstep.engines.validity import MISSING, Watch, same
from leanstep.torch_private.modules import HOOK_GROUPS, global_hooks

_function_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_keywords = attrgetter("__kwdefaults__")
_own_attributes = attrgetter("__dict__")
_hooks = itemgetter(*HOOK_GROUPS)
_children = itemgetter("_modules")
_parameters = itemgetter("_parameters")
_buffers = itemgetter("_buffers")
_is_none = partial(is_, None)
_values = methodcaller("values")


class Guard:
    """What a watch saw at one moment."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._places: dict[int, tuple[Mapping[str, Any], list[str]]] = {}
        self._lists: list[list[Any]] = []
        self._functions: list[FunctionType] = []
        self._named_functions: list[FunctionType] = []
        self._deep: list[tuple[Mapping[str, Any], str]] = []
        self._deep_functions: list[FunctionType] = []
        self._sort(watch)
        self._owners = [own for own, _ in self._places.values()]
        self._getters = [_getter(names) for _, names in self._places.values()]
        self._objects = list(self._identities())
        self._counts = self._count()
        self._looks = self._look()

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            is_in_place = all(map(is_, self._identities(), self._objects))
        except KeyError:
            return False
        return is_in_place and self._count() == self._counts and same(self._looks, self._look())

    def _sort(self, watch: Watch) -> None:
        """Tell what cannot change from what can."""
        for own, name in watch.places:
            value = own.get(name, MISSING)
            if type(value) is list and all(map(_is_fixed, value)):
                self._lists.append(value)
            elif isinstance(value, FunctionType) and _is_simple(value):
                self._named_functions.append(value)
            elif value is MISSING or not _is_fixed(value):
                self._deep.append((own, name))
                continue
            self._places.setdefault(id(own), (own, []))[1].append(name)
        for own, name in watch.methods:
            self._places.setdefault(id(own), (own, []))[1].append(name)
        for function in watch.functions:
            (self._functions if _is_plain(function) else self._deep_functions).append(function)

    def _identities(self) -> Iterable[Any]:
        """The objects that must be the very same, in a fixed order; how many, `_count` says."""
        return chain(
            chain.from_iterable(map(call, self._getters, self._owners)),
            chain.from_iterable(map(_function_parts, self._named_functions)),
            chain.from_iterable(map(_function_parts, self._functions)),
            chain.from_iterable(self._lists),
            chain.from_iterable(filter(None, map(_keywords, self._functions))),
            chain.from_iterable(map(_values, filter(None, map(_keywords, self._functions)))),
            chain.from_iterable(map(_values, map(_children, self.watch.owners))),
            map(type, self.watch.modules),
        )

    def _count(self) -> list[Any]:
        """What is compared by value: lengths and switches."""
        owners = self.watch.owners
        has_hooks = any(chain.from_iterable(map(_hooks, owners)))
        return [
            *map(len, owners),
            *map(len, self._lists),
            *map(len, filter(None, map(_keywords, self._functions))),
            *map(len, map(_children, owners)),
            has_hooks and [tuple(group) for own in owners for group in _hooks(own)],
            any(map(_own_attributes, self._named_functions)),
            *map(tuple, global_hooks()),
            [
                None if parameter is None else parameter.requires_grad
                for parameter in chain.from_iterable(map(_values, map(_parameters, owners)))
            ],
            list(map(_is_none, chain.from_iterable(map(_values, map(_buffers, owners))))),
        ]

    def _look(self) -> list[Any]:
        """What has to be looked at anew."""
        of = self.watch.looks.of
        looks = [of(own.get(name, MISSING)) for own, name in self._deep]
        looks.extend(map(of, self.watch.cells))
        looks.extend(of(function.__defaults__) for function in self._deep_functions)
        looks.extend(of(function.__kwdefaults__) for function in self._deep_functions)
        looks.extend(self.watch.generators.states())
        return looks


def _getter(names: list[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    # With one name alone it would not return a tuple.
    return itemgetter(*names, names[0])


def _is_fixed(value: Any) -> bool:
    """Whether a value looks the same as long as it is the same object."""
    if isinstance(value, (*PLAIN, *ITSELF)):
        return True
    if type(value) in (tuple, torch.Size):
        return all(map(_is_fixed, value))
    return type(value) is BuiltinFunctionType and _is_fixed(value.__self__)


def _is_plain(function: FunctionType) -> bool:
    """Whether a function's defaults are fixed."""
    keywords = function.__kwdefaults__ or {}
    return _is_fixed(function.__defaults__) and all(map(_is_fixed, keywords.values()))


def _is_simple(function: FunctionType) -> bool:
    """Whether a function is its code and fixed defaults, and nothing else."""
    is_bare = function.__closure__ is None and not function.__dict__
    return is_bare and function.__kwdefaults__ is None and _is_fixed(function.__defaults__)
