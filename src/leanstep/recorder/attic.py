"""Host memory for what only autograd holds, where the device has no room for it.

A storage is emptied in place and filled again when backward asks for it: every tensor that looks
at it stays what it was, strides included, so the step computes the same bits.
"""

import torch

from leanstep.torch_private.modes import past_every_mode


class Attic:
    """The contents of storages that are away from the device."""

    def __init__(self) -> None:
        self._away: dict[int, torch.Tensor] = {}

    def take(self, number: int, storage: torch.UntypedStorage) -> None:
        """Move a storage's contents to the host."""
        if number not in self._away and storage.nbytes():
            with past_every_mode():
                self._away[number] = _bytes(storage).to("cpu", copy=True)
            storage.resize_(0)

    def bring(self, number: int, storage: torch.UntypedStorage) -> None:
        """Move a storage's contents back, if they are away."""
        contents = self._away.pop(number, None)
        if contents is not None:
            storage.resize_(contents.numel())
            with past_every_mode():
                _bytes(storage).copy_(contents)

    def forget(self, number: int) -> None:
        """Let go of what nobody will ask for."""
        self._away.pop(number, None)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
