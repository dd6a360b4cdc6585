"""Saves of a compiled call that are dropped, and rebuilt by a program of their own for backward.

Kernels of forward and backward stay those of the unplanned form, so its bits are the same wherever
the rebuilt values are: a sum that is fused otherwise may round otherwise. Both are wrapped: forward
hands over an empty tensor in the place of each that is dropped, and backward's arguments are made
whole again before its kernels run. Hooks on what autograd saves would cost the host more.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.engines.settings import Settings, Switch, settings_now
from leanstep.step.training import autocast_is_on, no_autocast
from leanstep.torch_private.compiler import result_strides
from leanstep.torch_private.nodes import Run


@dataclass(frozen=True, eq=False)
class Rebuild:
    """A program that makes what is dropped of what is kept.

    What is dropped has `places` among the results of forward, in order, and `arguments` among
    those of backward, as `sources` have. `strides` are those that the program expects of its
    sources: as kernels of forward save them, where that is known beforehand.
    """

    places: tuple[int, ...]
    arguments: tuple[int, ...]
    sources: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    run: Run


class Dropper:
    """Wrap forward and backward of one compiled graph; `is_dropping` is asked at every call."""

    def __init__(self, is_dropping: Callable[[], bool]) -> None:
        self.rebuild: Rebuild | None = None
        self.results: dict[str, int] = {}
        self._is_dropping = is_dropping
        self._strides: list[tuple[int, ...]] = []
        self._told: list[tuple[int, ...] | None] = []

    def wrapped(self, graph: torch.fx.GraphModule, is_backward: bool) -> Callable[[Run], Run]:
        """What has the program of a graph get less from forward, or hand less to backward."""
        if is_backward:
            return self._backward
        outputs: Any = graph.graph.output_node().args[0]
        nodes = ((n, place) for place, n in enumerate(outputs) if isinstance(n, torch.fx.Node))
        # The last place of each: what is handed over may be an output too.
        self.results = {node.name: place for node, place in nodes}
        return self._forward

    def stride(self, node: torch.fx.Node) -> tuple[int, ...]:
        """How forward hands over a node, if it tells; else as ops would lay it out."""
        place = self.results.get(node.name, len(self._told))
        told = self._told[place] if place < len(self._told) else None
        return tuple(node.meta["val"].stride()) if told is None else told

    def _forward(self, run: Run) -> Run:
        self._told = result_strides(run)

        def forward(arguments: list[Any]) -> Sequence[Any]:
            rebuild = self.rebuild
            if rebuild is None or not self._is_dropping():
                return run(arguments)
            results = list(run(arguments))
            if not self._strides:
                # A program lays its results out in one way.
                self._strides = [results[place].stride() for place in rebuild.places]
            note = _note_of(settings_now())
            for place in rebuild.places:
                results[place] = note
            return results

        return forward

    def _backward(self, run: Run) -> Run:
        def backward(arguments: list[Any]) -> Sequence[Any]:
            rebuild = self.rebuild
            # Where nothing was dropped, all is there.
            if rebuild is not None and (note := arguments[rebuild.arguments[0]]).numel() == 0:
                made = list(self._rebuilt(rebuild, arguments, _settings[note.shape[0]]))
                pairs = list(zip(rebuild.arguments, self._strides, strict=True))
                for place, stride in reversed(pairs):
                    # Taken off: the program lets go of each as soon as it can.
                    arguments[place] = laid_out(made.pop(), stride)
            return run(arguments)

        return backward

    def _rebuilt(
        self, rebuild: Rebuild, arguments: Sequence[Any], settings: Settings
    ) -> Sequence[torch.Tensor]:
        pairs = zip(rebuild.sources, rebuild.strides, strict=True)
        sources = [laid_out(arguments[place], stride) for place, stride in pairs]
        with Switch() as switch:
            # Products look at them as they run, compiled or not.
            switch.to(settings)
            if not autocast_is_on():
                return rebuild.run(sources)
            with no_autocast():
                return rebuild.run(sources)


# An empty tensor stands for what was dropped, and its shape says which settings forward had.
_settings: list[Settings] = []
_notes: dict[Settings, torch.Tensor] = {}
_new_note = threading.Lock()


def _note_of(settings: Settings) -> torch.Tensor:
    note = _notes.get(settings)
    return _noted(settings) if note is None else note


def _noted(settings: Settings) -> torch.Tensor:
    # Two models may train in two threads, and each number has to stay that of one.
    with _new_note:
        if settings not in _notes:
            _settings.append(settings)
            shape = len(_settings) - 1, 0
            _notes[settings] = torch.empty(shape, dtype=torch.bool, device="cpu")
        return _notes[settings]


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with other strides; those of a single element say nothing."""
    if tensor.stride() == stride:
        return tensor
    rows = zip(tensor.shape, tensor.stride(), stride, strict=True)
    if all(size == 1 or own == wanted for size, own, wanted in rows):
        return tensor
    fresh = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor)
