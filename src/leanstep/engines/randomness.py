"""Draw the same random numbers a second time.

On CUDA an op's numbers depend on the generator's seed and offset, so each draw is replayed alone.
On the CPU the generator is a long state that every draw moves on: a replay starts from the state
at the block's start and draws in order.
"""

import functools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.ir import Fact
from leanstep.recorder.facts import tensors_in


@dataclass(frozen=True, slots=True)
class CudaDraw:
    """Where a CUDA generator stood before a draw."""

    device_index: int
    seed: int
    offset: int

    def after(self, base: "CudaDraw | None") -> "CudaDraw":
        """The same draw counted from a new start."""
        if base is None:
            return self
        return CudaDraw(self.device_index, base.seed, base.offset + self.offset)

    def since(self, base: "CudaDraw") -> "CudaDraw":
        """The draw as a distance from a start."""
        return CudaDraw(self.device_index, 0, self.offset - base.offset)


class DeviceDraws:
    """Notice draws of a call that cannot be counted from where its generator stood at the start.

    A seed that is set inside the call, or a state that is put back, moves it without a draw.
    """

    def __init__(self) -> None:
        self._first: CudaDraw | None = None
        self._expected: CudaDraw | None = None
        self._has_jumped = False

    def drew(self, draw: CudaDraw) -> None:
        """Note a draw, after it."""
        self._first = self._first or draw
        self._has_jumped |= self._expected is not None and self._expected != draw
        self._expected = cuda_state(draw.device_index)

    def follow(self, start: CudaDraw | None) -> bool:
        """Whether every draw follows the one before, and the first the start."""
        return self._first is None or (self._first == start and not self._has_jumped)


def draw_device(
    facts: tuple[Fact, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> CudaDraw | None:
    """Where the CUDA generator stands now, if the op is about to draw from it."""
    if Fact.RANDOM not in facts:
        return None
    device = next((tensor.device for tensor in tensors_in(list(args))), kwargs.get("device"))
    if device is None or torch.device(device).type != "cuda":
        return None
    index = torch.device(device).index
    return cuda_state(torch.cuda.current_device() if index is None else index)


def cuda_state(device_index: int) -> CudaDraw:
    """Where a CUDA generator stands now."""
    generator = torch.cuda.default_generators[device_index]
    return CudaDraw(device_index, generator.initial_seed(), generator.get_offset())


@contextmanager
def cuda_draws_from(draw: CudaDraw) -> Iterator[None]:
    """Let the CUDA generator stand where it stood, for a while.

    Another generator lends it a state. Moving its own would tell cuDNN's recurrent layers to draw
    a new seed for their dropout.
    """
    generator = torch.cuda.default_generators[draw.device_index]
    own, lent = generator.graphsafe_get_state(), _lender(draw.device_index)
    _move(lent, draw, lent.initial_seed())
    generator.graphsafe_set_state(lent)
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


def lent_offset(device_index: int) -> int:
    """Where the state stands that was lent last."""
    return int(_lender(device_index).get_offset())


@functools.cache
def _lender(device_index: int) -> torch.Generator:
    return torch.Generator(torch.device("cuda", device_index))


def set_cuda_state(draw: CudaDraw) -> None:
    """Let a CUDA generator stand where it stood."""
    now = cuda_state(draw.device_index)
    _move(torch.cuda.default_generators[draw.device_index], draw, now.seed)


def _move(generator: torch.Generator, to: CudaDraw, seed: int) -> None:
    if to.seed != seed:
        generator.manual_seed(to.seed)
    generator.set_offset(to.offset)


def other_random_states() -> tuple[Any, ...]:
    """Where the generators of Python and NumPy stand, comparable."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    kind, keys, *rest = numpy.random.get_state()
    return (random.getstate(), (kind, keys.tobytes(), *rest))


@contextmanager
def same_other_draws(states: tuple[Any, ...]) -> Iterator[None]:
    """Let the generators of Python and NumPy stand where they stood, for a while."""
    now = other_random_states()
    set_other_random_states(states)
    try:
        yield
    finally:
        set_other_random_states(now)


def set_other_random_states(states: tuple[Any, ...]) -> None:
    """Let the generators of Python and NumPy stand where they stood."""
    random.setstate(states[0])
    if len(states) > 1:
        numpy = sys.modules["numpy"]
        kind, keys, *rest = states[1]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


@contextmanager
def cpu_draws_from(state: torch.Tensor) -> Iterator[None]:
    """Let the CPU generator stand where it stood; the state is moved on by what is drawn."""
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
        state.copy_(torch.get_rng_state())
    finally:
        torch.set_rng_state(now)
