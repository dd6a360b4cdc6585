"""Run a block call that drops everything it can, while the whole step is being recorded.

For the first step of a lazily fitted model: nothing is planned yet, so every block keeps its inputs
and rebuilds the rest, and each rebuilt tensor is compared with a checksum of what it was. A block
that does not repeat itself is refused by name before a wrong number is used.
"""

from collections.abc import Callable
from typing import Any

import torch

from leanstep.engines.context import Context
from leanstep.engines.live import LiveCall
from leanstep.engines.observer import Observer
from leanstep.engines.ready import unpack
from leanstep.engines.recording import CallRecorder
from leanstep.engines.scope import Scope
from leanstep.engines.whole import EVERYTHING
from leanstep.errors import InputError
from leanstep.ir import Value
from leanstep.recorder.live import LiveRecording
from leanstep.torch_private.autograd import in_backward, saving_hooks_work, top_saving_hooks
from leanstep.torch_private.tensors import storage_address

# Elements a checksum is worked out from at a time: the step may not need more memory for it. On a
# GPU each piece costs some launches, and 50 MB are less there.
_PIECE, _PIECE_ON_GPU = 1 << 15, 1 << 21


class WitnessedBlock:
    """What stands in front of a block's forward in the first step."""

    def __init__(self, scope: Scope, recording: LiveRecording) -> None:
        self._scope, self._recording = scope, recording

    def __call__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call: untouched where nothing is saved, or others take what is."""
        recording = self._recording
        is_passive = not torch.is_grad_enabled() or in_backward() or not saving_hooks_work()
        # Hooks of the user's inside ours (save_on_cpu, a checkpoint) decide by themselves.
        if is_passive or top_saving_hooks() != (recording.pack, recording.unpack):
            return forward(module, *args, **kwargs)
        with recording.aside():
            observer = _Strict(recording, recording.meter.is_on_host)
            context = Context(self._scope.name, _ignore_backward, observer=observer)
            call = _WitnessedCall(context, self._scope, recording)
        return call.run(forward, (module, *args), kwargs)


def _ignore_backward() -> None:
    """Stand in for the count of rounds: every call of the step is treated alike."""


class _WitnessedCall(LiveCall):
    """A recorded call whose own ops stay out of the step's recording."""

    def __init__(self, context: Context, scope: Scope, witness: LiveRecording) -> None:
        super().__init__(context, EVERYTHING, scope, is_safe=self._is_unwritten)
        assert self.random_state is not None
        self.recorder = _WitnessedRecorder(self._before_write, self.random_state, scope)
        self.recorder.witness = self.witness = witness

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether the call leaves a tensor alone: what it writes, its next call writes again."""
        return storage_address(tensor) not in self.recorder.written

    def _hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(*self.witness.around(self._pack, unpack))

    def _before_write(self, value: Value, tensor: torch.Tensor) -> None:
        with self.witness.aside():
            super()._before_write(value, tensor)

    def _finish(self) -> None:
        with self.witness.aside():
            super()._finish()


class _WitnessedRecorder(CallRecorder):
    """Tells the step's recording what the engine holds."""

    witness: LiveRecording

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it can be held until backward."""
        with self.witness.aside():
            held = super().detached(tensor)
        if held is not tensor:
            self.witness.hold(held)
        return held


class _Strict(Observer):
    """Compares at once: a step of the user's has no second chance."""

    def __init__(self, recording: LiveRecording, is_on_host: bool) -> None:
        super().__init__(piece=_PIECE if is_on_host else _PIECE_ON_GPU)
        self._recording = recording

    def compare(
        self, block_name: str, what: str, before: torch.Tensor | None, tensor: torch.Tensor
    ) -> None:
        """Raise unless a tensor came back with the bits it had."""
        super().compare(block_name, what, before, tensor)
        self.close()
        if self.doubts:
            self._recording.has_failed = True
            raise InputError(
                f"{block_name} does not repeat itself: {what} came back with other bits when it "
                "was run again in backward. No gradient was computed from it; exclude the block "
                "with leanstep.keep(module) before leanstep.lean, or use leanstep.fit, which plans "
                "around such blocks."
            )
