"""Saves of a compiled call that are dropped, and rebuilt by a program of their own for backward.

Kernels of forward and backward stay those of the unplanned form, so its bits are the same wherever
the rebuilt values are: a sum that is fused otherwise may round otherwise. Autograd asks for all
saves at once, before backward's kernels run; with the first request everything is rebuilt.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from leanstep.engines.joint import LostNodeError
from leanstep.engines.parking import Keep, Kept
from leanstep.engines.settings import Switch, settings_now
from leanstep.recorder.values import has_storage
from leanstep.step import no_autocast
from leanstep.torch_private import below_autograd


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that the compiled program was called with."""

    place: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that it saves and that is kept."""

    number: int


@dataclass(frozen=True, eq=False)
class Rebuild:
    """A program that makes what is dropped of what is kept; numbers count a call's saves.

    `strides` are those that it expects of its sources: kernels of forward may save otherwise.
    """

    num_saves: int
    dropped: tuple[int, ...]
    sources: tuple[Argument | Saved, ...]
    strides: tuple[tuple[int, ...], ...]
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

    @cached_property
    def is_dropped(self) -> frozenset[int]:
        """The same numbers, to look in for every save of every call."""
        return frozenset(self.dropped)

    @cached_property
    def is_started_from(self) -> frozenset[int]:
        """The saves that the program starts from."""
        return frozenset(one.number for one in self.sources if isinstance(one, Saved))


class _Call:
    """What one call has left for its rebuild. Handles hold it, and it holds no handle."""

    __slots__ = ("_arguments", "_made", "_rebuild", "_saved", "_settings")

    def __init__(self, rebuild: Rebuild, arguments: Sequence[Any], keep: Keep) -> None:
        self._rebuild, self._settings = rebuild, settings_now()
        self._arguments: dict[int, Kept] = {
            source.place: keep(arguments[source.place].detach(), None)
            for source in rebuild.sources
            if isinstance(source, Argument)
        }
        self._saved: dict[int, Kept] = {}
        self._made: dict[int, torch.Tensor] = {}

    def start_from(self, number: int, source: Kept) -> None:
        """Note a save that a rebuild starts from."""
        self._saved[number] = source

    def take(self, number: int) -> torch.Tensor:
        """A dropped tensor; whoever asks a second time makes everything be rebuilt again."""
        if number not in self._made:
            with Switch() as switch, below_autograd(), no_autocast():
                # Products look at them as they run, compiled or not.
                switch.to(self._settings)
                made = self._rebuild.run(self._laid_out_sources())
            self._made = dict(zip(self._rebuild.dropped, made, strict=True))
        return self._made.pop(number)

    def _laid_out_sources(self) -> list[torch.Tensor]:
        pairs = zip(self._rebuild.sources, self._rebuild.strides, strict=True)
        return [_laid_out(self._source(one).unchanged("a block"), stride) for one, stride in pairs]

    def _source(self, one: Argument | Saved) -> Kept:
        return self._saved[one.number] if isinstance(one, Saved) else self._arguments[one.place]


class _Dropped:
    """What autograd holds for a dropped tensor."""

    __slots__ = ("_call", "_number", "_stride")

    def __init__(self, call: _Call, number: int, stride: tuple[int, ...]) -> None:
        self._call, self._number, self._stride = call, number, stride

    def tensor(self) -> torch.Tensor:
        """The tensor, laid out as the program of backward expects it."""
        return _laid_out(self._call.take(self._number), self._stride)


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with other strides; those of a single element say nothing."""
    if tensor.stride() == stride:
        return tensor
    rows = zip(tensor.shape, tensor.stride(), stride, strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in rows):
        return tensor
    fresh = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor)


class Hooks:
    """Hooks around one call of a compiled program."""

    def __init__(self, keep: Keep, rebuild: Rebuild | None, arguments: Sequence[Any]) -> None:
        self._keep, self._rebuild = keep, rebuild
        self._call = None if rebuild is None else _Call(rebuild, arguments, keep)
        self._numbers = itertools.count()

    def around(self) -> AbstractContextManager[Any]:
        """Have what is saved inside kept or dropped."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def check(self) -> None:
        """Look, after the call, whether it saved what its rebuild counts on."""
        number = next(self._numbers)
        if self._rebuild is not None and number not in (0, self._rebuild.num_saves):
            raise LostNodeError(
                f"compiled code saved {number} tensors where {self._rebuild.num_saves} are known"
            )

    def _pack(self, tensor: torch.Tensor) -> Any:
        number, rebuild, call = next(self._numbers), self._rebuild, self._call
        if rebuild is None or call is None:
            return self._keep(tensor, number) if has_storage(tensor) else tensor
        if number in rebuild.is_dropped:
            return _Dropped(call, number, tensor.stride())
        if not has_storage(tensor):
            return tensor
        source = self._keep(tensor, number)
        if number in rebuild.is_started_from:
            call.start_from(number, source)
        return source


def _unpack(packed: Any) -> torch.Tensor:
    tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else packed.tensor()
    return tensor
