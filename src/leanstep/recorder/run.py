"""Run one training step while it is recorded."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from leanstep.eager import uncompiled
from leanstep.ir import Category, Graph
from leanstep.recorder.attic import Attic
from leanstep.recorder.company import Company
from leanstep.recorder.hooks import Hook
from leanstep.recorder.resizes import resizes_told
from leanstep.recorder.signatures import Signatures
from leanstep.recorder.step import StepRecording
from leanstep.step.training import TrainingStep
from leanstep.torch_private.tensors import tree_leaves
from leanstep.truth import OpMeter


def record(
    step: TrainingStep,
    signatures: Signatures,
    meter: OpMeter | None = None,
    *,
    company: Company | None = None,
    attic: Attic | None = None,
) -> Graph:
    """Run one training step and return its graph; the caller keeps what the step changes."""
    with meter or OpMeter(step.device) as meter:
        recording = StepRecording(meter, signatures, company=company, attic=attic)
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.enter_context(module_hooks(step.model, recording))
            adopt_static(step, recording)
            stack.enter_context(resizes_told(recording.resized))
            stack.enter_context(recording)
            _run(step, recording)
    return recording.graph()


def _run(step: TrainingStep, recording: StepRecording) -> None:
    with torch.autograd.graph.saved_tensors_hooks(recording.pack, recording.unpack):
        loss = step.compute_loss()
    loss.backward()
    del loss
    mark_gradients(step, recording)
    recording.in_optimizer = True
    step.update()


def mark_gradients(step: TrainingStep, recording: StepRecording) -> None:
    """Tell a recording which storages hold gradients, once backward has run."""
    for parameter in step.parameters():
        if parameter.grad is not None:
            recording.mark(parameter.grad, Category.GRADIENT)


def adopt_static(step: TrainingStep, recording: StepRecording) -> None:
    """Tell a recording of everything that is there before the step."""
    for parameter in step.parameters():
        recording.adopt(parameter.detach(), Category.PARAMETER)
        if parameter.grad is not None:
            recording.adopt(parameter.grad, Category.GRADIENT)
    for buffer in step.model.buffers():
        recording.adopt(buffer, Category.BUFFER)
    for tensor in step.optimizer_tensors():
        recording.adopt(tensor, Category.OPTIMIZER_STATE)
    for leaf in tree_leaves(step.batch):
        if isinstance(leaf, torch.Tensor):
            recording.adopt(leaf, Category.INPUT)


@contextmanager
def module_hooks(model: torch.nn.Module, recording: StepRecording) -> Iterator[None]:
    """Tell a recording of every module's calls, inside the block."""
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                # It takes no hooks: its ops belong to the module that calls it.
                recording.company.scripted[path] = None
                continue
            for handle in _hook(path, module, recording):
                stack.callback(handle.remove)
        yield


def _hook(path: str, module: torch.nn.Module, recording: StepRecording) -> tuple[Any, Any]:
    before = Hook(lambda module, _: recording.calls.enter(path, module, len(recording.ops)))
    after = Hook(lambda *_: recording.calls.leave(len(recording.ops)))
    return (
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    )
