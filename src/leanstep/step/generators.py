"""Generators of random numbers that belong to the user: where they stand, and how to put them back.

Those of torch, Python and NumPy are looked for in the attributes of modules, among what their
functions close over, and behind bound methods (`self.draw = rng.random`).
"""

import pickle
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import torch


class HeldGenerators:
    """The generators that modules hold; those of torch only on request."""

    def __init__(self, modules: Iterable[torch.nn.Module], *, torch_too: bool = False) -> None:
        kinds = (*_other_kinds(), torch.Generator) if torch_too else _other_kinds()
        held = (value for module in modules for value in _reachable(module))
        self._generators = list({id(g): g for g in held if isinstance(g, kinds)}.values())

    def states(self) -> list[bytes]:
        """Where they stand, comparable."""
        return [pickle.dumps(_state(generator)) for generator in self._generators]

    def set_states(self, states: Sequence[bytes]) -> None:
        """Put them where they stood."""
        for generator, state in zip(self._generators, states, strict=True):
            _set_state(generator, pickle.loads(state))


def _reachable(module: torch.nn.Module) -> Iterator[Any]:
    for value in (*vars(module).values(), getattr(type(module), "forward", None)):
        yield from _with_owner(value)
        if type(value) in (list, tuple, dict):
            yield from value.values() if isinstance(value, dict) else value
        for cell in (value.__closure__ or ()) if isinstance(value, FunctionType) else ():
            # A cell is empty as long as what it is for has not been assigned.
            with suppress(ValueError):
                yield from _with_owner(cell.cell_contents)


def _with_owner(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, (MethodType, BuiltinMethodType)):
        yield value.__self__


def _other_kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    own = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (random.Random, *own)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        # Its numbers come from outside and never repeat: it stands nowhere twice.
        return generator.random()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    own = getattr(generator, "bit_generator", None)
    return generator.get_state() if own is None else own.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.SystemRandom):
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
