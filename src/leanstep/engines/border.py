"""The border between two block calls: an output that the next call needs and nobody holds.

The call that made it can rebuild it; the next call's autograd nodes hold a `Border` in its place.
The first thing that backward asks of the next call brings the border back, at once and whole, so
that what is predicted is what happens. It stays while something in the next call needs it.

An output counts as a border from the end of the call that made it until its storage dies or is
written. What becomes of it in between is the user's: code that reads it sees an ordinary tensor,
and a call that is not planned to take borders saves it as ever.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from leanstep.engines.ready import AnySource
from leanstep.engines.recording import Ref, look_at
from leanstep.recorder.values import has_storage
from leanstep.step.training import autocast_is_on, no_autocast
from leanstep.torch_private.tensors import storage_address, version

if TYPE_CHECKING:
    from leanstep.engines.context import Context


class Border:
    """A dropped output, rebuilt by the call that made it when it is first needed."""

    __slots__ = ("__weakref__", "_context", "_ref", "_seen", "_tensor")

    def __init__(self, context: "Context", ref: Ref, seen: torch.Tensor | None = None) -> None:
        self._context: Context | None = context
        self._ref, self._seen = ref, seen
        self._tensor: torch.Tensor | None = None

    @property
    def number(self) -> int:
        """The storage's number in the call that made it."""
        return self._ref.value.storage

    def tensor(self) -> torch.Tensor:
        """The output as it was; other looks at it share its storage."""
        if self._tensor is None:
            assert self._context is not None
            if autocast_is_on():
                with no_autocast():
                    self._tensor = self._context.rebuild(self._ref, first_time=True)
            else:
                self._tensor = self._context.rebuild(self._ref, first_time=True)
            self._context.released(self._ref.value)
            if self._context.observer is not None:
                name = self._context.block_name
                self._context.observer.compare(name, "its output", self._seen, self._tensor)
            self._context = None
        return self._tensor

    def __del__(self) -> None:
        if self._context is not None:
            self._context.answered(self._ref.value)
            self._context.released(self._ref.value)


class Borders:
    """The dropped outputs that are alive, by the address of their storage."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, Border]] = {}

    def put(self, tensor: torch.Tensor, border: Border) -> None:
        """Note that an output can be rebuilt as it is now; its storage's death ends that."""
        address = storage_address(tensor)
        reference = weakref.ref(tensor.untyped_storage(), self._death_of(address))
        self._entries[address] = reference, version(tensor), border

    def find(self, tensor: torch.Tensor) -> Border | None:
        """The border that a tensor looks at, unless it was written since."""
        entry = self._entries.get(storage_address(tensor)) if self._entries else None
        return entry[2] if entry is not None and entry[1] == version(tensor) else None

    def _death_of(self, address: int) -> Callable[[object], None]:
        entries = self._entries

        def died(reference: object) -> None:
            if address in entries and entries[address][0] is reference:
                del entries[address]

        return died


class Gate:
    """Where a call's dropped inputs come in; nothing that the call saved is answered before."""

    __slots__ = ("_borders", "_waiting", "written")

    def __init__(self, borders: Borders, arguments: Iterable[Any]) -> None:
        self._borders = borders
        self._waiting: list[Border] = []
        self.written: set[int] = set()
        for leaf in arguments:
            if isinstance(leaf, torch.Tensor) and has_storage(leaf):
                self.find(leaf)

    def find(self, tensor: torch.Tensor) -> Border | None:
        """The border that a tensor looks at, if it is one; it will come with the others."""
        border = self._borders.find(tensor)
        if self.written and storage_address(tensor) in self.written:
            return None
        if border is not None and border not in self._waiting:
            self._waiting.append(border)
        return border

    def write(self, tensor: torch.Tensor) -> None:
        """Note that the call writes a tensor, be it past autograd: it is no border from now on."""
        if self._borders.find(tensor) is not None:
            self.written.add(storage_address(tensor))

    def open(self) -> None:
        """Bring every border back; whoever needs one holds it from here on."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        # In the order they were made, whatever the order of the arguments: as simulated.
        for border in sorted(waiting, key=lambda border: border.number):
            border.tensor()


class BorderSource:
    """A look at a border: stands where a kept tensor would."""

    __slots__ = ("_border", "_look")

    def __init__(self, border: Border, tensor: torch.Tensor) -> None:
        self._border, self._look = border, look_at(tensor)

    def unchanged(self, block_name: str) -> torch.Tensor:
        """The tensor, brought back; it is nobody else's, so nobody can have written it."""
        return self._look.anew(self._border.tensor())


class Guarded:
    """What autograd holds for a kept tensor, or for a border, of a call that takes borders."""

    __slots__ = ("_gate", "_source")

    def __init__(self, gate: Gate, source: AnySource) -> None:
        self._gate, self._source = gate, source

    def tensor(self) -> torch.Tensor:
        """The tensor, once the call's borders are there."""
        self._gate.open()
        return self._source.unchanged("a block")
