"""Saves of a compiled call that are dropped, and rebuilt by a program of their own for backward.

Kernels of forward and backward stay those of the unplanned form, so its bits are the same wherever
the rebuilt values are: a sum that is fused otherwise may round otherwise. Autograd asks for all
saves at once, before backward's kernels run; with the first request everything is rebuilt.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.engines.joint import LostNodeError
from leanstep.engines.parking import Keep, Kept
from leanstep.engines.recording import Ref, look_at
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


class _Call:
    """What one call has left for its rebuild. Handles hold it, and it holds no handle."""

    __slots__ = ("_made", "_rebuild", "_settings", "_sources")

    def __init__(self, rebuild: Rebuild, arguments: Sequence[Any], keep: Keep) -> None:
        self._rebuild, self._settings = rebuild, settings_now()
        self._sources: dict[Argument | Saved, Kept] = {
            source: keep(arguments[source.place].detach(), None)
            for source in rebuild.sources
            if isinstance(source, Argument)
        }
        self._made: dict[int, torch.Tensor] = {}

    def kept(self, number: int, source: Kept) -> None:
        """Note a save that is kept: a rebuild may start from it."""
        self._sources[Saved(number)] = source

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
        return [_laid_out(self._sources[one].unchanged("a block"), stride) for one, stride in pairs]


class _Dropped:
    """What autograd holds for a dropped tensor."""

    __slots__ = ("_call", "_look", "_number")

    def __init__(self, call: _Call, number: int, look: Ref) -> None:
        self._call, self._number, self._look = call, number, look

    def tensor(self) -> torch.Tensor:
        """The tensor, laid out as the program of backward expects it."""
        return _laid_out(self._call.take(self._number), self._look.stride)


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with other strides; those of a single element say nothing."""
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
        number = next(self._numbers)
        if self._rebuild is not None and number in self._rebuild.dropped:
            assert self._call is not None
            return _Dropped(self._call, number, look_at(tensor))
        if not has_storage(tensor):
            return tensor
        source = self._keep(tensor, number)
        if self._call is not None:
            self._call.kept(number, source)
        return source


def _unpack(packed: Any) -> torch.Tensor:
    tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else packed.tensor()
    return tensor
