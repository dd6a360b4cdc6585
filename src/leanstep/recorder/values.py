"""Follow storages through a recording: who they are, at which version, and when they die."""

import weakref
from collections.abc import Callable

import torch

from leanstep.ir import Value
from leanstep.torch_private.tensors import address_of, storage_address, wraps_others


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain strided one, with a storage of its own or shared."""
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and not wraps_others(type(tensor))


class StorageBook:
    """Give every storage a number and a version, without keeping it alive.

    An address alone is no identity: it is used again after a storage dies. So each entry carries
    a weak reference that strikes it out at the storage's death.
    """

    def __init__(self, on_death: Callable[[int], None]) -> None:
        self.versions: list[int] = []
        self._on_death = on_death
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def find(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage, if it has been seen."""
        return self._numbers.get(storage_address(tensor))

    def find_storage(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage, if it has been seen."""
        return self._numbers.get(address_of(storage))

    def add(self, storage: torch.UntypedStorage) -> int:
        """Give a storage a new number."""
        self.versions.append(0)
        self._register(storage, len(self.versions) - 1)
        return len(self.versions) - 1

    def add_abstract(self) -> int:
        """Give a number to something that is no tensor, such as a random generator."""
        self.versions.append(0)
        return len(self.versions) - 1

    def replace(self, tensor: torch.Tensor, number: int) -> None:
        """Let a tensor's storage stand for an earlier one, whose own death then says nothing."""
        for address, known in list(self._numbers.items()):
            if known == number:
                del self._numbers[address], self._references[address]
        self._register(tensor.untyped_storage(), number)

    def alias(self, tensor: torch.Tensor, number: int) -> None:
        """Let a second storage stand for a known one too; its death says nothing."""
        address = storage_address(tensor)
        self._numbers[address] = number
        self._references[address] = weakref.ref(
            tensor.untyped_storage(), lambda _: self._forget(address)
        )

    def _forget(self, address: int) -> int | None:
        self._references.pop(address, None)
        return self._numbers.pop(address, None)

    def close(self) -> None:
        """Forget every storage; the callbacks that refer back here would be a cycle."""
        self._numbers.clear()
        self._references.clear()

    def value(self, number: int) -> Value:
        """The storage at its present version."""
        return Value(number, self.versions[number])

    def write(self, number: int) -> Value:
        """Move a storage to its next version."""
        self.versions[number] += 1
        return self.value(number)

    def _register(self, storage: torch.UntypedStorage, number: int) -> None:
        address = address_of(storage)
        self._numbers[address] = number
        self._references[address] = weakref.ref(storage, self._death_of(address))

    def _death_of(self, address: int) -> Callable[[object], None]:
        def died(_: object) -> None:
            number = self._forget(address)
            if number is not None:
                self._on_death(number)

        return died
