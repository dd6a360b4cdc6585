"""Kept activations that wait in host memory between forward and backward.

When a block call has ended, what it parked is copied to pinned memory on a stream of its own. When
forward has come to the call that the plan names, the main stream waits for the copy and
the device's storage is let go; when backward comes to the call that the plan names, a new one is
taken and the copy back begins; whoever asks for it makes the main stream wait for that. So memory
follows the plan whatever the link does.

Nothing here holds what autograd has let go of: the lot knows its storages by weak references.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from leanstep.engines.lanes import Lane, Parked, fetch, send
from leanstep.engines.observer import Observer
from leanstep.engines.ready import Source, unpack
from leanstep.engines.recording import look_at, without_history
from leanstep.ir import Offload, Plan
from leanstep.ir.decision import INPUT
from leanstep.ir.form import save_key
from leanstep.recorder.values import has_storage
from leanstep.torch_private.tensors import storage_address, tree_leaves
from leanstep.truth import allocated_bytes


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
        tensor = self._look.anew(self._parked.storage(block_name))
        if self._observer is not None:
            what = f"a tensor of {'×'.join(map(str, self._look.size))} that was on the host"
            self._observer.compare(block_name, what, self._seen, tensor)
        return tensor


class Spaces:
    """What one block call parks: by the keys of a decision, and by address while it runs.

    Where it `parks_input`, any save may look at what is parked.
    """

    __slots__ = ("_arguments", "_entries", "_lot", "_parked", "_place", "parks_input")

    def __init__(
        self, lot: "Lot", place: int, entries: dict[str, Offload], arguments: Sequence[Any]
    ) -> None:
        self._lot, self._place, self._entries = lot, place, entries
        self._parked: dict[int, Parked] = {}
        self.parks_input = INPUT in entries
        self._arguments = arguments if self.parks_input else ()
        if self._arguments:
            self._park_input()

    def _park_input(self) -> None:
        """Park the argument that the plan means: it is told by its size, if that tells it."""
        wanted = self._entries[INPUT].nbytes
        found = {
            storage_address(leaf): leaf
            for leaf in self._arguments
            if isinstance(leaf, torch.Tensor) and has_storage(leaf)
            if allocated_bytes(leaf, leaf.device) == wanted
        }
        if len(found) == 1:
            self.park(next(iter(found.values())), INPUT)

    def anew(self) -> "Spaces":
        """The same for the call run a second time."""
        return Spaces(self._lot, self._place, self._entries, self._arguments)

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
        self._arguments = ()


# What stands for a tensor until backward asks for it, and who makes it of the save of a number.
Kept = Source | ParkedSource
Keep = Callable[[torch.Tensor, int], Kept]


def kept(tensor: torch.Tensor, number: int) -> Kept:
    """Hold a tensor, and look for writes to it: hooks switch off autograd's own check."""
    return Source(without_history(tensor))


def kept_or_parked(spaces: Spaces) -> Keep:
    """The same for a compiled call of whose saves some wait on the host: a number is a key."""

    def keep(tensor: torch.Tensor, number: int) -> Kept:
        if spaces.names(key := save_key(number)):
            spaces.park(tensor, key)
        parked = spaces.find(tensor)
        return kept(tensor, number) if parked is None else ParkedSource(parked, tensor)

    return keep


def hooks_of(keep: Keep) -> AbstractContextManager[Any]:
    """Have what a compiled call saves kept so; saves are numbered as they come."""
    numbers = itertools.count()

    def pack(tensor: torch.Tensor) -> Any:
        number = next(numbers)
        return keep(tensor, number) if has_storage(tensor) else tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# What a call does something about, in the order it was parked; some may be gone by then.
_Waiting = dict[int, list[weakref.ref[Parked]]]
_MANY_WAITING = 64


class Lot:
    """Everything that a plan in force has parked, and when it leaves and comes back.

    Calls are numbered as the plan's decisions are.
    """

    def __init__(self, plan: Plan) -> None:
        entries = [(place, e) for place, d in enumerate(plan.decisions) for e in d.offload]
        self._order = {(place, e.key): number for number, (place, e) in enumerate(entries)}
        self._sent = _waiting(place for place, _ in entries)
        self._leaving = _waiting(place + entry.release for place, entry in entries)
        self._coming = _waiting(place + entry.fetch for place, entry in entries)
        self._lanes: dict[torch.device | torch.cuda.Stream, Lane] = {}

    def needs(self, place: int) -> bool:
        """Whether something leaves or comes back with a call."""
        return place in self._leaving or place in self._coming

    def park(self, tensor: torch.Tensor, place: int, entry: Offload) -> Parked:
        """Let a tensor's storage be copied to the host when its call has ended."""
        rank = (place, self._order[place, entry.key])
        parked = Parked(self._lane(tensor.device), tensor, entry.release, rank)
        known = weakref.ref(parked)
        _add(self._sent, place, known)
        _add(self._leaving, place + entry.release, known)
        _add(self._coming, place + entry.fetch, known)
        return parked

    def _lane(self, device: torch.device) -> Lane:
        """The copies of the stream that runs now: backward will run there too."""
        main = torch.cuda.current_stream(device) if device.type == "cuda" else None
        lane = self._lanes.get(main or device)
        if lane is None:
            lane = self._lanes[main or device] = Lane(device, main)
        return lane

    def call_ended(self, place: int, out: Any, on_backward: Callable[[], None]) -> None:
        """Send what the call parked, let go what leaves now, and see backward come to it."""
        if sent := _emptied(self._sent, place):
            send(sent)
        for parked in _emptied(self._leaving, place):
            parked.leave()
        if place not in self._coming:
            return

        def entered(_: torch.Tensor) -> None:
            on_backward()
            fetch(_emptied(self._coming, place))

        # Torch's own flattening takes longer than all the rest of this.
        for leaf in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(entered)


def _waiting(places: Iterable[int]) -> _Waiting:
    return {place: [] for place in places}


def _add(waiting: _Waiting, place: int, known: weakref.ref[Parked]) -> None:
    """Let one wait for a call; where the call never comes, those that are gone do not pile up."""
    entries = waiting[place]
    entries.append(known)
    count = len(entries)
    if count >= _MANY_WAITING and count & (count - 1) == 0:
        waiting[place] = [one for one in entries if one() is not None]


def _emptied(waiting: _Waiting, place: int) -> list[Parked]:
    """Everything that waits for a call and still lives; nothing waits for it then."""
    entries = waiting.get(place)
    if not entries:
        return []
    waiting[place] = []
    return [parked for known in entries if (parked := known()) is not None]
