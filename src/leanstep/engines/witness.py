"""See what a call does to what was there before it, so that a second run finds the same world.

Seen below autograd: every tensor that is read and was not made in the call, every such tensor that
is written (be it through `data`, or by an op that does not say so), and every generator that is
handed to an op. Tensors are held without their history, be they leaves: written in place they may
get one that leads back to the very call.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.blockgraph import STATISTICS_ARE_OPTIONAL
from leanstep.recorder.facts import named_arguments, op_info, tensor_arguments, tensors_in
from leanstep.recorder.values import has_storage
from leanstep.torch_private import (
    TorchDispatchMode,
    detached,
    same_versions_after,
    storage_address,
    version,
)


@dataclass(frozen=True, slots=True)
class _Written:
    """A tensor that the call writes, and a copy of its memory from before."""

    tensor: torch.Tensor
    copy: torch.Tensor | None


class Witness(TorchDispatchMode):
    """Watch the first run of a call.

    The second may read `parameters` that the first has not: autocast had cast them before.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._parameters = {storage_address(p): (p, version(p)) for p in parameters}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._read: dict[int, tuple[torch.Tensor, int]] = {}
        self._written: dict[int, _Written] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op and note what it touches."""
        kwargs = kwargs or {}
        info = op_info(func)
        for tensor, is_written in tensor_arguments(info, args, kwargs):
            if not self.knows(tensor):
                self.note(tensor)
                self._read[storage_address(tensor)] = (detached(tensor), version(tensor))
            if is_written:
                # Statistics do not change what batch norm puts out in training.
                self._before_write(tensor, copies=info.name not in STATISTICS_ARE_OPTIONAL)
        if info.may_draw:
            generator = dict(named_arguments(info, args, kwargs)).get("generator")
            if generator is not None and id(generator) not in self._generators:
                self._generators[id(generator)] = (generator, generator.get_state())
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if has_storage(tensor) and not self.knows(tensor):
                self.note(tensor)
        return out

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the call has read or made a tensor's storage, which is still there."""
        reference = self._known.get(storage_address(tensor))
        return reference is not None and reference() is not None

    def expects(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, as it was when the call began."""
        parameter, old = self._parameters.get(storage_address(tensor), (tensor, -1))
        return version(parameter) == old

    def writes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the call has written one of these."""
        return any(has_storage(t) and storage_address(t) in self._written for t in tensors)

    def has_equal(self, tensor: torch.Tensor) -> bool:
        """Whether the call has read a tensor with these contents: made anew of the same data."""
        found = (noted for noted, _ in self._read.values() if noted.shape == tensor.shape)
        return any(
            noted.dtype is tensor.dtype
            and noted.device == tensor.device
            and torch.equal(_bytes(noted), _bytes(tensor))
            for noted in found
        )

    def changed(self) -> bool:
        """Whether something that the call has only read was written since."""
        return any(
            version(tensor) != old
            for address, (tensor, old) in self._read.items()
            if address not in self._written
        )

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Put back what the call wrote and drew from; after it, leave all as it is now."""
        now = [(one, _copy(one.tensor)) for one in self._written.values()]
        states = [(generator, generator.get_state()) for generator, _ in self._generators.values()]
        with ExitStack() as stack:
            stack.enter_context(same_versions_after([one.tensor for one in self._written.values()]))
            for one, copy in now:
                stack.callback(_fill, one.tensor, copy)
                if one.copy is not None:
                    _fill(one.tensor, one.copy)
            for generator, state in states:
                stack.callback(generator.set_state, state)
            for generator, state in self._generators.values():
                generator.set_state(state)
            yield

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage among what the call knows."""
        self._known[storage_address(tensor)] = weakref.ref(tensor.untyped_storage())

    def _before_write(self, tensor: torch.Tensor, *, copies: bool) -> None:
        address = storage_address(tensor)
        if address not in self._read:
            return
        known = self._written.get(address)
        if known is None or (copies and known.copy is None):
            self._written[address] = _Written(detached(tensor), _copy(tensor) if copies else None)


class Suspicion(TorchDispatchMode):
    """Watch the second run of a call: it may read nothing that the first has not read."""

    def __init__(self, first: Witness, block_name: str) -> None:
        super().__init__()
        self._first, self._block_name = first, block_name
        self._made = Witness()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op, if it starts from what is known."""
        kwargs = kwargs or {}
        for tensor, _ in tensor_arguments(op_info(func), args, kwargs):
            if not self._made.knows(tensor) and not self._is_known(tensor):
                raise RuntimeError(
                    f"leanstep: {self._block_name} is run again for backward and reads a tensor "
                    "that it did not read in forward: one that was replaced since, perhaps, by "
                    "another block. Nothing was computed wrongly; keep it, or use "
                    'engine="replay".'
                )
        out = func(*args, **kwargs)
        for tensor in tensors_in(out):
            if has_storage(tensor):
                self._made.note(tensor)
        return out

    def _is_known(self, tensor: torch.Tensor) -> bool:
        first = self._first
        return first.knows(tensor) or first.expects(tensor) or first.has_equal(tensor)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's memory: a tensor of its own, so autograd does not see it written."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return _memory(tensor).clone()


def _fill(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        _memory(tensor).copy_(copy)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)
