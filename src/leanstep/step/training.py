"""What one training step is: the same for recording, measuring, timing and comparing."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.errors import InputError, LeanstepError
from leanstep.torch_private.modes import any_autocast_is_on
from leanstep.torch_private.modules import original_step
from leanstep.torch_private.tensors import tree_leaves

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class TrainingStep:
    """Forward, backward, optimizer, gradients to None: what a training loop does with one batch.

    With `gradients_kept` the gradients stay from step to step, as in gradient accumulation.
    """

    model: torch.nn.Module
    batch: Any
    loss: Loss
    optimizer: torch.optim.Optimizer | None = None
    gradients_kept: bool = False

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.model.parameters()).device

    def compute_loss(self) -> torch.Tensor:
        """Run forward."""
        return self.loss(self.model, self.batch)

    def update(self) -> None:
        """Run the optimizer, past hooks of the user's, then drop the gradients."""
        if not self.gradients_kept:
            self.run_optimizer()
        self.drop_gradients()

    def run_optimizer(self) -> None:
        """Run the optimizer alone."""
        if self.optimizer is not None:
            original_step(self.optimizer)()

    def drop_gradients(self) -> None:
        """End the step: gradients to None, unless they are kept."""
        if not self.gradients_kept:
            for parameter in self.parameters():
                parameter.grad = None
        # The next step's batch is another one: no gradient waits for it.
        for leaf in self.batch_leaves():
            leaf.grad = None

    def first_run(self) -> None:
        """Run once, the optimizer in any case: its state is there from its first step on."""
        self.compute_loss().backward()
        self.run_optimizer()
        self.drop_gradients()

    def run(self) -> None:
        """Run the whole step once."""
        self.compute_loss().backward()
        self.update()

    def run_noting(self, forward_ended: Callable[[], None]) -> None:
        """The same, and say when forward is through."""
        loss = self.compute_loss()
        forward_ended()
        loss.backward()
        # Not held: an output may be an activation.
        del loss
        self.update()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Every parameter the step touches: the model's, and others the optimizer holds."""
        seen = set[int]()
        own = list(self.model.parameters())
        groups = self.optimizer.param_groups if self.optimizer else []
        for parameter in own + [p for group in groups for p in group["params"]]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def batch_leaves(self) -> Iterator[torch.Tensor]:
        """Every tensor of the batch that backward leaves a gradient on."""
        for leaf in tree_leaves(self.batch):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
                yield leaf

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is there between steps: all of it counts in the peak."""
        for parameter in self.parameters():
            yield parameter.detach()
            if parameter.grad is not None:
                yield parameter.grad
        yield from self.model.buffers()
        yield from self.optimizer_tensors()
        yield from (x for x in tree_leaves(self.batch) if isinstance(x, torch.Tensor))

    def optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """The optimizer's state, as far as it consists of tensors."""
        entries = self.optimizer.state.values() if self.optimizer else ()
        leaves = tree_leaves([dict(entry) for entry in entries])
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a dict as keywords, a tuple or list in order, else as it is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Take the loss from the model's output: its `.loss`, or the output itself if a scalar."""
    output = call_model(model, batch)
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    raise InputError(
        f"the model returned {type(output).__name__} without a loss: "
        "pass loss=, a function of model and batch that returns a scalar tensor"
    )


def checked_loss(loss: Loss) -> Loss:
    """Let a loss function through only when it returns a scalar that backward can start from."""
    _check_loss(loss)

    def compute(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        try:
            value = loss(model, batch)
        except LeanstepError:
            raise
        except Exception as error:
            _note(error, loss, batch)
            raise
        if not isinstance(value, torch.Tensor):
            raise InputError(f"the loss is {type(value).__name__}, not a tensor: return a scalar")
        if value.numel() != 1:
            raise InputError(
                f"the loss has shape {tuple(value.shape)}, not one number: reduce it, "
                "for example with .mean()"
            )
        if not value.requires_grad:
            raise InputError("the loss does not depend on any trainable parameter of the model")
        return value

    return compute


def _note(error: Exception, loss: Loss, batch: Any) -> None:
    """Say below the user's own error what was called, and with what."""
    called = "loss(model, batch)"
    if loss is default_loss:
        in_order = "*" if isinstance(batch, (tuple, list)) else ""
        called = f"model({'**' if isinstance(batch, Mapping) else in_order}batch)"
    shape = f" of shape {tuple(batch.shape)}" if isinstance(batch, torch.Tensor) else ""
    note = f"leanstep called {called}, where batch is {type(batch).__name__}{shape}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _check_loss(loss: object) -> None:
    """Refuse what cannot be called with model and batch; many expect outputs and labels."""
    if not callable(loss):
        raise InputError(f"loss is {type(loss).__name__}, not a function of model and batch")
    try:
        signature = inspect.signature(loss)
    except ValueError:
        # Code without a Python signature: its first call will tell.
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InputError(
            f"the loss takes {signature}, but is called as loss(model, batch): it runs the model "
            "itself and returns a scalar tensor"
        ) from error


def make_step(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    gradients_kept: bool = False,
) -> TrainingStep:
    """Check what the user gave, once, and make the step of it."""
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"model is {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "the model was made by torch.jit, whose calls cannot be planned: "
            "fit the module that it was made from"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("the model has no trainable parameters: there is no backward to plan for")
    _check_initialised(model)
    _check_devices(model, batch)
    _check_optimizer(model, optimizer)
    return TrainingStep(model, batch, checked_loss(loss or default_loss), optimizer, gradients_kept)


def _check_initialised(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(f"{name} has no shape yet: call the model once on a batch first")


def _check_devices(model: torch.nn.Module, batch: Any) -> None:
    home = {p.device for p in model.parameters()}
    if len(home) > 1:
        raise InputError(
            f"the model's parameters are on {len(home)} devices "
            f"({', '.join(sorted(map(str, home)))}): leanstep plans for one"
        )
    (device,) = home
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"the model is on {device}: leanstep runs steps on CPU and CUDA devices")
    for leaf in tree_leaves(batch):
        # A 0-dim CPU tensor mixes freely with any device.
        if isinstance(leaf, torch.Tensor) and leaf.device != device and leaf.dim() > 0:
            raise InputError(
                f"the batch has a tensor on {leaf.device} but the model is on {device}: "
                f"move it with .to({str(device)!r})"
            )


def _check_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None:
        return
    if not (hasattr(optimizer, "param_groups") and hasattr(type(optimizer), "step")):
        raise InputError(f"optimizer is {type(optimizer).__name__}, not a torch.optim.Optimizer")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{type(optimizer).__name__} runs the model several times in one step: "
            "leanstep plans for optimizers that step once, such as AdamW or SGD"
        )
    own = {id(p) for p in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not own & held:
        raise InputError(
            "the optimizer holds none of this model's parameters: "
            "build it from model.parameters(), after moving the model to its device"
        )


def autocast_is_on() -> bool:
    """Whether autocast would change what ops do."""
    return any_autocast_is_on()


def no_autocast() -> AbstractContextManager[object]:
    """Switch autocast off for a while, where it is on: recorded casts are ops of their own."""
    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
