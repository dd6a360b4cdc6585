"""A training step on stand-ins: from a model that exists, or from a factory that makes one."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.errors import InputError
from leanstep.imagine.autocast import autocast_as_on_cuda
from leanstep.imagine.ranks import imagined_ranks, shard
from leanstep.imagine.target import Target
from leanstep.imagine.tensors import StandIns
from leanstep.recorder.source import error_source
from leanstep.step.state import hooks_silent, random_state_untouched, structure_untouched
from leanstep.step.training import Loss, TrainingStep, make_step
from leanstep.torch_private.fake import (
    FakeTensorMode,
    conversions_by_data,
    operator_that_asked,
    operator_without_form,
)

Factory = Callable[..., Any]


@dataclass(frozen=True)
class Ingredients:
    """What a step is made of, as the user gave it."""

    model: torch.nn.Module
    batch: Any
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class ImaginedStep(TrainingStep):
    """A step on stand-ins."""

    target: Target | None = None

    def run_optimizer(self) -> None:
        """Run the optimizer; it may read how many steps it has taken."""
        assert self.target is not None
        with self.target.numbers_known():
            super().run_optimizer()


@contextmanager
def imagined_step(
    source: Ingredients | Factory, *, gradients_kept: bool = False, ranks: int | None = None
) -> Iterator[TrainingStep]:
    """A step that runs without memory inside the block; nothing of it is left behind.

    With `ranks` it is that of the first of so many, among which a factory's model is sharded.
    """
    stand_ins = StandIns()
    target = Target(stand_ins)
    with ExitStack() as stack:
        stack.enter_context(random_state_untouched())
        mesh = None if ranks is None else stack.enter_context(imagined_ranks(ranks))
        if isinstance(source, Ingredients):
            stack.enter_context(structure_untouched(source.model.modules()))
        stack.enter_context(conversions_by_data())
        stack.enter_context(autocast_as_on_cuda())
        stack.enter_context(FakeTensorMode())
        stack.enter_context(target)
        if not isinstance(source, Ingredients):
            with data_named("the factory"):
                source = _made_by(source, mesh)
        step = _on_stand_ins(source, stand_ins, target, mesh, gradients_kept=gradients_kept)
        if step.optimizer is not None:
            stack.enter_context(hooks_silent(step.optimizer))
        with data_named("the step"):
            yield step


def _made_by(factory: Factory, mesh: Any) -> Ingredients:
    is_given_mesh = mesh is not None and "mesh" in inspect.signature(factory).parameters
    made = factory(mesh=mesh) if is_given_mesh else factory()
    is_pair = isinstance(made, tuple) and 2 <= len(made) <= 4
    if not is_pair or not isinstance(made[0], torch.nn.Module):
        raise InputError(
            f"the factory returned {type(made).__name__}, not (model, batch, loss, optimizer)"
        )
    return Ingredients(*made)


def _on_stand_ins(
    source: Ingredients,
    stand_ins: StandIns,
    target: Target,
    mesh: Any,
    *,
    gradients_kept: bool,
) -> TrainingStep:
    # The optimizer first: it finds its parameters by the tensors that they still are.
    optimizer = None if source.optimizer is None else stand_ins.optimizer(source.optimizer)
    stand_ins.model(source.model)
    if mesh is not None:
        shard(source.model, optimizer, mesh)
    batch = stand_ins.tree(source.batch)
    step = make_step(source.model, batch, source.loss, optimizer, gradients_kept=gradients_kept)
    if optimizer is not None:
        use_foreach(optimizer)
    if gradients_kept:
        for parameter in step.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    return ImaginedStep(step.model, batch, step.loss, optimizer, gradients_kept, target)


def use_foreach(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer that was told nothing work on all tensors at once, its default on CUDA."""
    for group in optimizer.param_groups:
        told = any(group.get(option) for option in ("fused", "differentiable"))
        if not told and group.get("foreach", False) is None:
            group["foreach"] = True


@contextmanager
def data_named(who: str) -> Iterator[None]:
    """Turn the error of a fake tensor without data into one that names who asked."""
    try:
        yield
    except Exception as error:
        place = f" at {line}" if (line := error_source(error)) else ""
        if operator := operator_that_asked(error):
            reason = f"asks for data, and tensors have none without a device: {operator}"
        elif operator := operator_without_form(error):
            reason = f"runs {operator}, which torch.library.register_fake was not told about,"
        else:
            raise
        raise InputError(f"{who} {reason}{place}") from error
