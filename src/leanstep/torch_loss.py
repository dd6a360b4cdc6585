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

    def put_gradient(
        self, gradient: torch.Tensor, scores: torch.Tensor, place: torch.Tensor
    ) -> None:
        """From a gradient of scores make that of the logits; where these were cast, before that."""
        if self.cast is None:
            kind = place.dtype
            torch._log_softmax_backward_data(gradient, scores, 1, kind, out=place)
        else:
            place.copy_(torch._log_softmax_backward_data(gradient, scores, 1, self.cast))


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
    kept: torch.Tensor, labels: torch.Tensor, reduction: str, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss from the score of each row's label, and how many rows it is about."""
    scores, stand_ins = _of_stand_ins(kept, labels, ignored)
    number = REDUCTIONS[reduction]
    loss, total = torch.ops.aten.nll_loss_forward(scores, stand_ins, None, number, ignored)
    return loss, total


def gradients_of_kept(
    gradient: torch.Tensor,
    labels: torch.Tensor,
    reduction: str,
    ignored: int,
    total: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the score of each row's label; none where the row is ignored."""
    kept = torch.empty(len(labels), dtype=dtype, device=labels.device)
    scores, stand_ins = _of_stand_ins(kept, labels, ignored)
    number = REDUCTIONS[reduction]
    found: torch.Tensor = torch.ops.aten.nll_loss_backward(
        gradient, scores, stand_ins, None, number, ignored, total
    )
    return found[:, -1]


def _of_stand_ins(
    kept: torch.Tensor, labels: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with a single class for every label; it is not the one that is ignored."""
    scores, column = kept[:, None], int(ignored == 0)
    if column:
        scores = torch.cat([torch.zeros_like(scores), scores], 1)
    return scores, labels.masked_fill(labels != ignored, column)


@contextmanager
def stepping_aside(mode: TorchFunctionMode) -> Iterator[None]:
    """Let functions be called past a mode, where it is the one that would see them first."""
    if _get_current_function_mode() is not mode:
        yield
        return
    with _pop_mode_temporarily():
        yield
