"""Follow when storages could go: a *natural* death, as if autograd held nothing.

It is read off a storage's use count, less the tensors that stand in for what autograd holds.
"""

from dataclasses import dataclass

import torch

from leanstep.torch_private.tensors import storage_address, storage_use_count


@dataclass(slots=True)
class _Held:
    address: int
    num_standins: int = 1


class Holds:
    """The storages that have stand-ins, and the natural deaths of those that nobody else holds."""

    def __init__(self) -> None:
        self.natural_deaths: dict[int, int] = {}
        self._held: dict[int, _Held] = {}

    def add(self, number: int, standin: torch.Tensor) -> None:
        """Count one more tensor that stands in for others; after the natural death none counts."""
        held = self._held.get(number)
        if held is not None:
            held.num_standins += 1
        elif number not in self.natural_deaths:
            self._held[number] = _Held(storage_address(standin))

    def drop(self, number: int, now: int) -> bool:
        """Count one stand-in less; whether the storage's natural death is seen with that."""
        held = self._held.get(number)
        if held is None:
            return False
        if storage_use_count(held.address) <= held.num_standins:
            self._end(number, now)
            return True
        held.num_standins -= 1
        if not held.num_standins:
            # Python outlived autograd: the natural death is the real one.
            del self._held[number]
        return False

    def look(self, now: int) -> list[int]:
        """The storages whose natural death is seen now."""
        found = [
            number
            for number, held in self._held.items()
            if storage_use_count(held.address) <= held.num_standins
        ]
        for number in found:
            self._end(number, now)
        return found

    def died(self, number: int, now: int) -> None:
        """Note that a storage is gone, whoever stood in for it."""
        self._held.pop(number, None)
        self.natural_deaths.setdefault(number, now)

    def _end(self, number: int, now: int) -> None:
        del self._held[number]
        self.natural_deaths[number] = now
