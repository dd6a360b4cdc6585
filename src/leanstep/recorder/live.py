"""Record a step whose blocks already drop what they save, as if they did not.

The first step of a lazily fitted model is the user's own: it runs once, must not need more memory
than a fully recomputed step, and is all there is to plan from. So its blocks run by the engine that
drops and rebuilds, inside this recording. What the engine does for itself (copies, replays) is kept
out of the graph; a rebuilt tensor goes by the number of the one it stands for; and three things
that the engine changes are worked out as the untouched step has them:

- what autograd holds: each save is noted here before the engine packs it, and its release after;
- when a storage could go (its natural death): its use count, less what this recording and the
  engine hold of it;
- when it goes: at its natural death or when autograd lets the last save of it go, whichever is
  later. For a storage that nobody holds for the engine this is just when it dies.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from leanstep.ir import Category, Graph, Op, Phase, Save, Storage, Unpack, Value
from leanstep.recorder.step import Saved, StepRecording
from leanstep.recorder.values import has_storage

Pack = Callable[[torch.Tensor], Any]
Unpacker = Callable[[Any], torch.Tensor]


class LiveRecording(StepRecording):
    """A recording of the untouched step, while its blocks run otherwise.

    `out_of_memory` makes the error to raise where the device is full. A `witness` is told of each
    op that is written down, with what it was given and what it returns.
    """

    out_of_memory: Callable[["LiveRecording", str], Exception] | None = None
    witness: Callable[[Any, Sequence[Any], Any], None] | None = None

    def __init__(self, *args: Any, has_optimizer: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._has_optimizer = has_optimizer
        self.has_failed = False
        self._passed: set[int] = set()
        self._last_release: dict[int, int] = {}
        self._engine_holds: dict[int, weakref.ref[torch.Tensor]] = {}
        self._still_saved: set[int] = set()

    @property
    def has_seen_backward(self) -> bool:
        """Whether backward has begun."""
        return bool(self.unpacks)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op and write it down; say what is there where there is no room for it."""
        if self.has_failed:
            return func(*args, **(kwargs or {}))
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if self.witness is not None and not self._internal:
                self.witness(func, args, out)
            return out
        except torch.OutOfMemoryError:
            if self.out_of_memory is None:
                raise
            error = self.out_of_memory(self, str(func))
            self.has_failed = True
        # Past the handler: the error held the frames, and those held the tensors.
        raise error

    def around(self, pack: Pack, unpack: Unpacker) -> tuple[Pack, Unpacker]:
        """The engine's hooks for what autograd saves, with a note of every save and request."""

        def noted_pack(tensor: torch.Tensor) -> Any:
            with self.aside():
                packed = pack(tensor)
            return self._note_save(tensor, packed) if has_storage(tensor) else packed

        def noted_unpack(packed: Any) -> torch.Tensor:
            if not isinstance(packed, Saved):
                with self.aside():
                    return unpack(packed)
            self.unpacks.append(Unpack(packed.index, len(self.ops)))
            with self.aside():
                tensor = unpack(packed.tensor)
            if has_storage(tensor) and self.book.find(tensor) is None:
                self.book.alias(tensor, self.saves[packed.index].value.storage)
            return tensor

        return noted_pack, noted_unpack

    def _note_save(self, tensor: torch.Tensor, packed: Any) -> Saved:
        number = self.book.find(tensor)
        if number is None:
            number = self._add_storage(tensor, birth=-1)
        self._passed.add(len(self.saves))
        self.saves.append(Save(self.book.value(number), self.calls.innermost, len(self.ops), -1))
        return Saved(self, len(self.saves) - 1, packed)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Note a tensor that autograd saves outside of the blocks."""
        # The hooks stay set between forward and backward; a checkpoint's second run is no save.
        if not self.has_failed and self._phase() is not Phase.BACKWARD:
            return super().pack(tensor)
        # A node that saves its own result as it is would hold itself.
        with self.aside():
            return tensor.detach()

    def _phase(self) -> Phase:
        phase = super()._phase()
        # Nobody says when an optimizer begins that is not known, or that runs the step inside its
        # own; it does not ask for gradients.
        is_past = self.has_seen_backward and not (self._has_optimizer and torch.is_grad_enabled())
        return Phase.OPTIMIZER if is_past and phase is Phase.FORWARD else phase

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor that the engine holds, until it lets go of it."""
        number = self.book.find(tensor) if has_storage(tensor) else None
        if number is None or self.births[number] < 0 or number in self.holds.natural_deaths:
            return
        self.holds.add(number, tensor)
        key = id(tensor)
        self._engine_holds[key] = weakref.ref(tensor, lambda _: self._let_go(key, number))

    def _let_go(self, key: int, number: int) -> None:
        self._engine_holds.pop(key, None)
        self.holds.drop(number, self._started - 1)

    def released(self, index: int) -> None:
        """Note that autograd let a saved tensor go."""
        self._last_release[self.saves[index].value.storage] = self._started - 1
        if index not in self._passed:
            super().released(index)
            return
        self.saves[index] = replace(self.saves[index], release=len(self.ops))

    def _died(self, number: int) -> None:
        super()._died(number)
        self.holds.died(number, self.deaths[number])

    def graph(self) -> Graph:
        """The recording as a frozen graph of the untouched step."""
        # Of a loss, say, that somebody holds and nobody derives.
        self._still_saved = {save.value.storage for save in self.saves if save.release < 0}
        return super().graph()

    def _storage(self, number: int, saved: set[int]) -> Storage:
        if number in self._still_saved:
            self.deaths.pop(number, None)
        elif (natural_death := self.holds.natural_deaths.get(number)) is not None:
            self.deaths[number] = max(natural_death, self._last_release.get(number, -1))
        return super()._storage(number, saved)


def with_settled_state(graph: Graph, state: frozenset[int]) -> Graph:
    """The graph as it is from the second step on, when the optimizer's state is there already.

    `state` are the storages that the optimizer made in this step and keeps.
    """
    end = len(graph.ops)
    storages = tuple(
        replace(
            storage,
            category=Category.OPTIMIZER_STATE,
            birth=-1,
            death=end,
            natural_death=end,
        )
        if number in state
        else storage
        for number, storage in enumerate(graph.storages)
    )
    ops = tuple(_without_births(op, state, graph) for op in graph.ops)
    return replace(graph, storages=storages, ops=ops)


def _without_births(op: Op, state: frozenset[int], graph: Graph) -> Op:
    made = [v for v in op.writes if v.storage in state and v.version == 0]
    if not made:
        return op
    spared = sum(graph.storages[value.storage].nbytes for value in made)
    left: tuple[Value, ...] = tuple(value for value in op.writes if value not in made)
    return replace(op, writes=left, rise_bytes=max(0, op.rise_bytes - spared))
