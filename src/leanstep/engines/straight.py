"""Replays without Python between their ops.

The first replay of a request runs op by op, and what the ops make is looked at. When it comes
again, ops that follow each other become one program for torch's interpreter, in which an op takes a
fraction of the time that Python needs to call it. What the interpreter has no words for is run by
Python as before. Draws on a CUDA device are part of a program where each begins where the one
before has ended, so that the generator is moved back once; the CPU's generator has a state that
takes memory, which shall not last longer than its op.

Memory is the same to the byte. Inside a program a tensor goes after its last reader; its arguments
stay until it ends, so it ends with the op after which one of them goes. And it begins with the op
that first reads what must be brought back, from the host or by another block: not earlier.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from leanstep.engines.randomness import CudaDraw, lent_offset
from leanstep.engines.ready import Held, ReadyOp, ReadyOps, Source
from leanstep.engines.recording import RecordedOp, Ref, look_at
from leanstep.engines.settings import Switch
from leanstep.ir import Value
from leanstep.rebuild.program import Run
from leanstep.recorder.facts import HIDDEN_WRITES
from leanstep.torch_private.interpreter import (
    GraphWriter,
    Node,
    Program,
    UnwritableError,
    is_writable_operator,
)

# Schedules that are remembered: backward may run through a graph in ever new ways.
_REMEMBERED = 1000

# Fewer ops than this are not worth a program.
_LEAST_OPS = 3


class StraightOps(ReadyOps):
    """The ops of a template, and the programs they were made into."""

    def __init__(self, ops: Mapping[int, RecordedOp]) -> None:
        super().__init__(ops)
        self._recorded = ops
        # By the identity of a schedule: the same request gets the same one in every step.
        self._known: dict[int, _Schedule] = {}

    def replay(self, runs: Sequence[Run], held: Held) -> None:
        """Run ops again in order, and let go of what is done with."""
        known = self._known.get(id(runs))
        if known is None:
            seen = self._first_replay(runs, held)
            if len(self._known) < _REMEMBERED:
                self._known[id(runs)] = _Schedule(runs, seen)
            return
        with Switch() as switch:
            for piece in known.pieces:
                switch.to(piece.settings)
                piece.run(held)

    def _first_replay(self, runs: Sequence[Run], held: Held) -> "list[_Seen]":
        seen = []
        brought: set[Value] = set()
        with Switch() as switch:
            for run in runs:
                ready, op = self.ops[run.op.index], self._recorded[run.op.index]
                given = {v: held.sources[v] for v in run.op.reads if v in held.sources}
                absent = {v for v, source in given.items() if type(source) is not Source}
                switch.to(ready.settings)
                made = dict(_made(op, ready.run(held), held))
                drawn = None if ready.draw is None else _drawn(ready.draw, held)
                brings = not absent <= brought
                brought |= absent
                seen.append(_Seen(op, ready, frozenset(given), made, run.frees, drawn, brings))
                for storage in run.frees:
                    held.buffers.pop(storage, None)
        return seen


@dataclass(frozen=True, slots=True)
class _Seen:
    """An op that was seen running.

    `given` are the values it reads that are kept, not rebuilt. `made` has the new storages, each
    with its place among the outputs and its look. `drawn` is where the generator of a CUDA device
    stood afterwards. `brings` says that the op is the first to read something that must be brought
    back.
    """

    op: RecordedOp
    ready: ReadyOp
    given: frozenset[Value]
    made: Mapping[int, tuple[int, Ref]]
    frees: tuple[int, ...]
    drawn: CudaDraw | None
    brings: bool

    def follows(self, before: "_Seen") -> bool:
        """Whether an op that draws begins to draw where one before has ended."""
        return self.ready.draw == before.drawn

    def rebuilt(self) -> Iterator[Ref]:
        """The looks at rebuilt tensors among its arguments."""
        for argument in (*self.op.args, *self.op.kwargs.values()):
            items = argument if isinstance(argument, (list, tuple)) else (argument,)
            refs = (item for item in items if isinstance(item, Ref))
            yield from (ref for ref in refs if ref.value not in self.given)


class _Schedule:
    """A schedule that was seen running; `runs` is held, so that its identity stays its own."""

    def __init__(self, runs: Sequence[Run], seen: Sequence[_Seen]) -> None:
        self.runs, self._seen = runs, seen

    @cached_property
    def pieces(self) -> "list[_Piece]":
        """Its ops as programs: written when it comes again, which not all do."""
        return list(_pieces(self._seen))


def _drawn(draw: CudaDraw, held: Held) -> CudaDraw:
    """Where a draw has ended, counted as its start is."""
    moved = lent_offset(draw.device_index) - draw.after(held.cuda_base).offset
    return replace(draw, offset=draw.offset + moved)


def _made(op: RecordedOp, out: Any, held: Held) -> Iterator[tuple[int, tuple[int, Ref]]]:
    outputs = [out] if isinstance(out, torch.Tensor) else list(out or ())
    for storage, _ in op.births:
        tensor = held.buffers[storage]
        place = next((p for p, output in enumerate(outputs) if output is tensor), -1)
        yield storage, (place, look_at(tensor))


class _ByPython:
    """One op that Python calls."""

    __slots__ = ("_frees", "_op", "settings")

    def __init__(self, seen: _Seen) -> None:
        self._op, self._frees, self.settings = seen.ready, seen.frees, seen.ready.settings

    def run(self, held: Held) -> None:
        """Run it, and let go of what is done with."""
        self._op.run(held)
        for storage in self._frees:
            held.buffers.pop(storage, None)


class _Straight:
    """Ops that follow each other, as one program.

    The interpreter makes one kind of error of all. Programs write nothing that they have not made,
    so after an error Python calls the ops: they raise what they raise in eager, if they do.
    """

    __slots__ = ("_draws", "_frees", "_inputs", "_one_by_one", "_outputs", "_program", "settings")

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Ref],
        outputs: Sequence[int],
        stretch: Sequence[_Seen],
    ) -> None:
        self._program, self._outputs = program, outputs
        self._inputs = [(ref, ref.value) for ref in inputs]
        self._frees = tuple(storage for one in stretch for storage in one.frees)
        self._one_by_one = [_ByPython(one) for one in stretch]
        self._draws = next((one.ready.draws for one in stretch if one.ready.is_random), None)
        self.settings = stretch[0].ready.settings

    def run(self, held: Held) -> None:
        """Run them, and let go of what is done with."""
        made = self._made(self._arguments(held), held)
        if made is None:
            for op in self._one_by_one:
                op.run(held)
            return
        for storage in self._frees:
            held.buffers.pop(storage, None)
        for storage, tensor in zip(self._outputs, made, strict=True):
            held.buffers[storage] = tensor

    def _arguments(self, held: Held) -> list[torch.Tensor]:
        sources, buffers, name = held.sources, held.buffers, held.block_name
        arguments = []
        for ref, value in self._inputs:
            # As `held.read`, written out.
            source = sources.get(value)
            base = buffers[value.storage] if source is None else source.unchanged(name)
            arguments.append(ref.of(base))
        return arguments

    def _made(self, arguments: list[torch.Tensor], held: Held) -> tuple[torch.Tensor, ...] | None:
        """What the program makes; None where it has failed."""
        try:
            if self._draws is None:
                return self._program(*arguments)
            with self._draws(held):
                return self._program(*arguments)
        except RuntimeError:
            return None


_Piece = _ByPython | _Straight


def _pieces(seen: Sequence[_Seen]) -> Iterator[_Piece]:
    """The ops of a schedule in as few pieces as possible."""
    for stretch in _stretches(seen):
        program = None if len(stretch) < _LEAST_OPS else _written(stretch)
        if program is None:
            yield from map(_ByPython, stretch)
        else:
            yield program


def _stretches(seen: Sequence[_Seen]) -> Iterator[list[_Seen]]:
    """Ops that may run in one program; each that may not, by itself."""
    stretch: list[_Seen] = []
    born: dict[int, Ref] = {}
    for one in seen:
        if stretch and (_begins(one, stretch) or not _is_writable(one, born)):
            yield stretch
            stretch, born = [], {}
        is_writable = _is_writable(one, born)
        stretch.append(one)
        born.update((storage, look) for storage, (_, look) in one.made.items())
        are_its_own = all(born.pop(storage, None) for storage in one.frees)
        if not is_writable or not are_its_own:
            yield stretch
            stretch, born = [], {}
    if stretch:
        yield stretch


def _begins(one: _Seen, stretch: Sequence[_Seen]) -> bool:
    """Whether an op needs another state of things than the ops before it leave."""
    drew = next((before for before in reversed(stretch) if before.ready.is_random), None)
    jumps = one.ready.is_random and drew is not None and not one.follows(drew)
    return one.brings or jumps or stretch[0].ready.settings != one.ready.settings


def _is_writable(one: _Seen, born: Mapping[int, Ref]) -> bool:
    """Whether the interpreter can run an op behind those that made some storages."""
    op = one.op
    draws_on_cpu = one.ready.generator is not None
    if draws_on_cpu or str(op.func) in HIDDEN_WRITES or not _has_words_for(op):
        return False
    # What it writes must be made in the same program: an argument would have to come out again.
    if any(value.version and value.storage not in born for value in op.rerun.writes):
        return False
    looks = ((ref, born[ref.value.storage]) for ref in one.rebuilt() if ref.value.storage in born)
    is_plain = all(ref.dtype is base.dtype and not _is_lazy(ref, base) for ref, base in looks)
    return is_plain and all(place >= 0 for place, _ in one.made.values())


def _is_lazy(*looks: Ref) -> bool:
    return any(look.is_conj or look.is_neg for look in looks)


def _has_words_for(op: RecordedOp) -> bool:
    if not is_writable_operator(op.func):
        return False
    try:
        writer = GraphWriter()
        writer.call(op.func, *_with_nodes(op, lambda _: writer.input()))
    except UnwritableError:
        return False
    return True


def _with_nodes(op: RecordedOp, node_of: Callable[[Ref], Node]) -> tuple[list[Any], dict[str, Any]]:
    """An op's arguments with nodes in the place of references."""

    def put(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [put(item) for item in argument]
        return node_of(argument) if isinstance(argument, Ref) else argument

    return [put(argument) for argument in op.args], {k: put(v) for k, v in op.kwargs.items()}


def _written(stretch: Sequence[_Seen]) -> _Straight | None:
    """A stretch of ops as one program, if torch goes along."""
    try:
        return _write(GraphWriter(), stretch)
    except UnwritableError:
        return None


def _write(writer: GraphWriter, stretch: Sequence[_Seen]) -> _Straight:
    inputs: dict[Ref, Node] = {}
    # What is there of what the ops have made: a storage's tensor, and how it looks at the storage.
    born: dict[int, tuple[Node, Ref]] = {}

    def node_of(ref: Ref, given: frozenset[Value]) -> Node:
        if ref.value in given or ref.value.storage not in born:
            if ref not in inputs:
                inputs[ref] = writer.input()
            return inputs[ref]
        node, look = born[ref.value.storage]
        if (ref.size, ref.stride, ref.offset) == (look.size, look.stride, look.offset):
            return node
        return writer.view(node, ref.size, ref.stride, ref.offset)

    for one in stretch:
        arguments = _with_nodes(one.op, partial(node_of, given=one.given))
        outputs = writer.call(one.op.func, *arguments)
        born.update((s, (outputs[place], look)) for s, (place, look) in one.made.items())
        for storage in one.frees:
            born.pop(storage, None)
    program = writer.finish([node for node, _ in born.values()])
    return _Straight(program, tuple(inputs), tuple(born), stretch)
