"""Run a block call while recording it: right for any code, at some microseconds an op.

Every decision is taken when autograd saves a tensor, and only for a value that is known at that
moment to be rebuildable. If an op later overwrites something such a value starts from, a copy is
taken first.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch

from leanstep.eager import seldom_compiled
from leanstep.engines.context import Context
from leanstep.engines.ready import ReadyOps, unpack
from leanstep.engines.recording import GENERATOR, CallRecorder, RecordedOp, Ref
from leanstep.engines.scope import Scope
from leanstep.ir import Value
from leanstep.rebuild.program import Program, build_program
from leanstep.recorder.values import has_storage
from leanstep.torch_private.tensors import tree_leaves


class LiveCall:
    """One call of a block, recorded as it runs.

    What replays start from is held as it is where it `is_safe`, else as a copy.
    """

    def __init__(
        self,
        context: Context,
        drop: Collection[str],
        scope: Scope,
        recipes: Collection[str] = (),
        is_safe: Callable[[torch.Tensor], bool] = lambda tensor: True,
    ) -> None:
        self.context, self.drop, self._is_safe = context, drop, is_safe
        self.saves: list[tuple[Ref, bool]] = []
        self.program: Program | None = None
        state = torch.get_rng_state()
        self.random_state: torch.Tensor | None = state
        self.recorder = CallRecorder(self._before_write, state, scope, recipes)
        self._kept: dict[Value, torch.Tensor] = {}
        self._copies: dict[Value, torch.Tensor] = {}
        self._wanted: dict[Value, int] = {}
        self._relied_on: set[Value] = set()
        self._proved: set[Value] = set()
        self._pinned: set[Value] = set()
        self.borders: list[tuple[int, Ref]] = []
        self.is_asked_early = self.writes_parked = False
        context.early = self._rebuild_early

    def run(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        then: Callable[["LiveCall"], None] = lambda call: None,
    ) -> Any:
        """Call the block and leave the context ready for backward; `then` may look at it all."""
        try:
            with self._hooks(), self.recorder:
                out = forward(*args, **kwargs)
            leaves = [] if self.context.borders is None else tree_leaves(out)
            self._note_borders(leaves)
            self._finish()
            for leaf, ref in self.borders:
                self.context.give(leaves[leaf], ref)
            then(self)
            return out
        finally:
            self._close()

    def _hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, seldom_compiled(unpack))

    @property
    def writes_border(self) -> bool:
        """Whether the call wrote an input that was dropped."""
        return self.context.gate is not None and bool(self.context.gate.written)

    @property
    def takes_copies(self) -> bool:
        """Whether something a dropped value starts from was overwritten during the call."""
        return bool(self._copies)

    def _rebuild_early(self, ref: Ref) -> torch.Tensor:
        """Replay a dropped value while the call still runs, from what it has recorded so far."""
        self.is_asked_early = True
        paused, self.recorder.paused = self.recorder.paused, True
        try:
            reruns = [op.rerun for op in self.recorder.ops.values()]
            program = build_program(reruns, {ref.value: 1}, self)
            context = Context(self.context.block_name, self.context.on_backward)
            sources = {
                value: context.source(self.source(value))
                for value in program.all_sources
                if value.storage != GENERATOR
            }
            context.fill(program, ReadyOps(self.ops_of(program)), sources, self.random_state)
            return context.rebuild(ref, first_time=True)
        finally:
            self.recorder.paused = paused

    def _close(self) -> None:
        """Let go of every tensor: autograd holds the hooks, and they hold this call."""
        self.context.early = None
        if self.context.spaces is not None:
            self.context.spaces.close()
        self.recorder.close()
        self._kept.clear()
        self._copies.clear()
        self.random_state = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not has_storage(tensor):
            return tensor
        ref = self.recorder.ref(tensor)
        storage = ref.value.storage
        wants_drop = self.recorder.keys.get(storage) in self.drop
        dropped = wants_drop and ref.value not in self._pinned and self._prove(ref.value)
        self.saves.append((ref, dropped))
        if dropped:
            self._wanted[ref.value] = self._wanted.get(ref.value, 0) + 1
            return self.context.handle(tensor, ref)
        kept = self.recorder.detached(tensor)
        if not self.recorder.is_outside(storage):
            self._kept[ref.value] = kept
            self._park(kept, storage)
        return self.context.packed(kept)

    def _park(self, kept: torch.Tensor, storage: int) -> None:
        spaces, key = self.context.spaces, self.recorder.keys.get(storage)
        if spaces is not None and key is not None and spaces.names(key):
            spaces.park(kept, key)

    def _prove(self, value: Value) -> bool:
        """See whether a value can be rebuilt, and remember what that relies on."""
        if value in self.recorder.unwritten:
            return False
        seen: set[Value] = set()
        sources: set[Value] = set()
        pending = [value]
        while pending:
            wanted = pending.pop()
            if wanted in seen or wanted in self._proved:
                continue
            seen.add(wanted)
            if wanted in self and wanted != value:
                sources.add(wanted)
            elif (maker := self.recorder.makers.get(wanted)) is not None:
                pending.extend(maker.reads)
            else:
                return False
        self._proved |= seen
        self._relied_on |= sources
        return True

    def __contains__(self, value: object) -> bool:
        """Whether a value is kept as it is."""
        assert isinstance(value, Value)
        if value.storage == GENERATOR:
            return value.version == 0
        if value in self._copies:
            return True
        is_held = value in self._kept or value in self.recorder.outside
        return is_held and self.recorder.book.versions[value.storage] == value.version

    def _before_write(self, value: Value, tensor: torch.Tensor) -> None:
        """Copy what an op is about to overwrite, if a dropped value starts from it."""
        if self.context.gate is not None:
            self.context.gate.write(tensor)
        if self.context.spaces is not None and (parked := self.context.spaces.find(tensor)):
            # Autograd wants it as it will be, or raises: either way it is not what was saved.
            parked.stays = True
            self.writes_parked = True
        if value in self._wanted:
            self._pin(value, tensor)
        if value in self._relied_on and value not in self._copies and not self._leave(value):
            self.recorder.paused = True
            held = self._kept.get(value, self.recorder.outside.get(value, tensor))
            self._copies[value] = storage_copy(held)
            self.recorder.paused = False

    def _leave(self, value: Value) -> bool:
        """Rebuild a kept value too, instead of copying what is about to be overwritten."""
        self._proved.discard(value)
        return self._prove(value)

    def _pin(self, value: Value, tensor: torch.Tensor) -> None:
        """Keep after all what was saved as dropped: autograd wants it as it will be.

        Some ops write a tensor that autograd saved just before, such as the noise of RReLU; and
        `tensor.data` is written past autograd. Any other write is an error when backward asks.
        """
        del self._wanted[value]
        self._pinned.add(value)
        self.context.pin(value, self.recorder.detached(tensor))
        self.saves = [(ref, dropped and ref.value != value) for ref, dropped in self.saves]

    def _note_borders(self, leaves: list[Any]) -> None:
        """Find the outputs that are dropped: each is asked for once more, by the next call."""
        given: set[int] = set()
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or not has_storage(leaf):
                continue
            number = self.recorder.book.find(leaf)
            if number is None or number in given or self.recorder.keys.get(number) not in self.drop:
                continue
            ref = self.recorder.ref(leaf)
            if ref.value not in self._pinned and self._prove(ref.value):
                given.add(number)
                self.borders.append((place, ref))
                self._wanted[ref.value] = self._wanted.get(ref.value, 0) + 1

    def _finish(self) -> None:
        if not self._wanted:
            return
        reruns = [op.rerun for op in self.recorder.ops.values()]
        recipes = [op.rerun for op in self.recorder.cheap_ops.values()]
        self.program = build_program(reruns, self._wanted, self, recipes)
        sources = {
            value: self.context.source(self._safe(value))
            for value in self.program.all_sources
            if value.storage != GENERATOR
        }
        ops = ReadyOps(self.ops_of(self.program))
        draws = Value(GENERATOR, 0) in self.program.all_sources
        self.context.fill(self.program, ops, sources, self.random_state if draws else None)

    def ops_of(self, program: Program) -> dict[int, RecordedOp]:
        """What a program runs: an op, or its cheap replay."""
        ops, cheap = self.recorder.ops, self.recorder.cheap_ops
        return {
            index: cheap[index] if rerun.is_recipe else ops[index]
            for index, rerun in program.reruns.items()
        }

    def _safe(self, value: Value) -> torch.Tensor:
        held = self.source(value)
        if value in self._copies or not self.recorder.is_outside(value.storage):
            return held
        is_safe = self._is_safe(held) and not self.recorder.is_statistic(held)
        return held if is_safe else storage_copy(held)

    def source(self, value: Value) -> torch.Tensor:
        """The tensor that holds a value the program starts from."""
        for held in (self._copies, self._kept, self.recorder.outside):
            if value in held:
                return held[value]
        raise AssertionError(f"{value} is a source but is not held")


def storage_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of bytes that holds what a tensor's storage holds now."""
    copy = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return copy.set_(tensor.untyped_storage().clone())
