"""Storages on their way between a device and pinned host memory.

Whoever lets go of one that is still copied makes the main stream wait for that: what is handed out
again is never read or written by a copy.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from leanstep.torch_private.modes import past_every_mode
from leanstep.torch_private.tensors import detached, version

# When copies are done; on the CPU they are at once.
Done = torch.cuda.Event | None


class Lane:
    """Copies between one stream of a device, the main one here, and the host.

    Each way has a stream of its own. All memory of the device belongs to the main stream, and
    waiting is that stream's: whichever thread lets go of a storage, and wherever that thread works,
    nothing is handed out again while a copy reads or writes it. On the CPU there is no link: a copy
    is a copy, made at once.
    """

    def __init__(self, device: torch.device, main: torch.cuda.Stream | None) -> None:
        self.device, self._main = device, main
        self._out = self._back = None
        if main is not None:
            self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._nothing: dict[torch.dtype, torch.Tensor] = {}

    def out(
        self, sources: Sequence[torch.Tensor], groups: Sequence[int]
    ) -> list[tuple[torch.Tensor, Done]]:
        """Copy bytes to the host, one after the other; a group is waited for as one."""
        targets = [self._buffer(source.numel()) for source in sources]
        return self._copies(sources, targets, self._out, groups)

    def back(self, sources: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, Done]]:
        """Copy bytes to the device, one after the other."""
        with _on(self._main):
            targets = [
                torch.empty(source.numel(), dtype=torch.uint8, device=self.device)
                for source in sources
            ]
        # Each is waited for alone: the first is wanted long before the last.
        return self._copies(sources, targets, self._back, range(len(targets)))

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take pinned memory that is no longer read: the next step wants as much."""
        self._spare.setdefault(buffer.numel(), []).append(buffer)

    def wait(self, done: Done) -> None:
        """Let the main stream wait for copies."""
        if done is not None and self._main is not None:
            self._main.wait_event(done)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if spare := self._spare.get(num_bytes):
            return spare.pop()
        # Batches of many sizes shall not pile up; what torch takes back it hands out again.
        self._spare.clear()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._main is not None)

    def nothing(self, like: torch.Tensor) -> torch.Tensor:
        """An empty tensor of a type, to put in the place of one that is let go."""
        if like.dtype not in self._nothing:
            self._nothing[like.dtype] = like.new_empty(0)
        return self._nothing[like.dtype]

    def _copies(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        stream: torch.cuda.Stream | None,
        groups: Sequence[int],
    ) -> list[tuple[torch.Tensor, Done]]:
        if stream is None or self._main is None:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return [(target, None) for target in targets]
        # Also orders the streams where a buffer is used again: its last reader was waited for.
        stream.wait_stream(self._main)
        done: dict[int, torch.cuda.Event] = {}
        with torch.cuda.stream(stream):
            for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
                target.copy_(source, non_blocking=True)
                is_last = groups[place] not in groups[place + 1 :]
                if is_last:
                    done[groups[place]] = stream.record_event()
        return [(target, done[group]) for target, group in zip(targets, groups, strict=True)]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """Work on a stream, where there are streams."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class Parked:
    """One storage: on the device, on the host, or both; a group of them is let go together.

    `rank` is its place in the order in which the plan has storages leave: its call, and which of
    the call's it is. They come back the other way round.
    """

    __slots__ = (
        *("__weakref__", "_has_left", "_tensor", "_version"),
        *("bytes", "coming", "group", "host", "lane", "leaving", "rank", "stays"),
    )

    def __init__(
        self, lane: Lane, tensor: torch.Tensor, group: int, rank: tuple[int, int] = (0, 0)
    ) -> None:
        self.lane, self.group, self.rank = lane, group, rank
        # A tensor of our own, that counts the writes to the saved one: also when it is empty.
        self._tensor = detached(tensor)
        self._version = version(tensor)
        self._has_left = self.stays = False
        self.host: torch.Tensor | None = None
        self.bytes: torch.Tensor | None = None
        self.leaving: Done = None
        self.coming: Done = None

    @property
    def may_leave(self) -> bool:
        """Whether the storage is on the device, and nobody has written it."""
        is_settled = not self.stays and version(self._tensor) == self._version
        return is_settled and not self._has_left

    @property
    def is_gone(self) -> bool:
        """Whether the storage is on the host alone."""
        return self._has_left and self.bytes is None

    def whole(self) -> torch.Tensor:
        """The storage as bytes, before it has left."""
        return _bytes_of(self._tensor)

    def leave(self) -> None:
        """Let the device's storage go, once it is copied."""
        if self.host is not None and self.may_leave:
            self._wait_for_copies()
            with past_every_mode():
                self._tensor.data = self.lane.nothing(self._tensor)
            self._has_left = True

    def storage(self, block_name: str) -> torch.Tensor:
        """A tensor on the device with the storage, if nobody has written the saved tensor since."""
        if version(self._tensor) != self._version:
            raise RuntimeError(
                f"leanstep: a tensor that {block_name} needs for backward was changed in place "
                "after its forward, so gradients cannot be computed. Change it out of place."
            )
        if not self._has_left:
            return self._tensor
        if self.is_gone:
            fetch([self])
        self._wait_for_copies()
        assert self.bytes is not None
        return self.bytes

    def _wait_for_copies(self) -> None:
        self.lane.wait(self.leaving)
        self.lane.wait(self.coming)
        self.leaving = self.coming = None

    def __del__(self) -> None:
        # What a copy still reads or writes must not be handed out again before it is done.
        self._wait_for_copies()
        if self.host is not None:
            self.lane.give_back(self.host)


def send(parked: Iterable[Parked]) -> None:
    """Begin to copy storages to the host: one after the other, on their own stream."""
    ordered = sorted(parked, key=lambda one: one.rank)
    for lane, own in _by_lane(one for one in ordered if one.may_leave).items():
        with past_every_mode(), torch.no_grad():
            copies = lane.out([one.whole() for one in own], [one.group for one in own])
        for one, (host, done) in zip(own, copies, strict=True):
            one.host, one.leaving = host, done


def fetch(parked: Iterable[Parked]) -> None:
    """Begin to copy storages back to the device, those that have left it."""
    ordered = sorted(parked, key=lambda one: one.rank, reverse=True)
    for lane, own in _by_lane(one for one in ordered if one.is_gone).items():
        with past_every_mode(), torch.no_grad():
            copies = lane.back([one.host for one in own if one.host is not None])
        for one, (found, done) in zip(own, copies, strict=True):
            one.bytes, one.coming = found, done


def _by_lane(parked: Iterable[Parked]) -> dict[Lane, list[Parked]]:
    lanes: dict[Lane, list[Parked]] = {}
    for one in parked:
        lanes.setdefault(one.lane, []).append(one)
    return lanes


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's whole storage as bytes."""
    look = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return look.set_(tensor.untyped_storage())
