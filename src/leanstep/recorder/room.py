"""Run a step that does not fit on its device, with its activations in host memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from leanstep.eager import uncompiled
from leanstep.errors import MeasureError
from leanstep.recorder.attic import Attic
from leanstep.recorder.signatures import Signatures
from leanstep.recorder.step import StepRecording
from leanstep.step.training import TrainingStep
from leanstep.truth import IdleMeter, return_cached


@contextmanager
def in_host_memory() -> Iterator[None]:
    """Hold in host memory what only autograd holds, inside the block."""
    recording = StepRecording(IdleMeter(), Signatures(), attic=Attic())
    hooks = torch.autograd.graph.saved_tensors_hooks(recording.pack, recording.unpack)
    with uncompiled(), recording, hooks:
        yield


def first_run_fits(step: TrainingStep) -> bool:
    """Run a step for the first time: as it is or, where that does not fit, in host memory."""
    # Twice: from the second step on the optimizer's state is there while activations are.
    if _runs(step, step.first_run) and _runs(step, step.run):
        return True
    with in_host_memory():
        runs = _runs(step, step.first_run)
    if not runs:
        raise MeasureError(
            f"the step does not fit on {step.device} even with its activations in host memory: "
            "make the batch or the model smaller, or shard the model"
        )
    return False


def _runs(step: TrainingStep, run: Callable[[], None]) -> bool:
    try:
        run()
    except torch.OutOfMemoryError:
        pass
    else:
        return True
    # Past the handler: the error held the frames, and those held the tensors.
    step.drop_gradients()
    return_cached(step.device)
    return False
