"""Kept activations that wait in host memory between forward and backward.

A storage's bytes are copied to pinned memory on a stream of their own as soon as autograd has saved
them. When forward has come to the call that the plan names, the main stream waits for the copy and
the device's storage is let go; when backward comes to the call that the plan names, a new one is
taken and the copy back begins; whoever asks for it makes the main stream wait for that. So memory
follows the plan whatever the link does.

Nothing here holds what autograd has let go of: the lot knows its storages by weak references.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from leanstep.engines.observer import Observer
from leanstep.engines.recording import look_at, without_history
from leanstep.ir import Offload, Plan
from leanstep.torch_private import past_every_mode, storage_address, tree_leaves, version


class _Lane:
    """Copies between one device and the host, each way on a stream of its own.

    On the CPU there is no link: a copy is a copy, made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_async = device.type == "cuda"
        if self.is_async:
            self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._spare: dict[int, list[torch.Tensor]] = {}

    def out(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy bytes to the host; the event is when that is done."""
        spare = self._spare.get(source.numel())
        if spare:
            target = spare.pop()
        else:
            target = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=self.is_async)
        return target, self._copy(source, target, self._out if self.is_async else None)

    def back(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Copy bytes to the device; the event is when that is done."""
        target = torch.empty(source.numel(), dtype=torch.uint8, device=self.device)
        return target, self._copy(source, target, self._back if self.is_async else None)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take pinned memory that is no longer read: the next step wants as much."""
        self._spare.setdefault(buffer.numel(), []).append(buffer)

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> torch.cuda.Event | None:
        if stream is None:
            target.copy_(source)
            return None
        # Also orders the streams where a buffer is used again: its last reader was waited for.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(stream)
        return done


class Parked:
    """One storage: on the device, on the host, or both."""

    __slots__ = (
        "__weakref__",
        "_bytes",
        "_coming",
        "_host",
        "_lane",
        "_leaving",
        "_tensor",
        "_version",
    )

    def __init__(self, lane: _Lane, tensor: torch.Tensor) -> None:
        self._lane = lane
        # Shares the version counter of the saved tensor: a write to it is an error in backward.
        self._tensor: torch.Tensor | None = without_history(tensor)
        self._version = version(tensor)
        self._bytes: torch.Tensor | None = None
        self._coming: torch.cuda.Event | None = None
        with past_every_mode(), torch.no_grad():
            self._host, self._leaving = lane.out(_bytes_of(tensor))

    def stay(self) -> None:
        """Do not leave the device after all: somebody writes it."""
        self._wait_for_copy()
        self._version = -1

    def leave(self) -> None:
        """Let the device's storage go, once it is copied."""
        if self._tensor is None or version(self._tensor) != self._version:
            return
        self._wait_for_copy()
        self._tensor = None

    def come(self) -> None:
        """Begin the way back."""
        if self._tensor is None and self._bytes is None:
            with past_every_mode(), torch.no_grad():
                self._bytes, self._coming = self._lane.back(self._host)

    def storage(self, block_name: str) -> torch.Tensor:
        """A tensor on the device with the storage."""
        if self._tensor is not None:
            if self._version not in (-1, version(self._tensor)):
                raise RuntimeError(
                    f"leanstep: a tensor that {block_name} needs for backward was changed in place "
                    "after its forward, so gradients cannot be computed. Change it out of place."
                )
            return self._tensor
        self.come()
        self._wait_for_return()
        assert self._bytes is not None
        return self._bytes

    def _wait_for_copy(self) -> None:
        if self._leaving is not None:
            torch.cuda.current_stream(self._lane.device).wait_event(self._leaving)
            self._leaving = None

    def _wait_for_return(self) -> None:
        if self._coming is not None:
            torch.cuda.current_stream(self._lane.device).wait_event(self._coming)
            self._coming = None

    def __del__(self) -> None:
        # What a copy still reads or writes must not be handed out again before it is done.
        self._wait_for_copy()
        self._wait_for_return()
        self._lane.give_back(self._host)


class ParkedSource:
    """A look at a parked storage: stands where a kept tensor would."""

    __slots__ = ("_look", "_observer", "_parked", "_seen")

    def __init__(self, parked: Parked, tensor: torch.Tensor) -> None:
        self._parked, self._look = parked, look_at(tensor)
        self._observer: Observer | None = None
        self._seen: torch.Tensor | None = None

    def observe(self, observer: Observer, tensor: torch.Tensor) -> None:
        """Let a rehearsal compare how the tensor comes back."""
        self._observer, self._seen = observer, observer.see(tensor)

    def tensor(self) -> torch.Tensor:
        """The tensor, for autograd."""
        return self.unchanged("a block")

    def unchanged(self, block_name: str) -> torch.Tensor:
        """The tensor, brought back."""
        tensor = self._look.of(self._parked.storage(block_name))
        if self._observer is not None:
            what = f"a tensor of {'×'.join(map(str, self._look.size))} that was on the host"
            self._observer.compare(block_name, what, self._seen, tensor)
        return tensor


class Spaces:
    """What one block call parks: by the keys of a decision, and by address while it runs."""

    __slots__ = ("_entries", "_lot", "_parked", "_place")

    def __init__(self, lot: "Lot", place: int, entries: dict[str, Offload]) -> None:
        self._lot, self._place, self._entries = lot, place, entries
        self._parked: dict[int, Parked] = {}

    def anew(self) -> "Spaces":
        """The same for the call run a second time."""
        return Spaces(self._lot, self._place, self._entries)

    def names(self, key: str | None) -> bool:
        """Whether a key is of a storage that goes to the host."""
        return key in self._entries

    def park(self, tensor: torch.Tensor, key: str) -> None:
        """Send a tensor's storage on its way, unless another look at it has."""
        address = storage_address(tensor)
        if address not in self._parked:
            self._parked[address] = self._lot.park(tensor, self._place, self._entries[key])

    def find(self, tensor: torch.Tensor) -> Parked | None:
        """The parked storage that a tensor looks at."""
        return self._parked.get(storage_address(tensor)) if self._parked else None

    def close(self) -> None:
        """Forget the addresses: after the call they may be anybody's."""
        self._parked.clear()


class Lot:
    """Everything that a plan in force has parked, and when it leaves and comes back.

    Calls are numbered as the plan's decisions are.
    """

    def __init__(self, plan: Plan) -> None:
        entries = [(place, e) for place, d in enumerate(plan.decisions) for e in d.offload]
        self._leaving: dict[int, list[weakref.ref[Parked]]] = {
            place + entry.release: [] for place, entry in entries
        }
        self._coming: dict[int, list[weakref.ref[Parked]]] = {
            place + entry.fetch: [] for place, entry in entries
        }
        self._lanes: dict[torch.device, _Lane] = {}

    def needs(self, place: int) -> bool:
        """Whether something leaves or comes back with a call."""
        return place in self._leaving or place in self._coming

    def park(self, tensor: torch.Tensor, place: int, entry: Offload) -> Parked:
        """Begin to move a tensor's storage to the host."""
        lane = self._lanes.get(tensor.device)
        if lane is None:
            lane = self._lanes[tensor.device] = _Lane(tensor.device)
        parked = Parked(lane, tensor)
        self._leaving[place + entry.release].append(weakref.ref(parked))
        self._coming[place + entry.fetch].append(weakref.ref(parked))
        return parked

    def call_ended(self, place: int, out: Any, on_backward: Callable[[], None]) -> None:
        """Let go what leaves when this call has ended, and see backward come to it."""
        for parked in _emptied(self._leaving.get(place, [])):
            parked.leave()
        if place not in self._coming:
            return

        def entered(_: torch.Tensor) -> None:
            on_backward()
            for parked in _emptied(self._coming[place]):
                parked.come()

        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(entered)


def _emptied(entries: list[weakref.ref[Parked]]) -> Iterator[Parked]:
    """Everything in a list that still lives; the list is then empty."""
    while entries:
        parked = entries.pop(0)()
        if parked is not None:
            yield parked


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as bytes."""
    look = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return look.set_(tensor.untyped_storage())
