"""Follow storages that are emptied and filled again in place.

FSDP2 gathers a block's parameters into storages that it keeps: it gives them their size before the
block runs, and takes it away afterwards. To torch that is neither an op nor a birth or death.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Tell = Callable[[torch.UntypedStorage, bool], None]


class Absences:
    """The stretches of positions at which storages are empty; a storage goes by its number."""

    def __init__(self) -> None:
        self._stretches: dict[int, list[list[int]]] = {}
        self._open: dict[int, int] = {}
        self._empty: set[int] = set()

    def begin(self, number: int, position: int) -> None:
        """Note that a storage is emptied."""
        self._open.setdefault(number, position)

    def end(self, number: int, position: int) -> None:
        """Note that it has its size again."""
        self._empty.add(number)
        start = self._open.pop(number, None)
        if start is not None and start < position:
            self._stretches.setdefault(number, []).append([start, position])

    def is_refill(self, number: int) -> bool:
        """Whether a write to a storage is the first since it has its size again."""
        is_empty = number in self._empty
        self._empty.discard(number)
        return is_empty

    def of(self, number: int, death: int) -> tuple[tuple[int, int], ...]:
        """The absences of a storage that lives through op `death`."""
        found = list(self._stretches.get(number, ()))
        if number in self._open:
            found.append([self._open[number], death + 1])
        return tuple((start, min(stop, death + 1)) for start, stop in found if start <= death)


@contextmanager
def resizes_told(tell: Tell) -> Iterator[None]:
    """Call `tell` with each storage that is filled, True, or emptied, False, while it has a size.

    Only what Python resizes is seen, as FSDP2 does; `Tensor.resize_` is an op.
    """
    original = torch.UntypedStorage.resize_
    own = vars(torch.UntypedStorage).get("resize_")

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> object:
        before = storage.nbytes()
        if before and not nbytes:
            tell(storage, False)
        result: object = original(storage, nbytes)
        if nbytes and not before:
            tell(storage, True)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = own  # type: ignore[method-assign]
