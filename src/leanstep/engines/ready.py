"""Recorded ops made ready to run again: what each reads, and how, is settled once for all calls.

A replay is then a loop over prepared argument lists in which a few places are filled in.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from leanstep.engines.randomness import CudaDraw, cpu_draws_from, cuda_draws_from
from leanstep.engines.recording import GENERATOR, RecordedOp, Ref
from leanstep.engines.settings import Switch
from leanstep.ir import Value
from leanstep.rebuild.program import Run
from leanstep.recorder.facts import tensors_in
from leanstep.torch_private.tensors import version


class AnySource(Protocol):
    """What a replay may start from."""

    def unchanged(self, block_name: str) -> torch.Tensor:
        """The tensor, if nobody has written it since it was kept."""
        ...


class Source:
    """A kept tensor, and how often it had been written when it was kept."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, version(tensor)

    def as_it_is(self) -> "Source":
        """The same tensor, kept as it is now."""
        return Source(self._tensor)

    def tensor(self) -> torch.Tensor:
        """What autograd gets that asks for it."""
        return self.unchanged("a block")

    def unchanged(self, block_name: str) -> torch.Tensor:
        """The tensor, if nobody has written it since; hooks switch autograd's own check off."""
        if version(self._tensor) != self._version:
            raise RuntimeError(
                f"leanstep: a tensor that {block_name} needs for backward was changed in place "
                "after its forward, so gradients cannot be computed. Change it out of place, or "
                "train without leanstep to see whether autograd allows it there."
            )
        return self._tensor


def unpack(packed: Any) -> torch.Tensor:
    """Answer autograd: a kept tensor is itself, a handle is rebuilt."""
    tensor: torch.Tensor = packed if isinstance(packed, torch.Tensor) else packed.tensor()
    return tensor


class Held:
    """What the replays of one call work on: its sources, and what is rebuilt at the moment.

    With a `cuda_base` the ops' draws are counted from there.
    """

    __slots__ = ("block_name", "buffers", "cuda_base", "random_state", "sources")

    def __init__(
        self,
        block_name: str,
        sources: dict[Value, AnySource],
        random_state: torch.Tensor | None,
        cuda_base: CudaDraw | None,
    ) -> None:
        self.block_name, self.sources = block_name, sources
        self.random_state, self.cuda_base = random_state, cuda_base
        self.buffers: dict[int, torch.Tensor] = {}

    def read(self, value: Value) -> torch.Tensor:
        """A tensor that holds a value."""
        source = self.sources.get(value)
        return self.buffers[value.storage] if source is None else source.unchanged(self.block_name)

    def state_for(self, value: Value) -> torch.Tensor:
        """The generator's state before a draw; the first one starts from a copy of the call's."""
        assert self.random_state is not None
        if value.version == 0:
            self.buffers[GENERATOR] = self.random_state.clone()
        return self.buffers[GENERATOR]

    def release(self, source: Value) -> None:
        """Let go of a source that nothing needs any more."""
        self.sources.pop(source, None)
        if source.storage == GENERATOR:
            self.random_state = None


class ReadyOp:
    """One op, for every call that follows the recording."""

    __slots__ = (
        *("_args", "_births", "_func", "_kwargs", "_only_birth", "_places"),
        *("draw", "generator", "is_random", "settings"),
    )

    def __init__(self, op: RecordedOp) -> None:
        self._func, self._args, self._kwargs = op.func, op.args, op.kwargs
        self._births, self.draw, self.settings = op.births, op.draw, op.settings
        reads = op.rerun.reads
        draws_on_cpu = op.draw is None and bool(reads) and reads[-1].storage == GENERATOR
        self.generator = reads[-1] if draws_on_cpu else None
        self.is_random = draws_on_cpu or op.draw is not None
        # Where all that is filled in are arguments of their own, which they are is settled here.
        nested = (*(arg for arg in op.args if not isinstance(arg, Ref)), *op.kwargs.values())
        self._places: tuple[tuple[int, Ref, Value], ...] | None = None
        if not any(map(_holds_refs, nested)):
            self._places = tuple(
                (place, arg, arg.value) for place, arg in enumerate(op.args) if isinstance(arg, Ref)
            )
        self._only_birth = op.births[0][0] if [leaf for _, leaf in op.births] == [0] else None

    def run(self, held: Held) -> Any:
        """Run it on what a call holds, put there what it makes, and return all of that."""
        args, kwargs = self._filled(held)
        if self.is_random:
            with self.draws(held):
                out = self._func(*args, **kwargs)
        else:
            out = self._func(*args, **kwargs)
        if self._only_birth is not None and isinstance(out, torch.Tensor):
            held.buffers[self._only_birth] = out
        elif self._births:
            leaves = tuple(tensors_in(out))
            for storage, leaf in self._births:
                held.buffers[storage] = leaves[leaf]
        return out

    def draws(self, held: Held) -> AbstractContextManager[None]:
        """Let the generator stand where it stood before the op drew from it."""
        if self.draw is not None:
            return cuda_draws_from(self.draw.after(held.cuda_base))
        assert self.generator is not None
        return cpu_draws_from(held.state_for(self.generator))

    def _filled(self, held: Held) -> tuple[list[Any], Mapping[str, Any]]:
        if self._places is None:
            args = [_filled(argument, held) for argument in self._args]
            return args, {name: _filled(arg, held) for name, arg in self._kwargs.items()}
        args = list(self._args)
        sources, buffers = held.sources, held.buffers
        for place, ref, value in self._places:
            # As `held.read`, written out: most of a replay's Python is here.
            source = sources.get(value)
            base = buffers[value.storage] if source is None else source.unchanged(held.block_name)
            args[place] = ref.of(base)
        return args, self._kwargs


def _holds_refs(argument: Any) -> bool:
    """Whether tensors are to be filled in somewhere inside an argument."""
    if isinstance(argument, (list, tuple)):
        return any(map(_holds_refs, argument))
    return isinstance(argument, Ref)


def _filled(argument: Any, held: Held) -> Any:
    """An argument with tensors in the place of references, also in lists."""
    if isinstance(argument, Ref):
        return argument.of(held.read(argument.value))
    if isinstance(argument, (list, tuple)):
        return type(argument)([_filled(item, held) for item in argument])
    return argument


class ReadyOps:
    """The ops of a program, prepared."""

    def __init__(self, ops: Mapping[int, RecordedOp]) -> None:
        self.ops = {index: ReadyOp(op) for index, op in ops.items()}

    def replay(self, runs: Sequence[Run], held: Held) -> None:
        """Run ops again in order, each with the settings it had, and let go of what is done."""
        with Switch() as switch:
            for run in runs:
                op = self.ops[run.op.index]
                switch.to(op.settings)
                op.run(held)
                for storage in run.frees:
                    held.buffers.pop(storage, None)
