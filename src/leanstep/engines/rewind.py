"""Go back to the start of a block call, where that is sure to change nothing.

A call that runs by a recording and turns out to be another one has to run again, recorded. It may
if its first run has left no trace: nothing that is watched has changed, no tensor was written, and
no hook of the user's has fired. Random numbers are drawn again from where they stood.
"""

from typing import Any

import torch

from leanstep.engines.randomness import (
    CudaDraw,
    cuda_state,
    other_random_states,
    set_cuda_state,
    set_other_random_states,
)
from leanstep.engines.validity import Watch, same
from leanstep.torch_private.modules import global_forward_hooks
from leanstep.torch_private.tensors import versions


class Rewind:
    """How things stood when a call began."""

    def __init__(self, watch: Watch, state: list[Any], arguments: list[torch.Tensor]) -> None:
        self._watch, self._state = watch, state
        self._versions = _versions(watch, arguments)
        self._draws = torch.get_rng_state()
        self._other_draws = other_random_states() if watch.may_draw else None
        devices = {argument.device for argument in arguments if argument.device.type == "cuda"}
        self._cuda: list[CudaDraw] = [cuda_state(device.index) for device in devices]

    def go_back(self, arguments: list[torch.Tensor]) -> bool:
        """Put the random states back; False, and nothing done, if the call has left a trace."""
        if self._watch.fires_hooks or any(global_forward_hooks()):
            return False
        if self._watch.counts_batches or self._versions != _versions(self._watch, arguments):
            return False
        if not same(self._state, self._watch.state()):
            return False
        torch.set_rng_state(self._draws)
        for draw in self._cuda:
            set_cuda_state(draw)
        if self._other_draws is not None:
            set_other_random_states(self._other_draws)
        return True


def _versions(watch: Watch, arguments: list[torch.Tensor]) -> list[int]:
    return versions([*watch.tensors(), *arguments])
