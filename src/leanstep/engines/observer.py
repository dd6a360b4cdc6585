"""Watch a rehearsal: does everything that was dropped come back with the bits it had?

Tensors are compared by a checksum of their bits, so that both versions need not be there at once.
Checksums stay on the device; they are compared when the rehearsal is over.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from leanstep.recorder.facts import op_info, tensors_in
from leanstep.recorder.values import has_storage
from leanstep.torch_private.modes import TorchDispatchMode, past_every_mode

# Elements that one piece of a checksum is worked out from: bounds the memory it takes.
_PIECE = 1 << 22

# An odd multiplier for the places of elements, so that two that change places are seen.
_SPREAD = 0x9E3779B97F4A7C1

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# What such ops return was written by nobody.
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize_", "aten._unsafe_empty")


def checksum(tensor: torch.Tensor, piece: int = _PIECE) -> torch.Tensor:
    """A number that tells two tensors with other bits apart, on the tensor's device."""
    with past_every_mode(), torch.no_grad():
        bits = _bits(tensor.detach())
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        place = 0
        for part in _pieces(bits, piece):
            values = part.reshape(-1).to(torch.int64)
            places = torch.arange(place, place + values.numel(), device=tensor.device)
            total += ((values + 1) * (places * _SPREAD + 1)).sum()
            place += values.numel()
        return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGERS[plain.element_size()])


def _pieces(bits: torch.Tensor, piece: int) -> Sequence[torch.Tensor]:
    """The tensor cut along its first dimension: one with strides is not copied whole."""
    if bits.dim() == 0 or bits.numel() <= piece:
        return (bits,)
    if bits.is_contiguous():
        bits = bits.view(-1)
    rows = max(1, piece * bits.shape[0] // bits.numel())
    pieces: tuple[torch.Tensor, ...] = bits.split(rows)
    return pieces


class Observer:
    """What a rehearsal has shown so far.

    `current` is the block that is at work, to blame when something fails; `compares` is false
    where the user allowed other bits.
    """

    def __init__(self, *, compares: bool = True, piece: int = _PIECE) -> None:
        self.current = ""
        self.compares, self._piece = compares, piece
        self.doubts: dict[str, str] = {}
        self._pairs: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []

    def see(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What to remember of a tensor until it comes back."""
        is_seen = self.compares and has_storage(tensor)
        return checksum(tensor, self._piece) if is_seen else None

    def compare(
        self, block_name: str, what: str, before: torch.Tensor | None, tensor: torch.Tensor
    ) -> None:
        """Note how a tensor came back."""
        if before is not None:
            self._pairs.append((block_name, what, before, checksum(tensor, self._piece)))

    def doubt(self, block_name: str, reason: str) -> None:
        """Note the first thing that is wrong with a block."""
        self.doubts.setdefault(block_name, reason)

    def close(self) -> None:
        """Compare what was noted."""
        for block_name, what, before, after in self._pairs:
            if int(before) != int(after):
                self.doubt(block_name, f"in a dry run {what} came back with other bits")
        self._pairs.clear()

    def first_run(self) -> "RunObserver":
        """Watch the first run of a block that is run twice."""
        return RunObserver(self)


@contextmanager
def observed(observer: Observer | None, block_name: str) -> Iterator[None]:
    """Let a block be to blame for what fails inside; outside a rehearsal nothing happens."""
    if observer is None:
        yield
        return
    around, observer.current = observer.current, block_name
    yield
    # Not after an error: whoever asks then shall find the block.
    observer.current = around


class RunObserver(TorchDispatchMode):
    """Note what every op of a run returns, or compare it with what was noted."""

    def __init__(self, observer: Observer, noted: list[Any] | None = None, name: str = "") -> None:
        super().__init__()
        self.observer, self.name = observer, name
        self.noted: list[Any] = [] if noted is None else noted
        self._is_second = noted is not None
        self._place = 0

    def again(self, block_name: str) -> "RunObserver":
        """Watch the second run; torch compares the two when it has ended."""
        self.observer.current = block_name
        return RunObserver(self.observer, self.noted, block_name)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op and look at what it returns."""
        out = func(*args, **(kwargs or {}))
        name = op_info(func).name
        if name == "aten.detach.default":
            # Checkpointing detaches what it hands to autograd, in the second run alone.
            return out
        tensors = [] if name.startswith(_UNWRITTEN) else list(tensors_in(out))
        if not self._is_second:
            self.noted.append((name, [self.observer.see(tensor) for tensor in tensors]))
            return out
        expected, before = self.noted[self._place] if self._place < len(self.noted) else ("", [])
        self._place += 1
        if expected != name:
            what = f"{name} where {expected} ran first" if expected else f"{name} too"
            self.observer.doubt(self.name, f"in a dry run its second run ran {what}")
        else:
            for seen, tensor in zip(before, tensors, strict=False):
                self.observer.compare(self.name, f"the result of {name}", seen, tensor)
        return out
