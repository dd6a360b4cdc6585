"""What the user says about single modules: keep what this one saves, or recompute it.

    leanstep.recompute(model.encoder)
    leanstep.keep(model.encoder.layers[0].attention)

A mark is a wish that every later plan honours, whatever its budget. It is stored beside the module,
not in it: its attributes and `state_dict` stay what they were, and a copy has no marks.
"""

import weakref
from typing import TypeVar

from torch import nn

from leanstep.errors import InputError

Module = TypeVar("Module", bound=nn.Module)

_marks: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


def keep(module: Module, on: bool = True) -> Module:
    """Let every plan keep what a module saves for backward; `keep(module, False)` takes it back.

    Holds for everything inside the module, except what is marked otherwise. Returns the module.
    """
    return _mark(module, "keep", on)


def recompute(module: Module, on: bool = True) -> Module:
    """Let every plan recompute what a module saves; `recompute(module, False)` takes it back.

    Everything inside that can be rebuilt is dropped after forward, also where the budget would not
    need it. What is marked `keep` inside stays. Returns the module.
    """
    return _mark(module, "recompute", on)


def _mark(module: Module, action: str, on: bool) -> Module:
    if not isinstance(module, nn.Module):
        raise InputError(f"a mark is for a module, not for {type(module).__name__}")
    if on:
        _marks[module] = action
    elif _marks.get(module) == action:
        del _marks[module]
    return module


def marks_of(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The marked modules of a model by path, outer ones first."""
    return tuple(
        (path, _marks[module]) for path, module in model.named_modules() if module in _marks
    )
