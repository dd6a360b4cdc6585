"""Every private name of torch that a cross entropy in chunks needs, seen in torch 2.11 to 2.13."""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.nn import functional

from leanstep.torch_private.modes import past_every_mode

# Torch's own, whatever somebody may put in its place; None where somebody had.
_found: Any = inspect.unwrap(functional.cross_entropy)
_is_torchs = isinstance(_found, FunctionType) and _found.__module__ == functional.__name__
CROSS_ENTROPY: FunctionType | None = _found if _is_torchs else None
CROSS_ENTROPY_CODE: CodeType | None = _found.__code__ if _is_torchs else None

# What torch makes a cross entropy of, and its gradient.
SCORES = torch.ops.aten._log_softmax.default
LOSS = torch.ops.aten.nll_loss_forward.default
LOSS_BACKWARD = torch.ops.aten.nll_loss_backward.default
SCORES_BACKWARD = torch.ops.aten._log_softmax_backward_data.default

# How torch numbers the ways to sum up a loss.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@dataclass(frozen=True, slots=True)
class Way:
    """How torch makes scores of logits and reads them, and where autocast casts.

    Either the logits before (`cast`), or in the op that makes the scores (`is_widened`), or what
    the loss reads of the scores (`recast`): CUDA has them in 16 bits, and a loss of those in 32.
    """

    cast: torch.dtype | None
    is_widened: bool
    recast: torch.dtype | None = None

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores of some rows."""
        rows = logits if self.cast is None else logits.to(self.cast)
        return torch._log_softmax(rows, 1, self.is_widened)

    def scores_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the scores of logits of a type."""
        return self.cast or (torch.float32 if self.is_widened else dtype)

    def read(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores as the loss has them."""
        return scores if self.recast is None else scores.to(self.recast)

    def gradient(
        self, rising: torch.Tensor, scores: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """From a gradient of scores that of the logits; where these were cast, before that."""
        own = dtype if self.cast is None else self.cast
        return torch._log_softmax_backward_data(rising, scores, 1, own).to(dtype)

    def put_gradient(self, place: torch.Tensor, rising: torch.Tensor, scores: torch.Tensor) -> None:
        """The same, into the place where it belongs."""
        if self.cast is None:
            torch._log_softmax_backward_data(rising, scores, 1, place.dtype, out=place)
        else:
            place.copy_(torch._log_softmax_backward_data(rising, scores, 1, self.cast))


def is_plain(given: Mapping[str, Any]) -> bool:
    """Whether a call of cross entropy, its arguments by name, asks for nothing that needs more.

    Weights of classes and smoothed labels do.
    """
    others = (given[name] for name in ("weight", "size_average", "reduce"))
    smoothing, reduction, ignored = map(
        given.__getitem__, ("label_smoothing", "reduction", "ignore_index")
    )
    return (
        all(other is None for other in others)
        and (isinstance(smoothing, (int, float)) and smoothing == 0)
        and (isinstance(reduction, str) and reduction in REDUCTIONS)
        and (isinstance(ignored, int) and abs(ignored) < 2**63)
    )


def way_of(logits: torch.Tensor, labels: torch.Tensor) -> Way | None:
    """How torch does it here and now (autocast decides): seen on a row; None where it is unknown.

    Its kernels for 16 bits differ from device to device, and between versions.
    """
    if CROSS_ENTROPY is None:
        return None
    with past_every_mode(), unhooked(), torch.enable_grad():
        # A copy: what autograd makes of it may live on, and a view would keep all the logits.
        row = logits[:1].detach().clone().requires_grad_()
        loss = CROSS_ENTROPY(row, torch.zeros_like(labels[:1]))
        names, node = [], loss.grad_fn
        while node is not None:
            names.append(type(node).__name__)
            if names[-1] == "LogSoftmaxBackward0":
                made = node._saved_result.dtype
            node = node.next_functions[0][0] if node.next_functions else None
    match names:
        case ["NllLossBackward0", "LogSoftmaxBackward0", "AccumulateGrad"]:
            return Way(None, made is not logits.dtype)
        case ["NllLossBackward0", "LogSoftmaxBackward0", "ToCopyBackward0", "AccumulateGrad"]:
            return Way(made, False)
        case ["NllLossBackward0", "ToCopyBackward0", "LogSoftmaxBackward0", "AccumulateGrad"]:
            return Way(None, made is not logits.dtype, loss.dtype)
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
    return scores_gradient(gradient, scores, stand_ins, reduction, ignored, total)[:, -1]


def scores_gradient(
    gradient: torch.Tensor,
    scores: torch.Tensor,
    labels: torch.Tensor,
    reduction: str,
    ignored: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """The gradient of scores."""
    found: torch.Tensor = torch.ops.aten.nll_loss_backward(
        gradient, scores, labels, None, REDUCTIONS[reduction], ignored, total
    )
    return found


def _of_stand_ins(
    kept: torch.Tensor, labels: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with a single class for every label; it is not the one that is ignored."""
    column = int(ignored == 0)
    # Not `cat`: autocast, which may be on in backward, has types of its own for it.
    scores = kept.new_zeros(len(kept), column + 1)
    scores[:, column] = kept
    return scores, labels.masked_fill(labels != ignored, column)


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several, as `vmap` makes them."""
    names = torch._C._functorch
    return names.is_batchedtensor(tensor) or names.is_legacy_batchedtensor(tensor)


def unhooked() -> AbstractContextManager[None]:
    """Keep what autograd saves from hooks that others have set."""
    # A node that saved its own result as it is would hold itself, and nobody would ever free both.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)
