"""Every private name of torch that a cross entropy in chunks needs, seen in torch 2.11 to 2.13.

The sister of `torch_private.py`: the parts that torch makes a cross entropy of, and the functions
that stand in front of torch's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
)

# How torch numbers the ways to sum up a loss.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@dataclass(frozen=True, slots=True)
class Way:
    """How torch makes scores of logits: `cast` before that, or made wider by the op itself."""

    cast: torch.dtype | None
    is_widened: bool

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of some rows."""
        rows = logits if self.cast is None else logits.to(self.cast)
        return torch._log_softmax(rows, 1, self.is_widened)

    def logits_gradient(
        self, gradient: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """From a gradient of scores that of the logits; where these were cast, before that."""
        own = dtype if self.cast is None else self.cast
        return torch._log_softmax_backward_data(gradient, scores, 1, own)


def way_of(logits: torch.Tensor, labels: torch.Tensor) -> Way | None:
    """How torch does it here and now (autocast decides): seen on a row; None where it is unknown.

    Its kernels for 16 bits differ from device to device, and between versions.
    """
    with torch.enable_grad():
        row = logits[:1].detach().requires_grad_()
        loss = functional.cross_entropy(row, torch.zeros_like(labels[:1]))
        names, node = [], loss.grad_fn
        while node is not None:
            names.append(type(node).__name__)
            if names[-1] == "LogSoftmaxBackward0":
                wide = node._saved_result.dtype  # type: ignore[attr-defined]
            node = node.next_functions[0][0] if node.next_functions else None
    match names:
        case ["NllLossBackward0", "LogSoftmaxBackward0", "AccumulateGrad"]:
            return Way(None, wide is not logits.dtype)
        case ["NllLossBackward0", "LogSoftmaxBackward0", "ToCopyBackward0", "AccumulateGrad"]:
            return Way(wide, False)
        case _:
            return None


def loss_of(
    picked: torch.Tensor, labels: torch.Tensor, reduction: str, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and how many rows it is about."""
    number = REDUCTIONS[reduction]
    loss, total = torch.ops.aten.nll_loss_forward(picked, labels, None, number, ignored)
    return loss, total


def scores_gradient(
    gradient: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    reduction: str,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """The gradient of some rows of scores."""
    found: torch.Tensor = torch.ops.aten.nll_loss_backward(
        gradient, scores, labels, None, REDUCTIONS[reduction], ignored, total
    )
    return found


@contextmanager
def stepping_aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Let functions be called past a mode, where it is the one that would see them first."""
    if _get_current_function_mode() is not mode:
        yield
        return
    with _pop_mode_temporarily():
        yield
