"""Cross entropy some rows at a time, with the bits of the whole.

While the module runs whose forward computes the loss, `torch.nn.functional.cross_entropy` is
answered by ours (`engines/stand_in.py`; `nn.CrossEntropyLoss` calls it too), and nothing else is
changed. What is not as it was when the step was recorded is left to torch: weights of classes,
smoothed labels, labels that are shares, images.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn import functional

from leanstep.chunks import FLOAT_BYTES, rows_in_chunk
from leanstep.engines.alone import holders_when_alone, is_alone
from leanstep.engines.stand_in import standing_in
from leanstep.ir import LossInChunks
from leanstep.step.training import autocast_is_on
from leanstep.torch_private.autograd import saving_hooks_are_set, saving_hooks_work
from leanstep.torch_private.loss import (
    Way,
    gradients_of_kept,
    is_batched,
    is_plain,
    loss_of,
    scores_gradient,
    way_of,
)
from leanstep.torch_private.modes import is_traced
from leanstep.torch_private.nodes import graph_is_kept

# How torch does it, by device, type and autocast: seen once.
_ways: dict[tuple[Any, ...], Way | None] = {}


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy`, bit for bit, in a fraction of its memory.

    The scores of all tokens and words never exist at once, nor does their gradient: both are made
    some rows at a time, and the scores again in backward. For a loss that is computed outside of
    the model; one in the model's own forward is planned by `fit` itself.

    What it does not do in rows (weights of classes, smoothed labels, labels that are shares,
    images, a few rows) is left to torch. It saves the logits, where torch saves the scores: logits
    that are changed in place afterwards make backward raise (through `.data` nobody sees it). If
    nobody else holds them in backward, their gradient takes their place: let go of what the model
    has returned (`del`) once there is a loss, and have what copies it on another stream of the GPU
    done by then.
    """
    given: dict[str, Any] = {
        "input": input,
        "target": target,
        "weight": weight,
        "size_average": size_average,
        "ignore_index": ignore_index,
        "reduce": reduce,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    found = None
    if input.dim() == 2 and not is_traced():
        num_rows = rows_in_chunk(max(1, len(input)), FLOAT_BYTES * input.numel())
        found = _by_rows(num_rows, given)
    return functional.cross_entropy(**given) if found is None else found


class Window:
    """Answer calls of cross entropy while one module runs; `runs` counts those in chunks."""

    def __init__(self, loss: LossInChunks) -> None:
        self.runs = 0
        self._num_rows = loss.num_rows

    def __call__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call of the module."""
        if not torch.is_grad_enabled() or is_traced():
            return forward(module, *args, **kwargs)
        with standing_in(self.answer):
            return forward(module, *args, **kwargs)

    def answer(self, given: Mapping[str, Any]) -> torch.Tensor | None:
        """The loss in chunks, or None where torch is to compute it."""
        # A checkpoint of the user's runs it again in backward, where nobody answers.
        found = None if saving_hooks_are_set() else _by_rows(self._num_rows, given)
        self.runs += found is not None
        return found


def _by_rows(num_rows: int, given: Mapping[str, Any]) -> torch.Tensor | None:
    """The loss, or None where it is not one for rows."""
    input, target = given["input"], given["target"]
    is_one = torch.is_grad_enabled() and saving_hooks_work() and are_for_rows(num_rows, given)
    way = _way(input, target) if is_one else None
    if way is None:
        return None
    how = Rows(way, num_rows, given["reduction"], given["ignore_index"])
    try:
        loss: torch.Tensor = _InChunks.apply(input, target, how)[0]  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # A label that is no class, say: torch has its own words for it.
        return None
    return loss


def are_for_rows(num_rows: int, given: Mapping[str, Any]) -> bool:
    """Whether a cross entropy of these is one for so many rows at a time."""
    input, target = given["input"], given["target"]
    return is_plain(given) and _are_rows(input, target) and len(input) > num_rows


def _are_rows(logits: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether these are logits that want a gradient and labels, both in rows."""
    is_known = type(logits) is torch.Tensor and type(labels) is torch.Tensor
    return (
        is_known
        and logits.requires_grad
        and (logits.dim(), labels.dim()) == (2, 1)
        and logits.is_contiguous()
        and logits.is_floating_point()
        and labels.dtype is torch.int64
        and logits.device == labels.device
        and len(logits) == len(labels)
    )


def _way(logits: torch.Tensor, labels: torch.Tensor) -> Way | None:
    kind = logits.device.type
    is_on = autocast_is_on() and torch.is_autocast_enabled(kind)
    key = kind, logits.dtype, torch.get_autocast_dtype(kind) if is_on else None
    if key not in _ways:
        _ways[key] = way_of(logits, labels)
    return _ways[key]


@dataclass(frozen=True, slots=True)
class Rows:
    """A loss that is computed `num_rows` rows at a time: how torch makes it, and of which rows."""

    way: Way
    num_rows: int
    reduction: str
    ignored: int


class _InChunks(torch.autograd.Function):
    """Cross entropy that saves the logits, and never has the scores of all rows at once.

    The gradient takes the place of the logits if nobody else holds them. For that the graph must
    not hold the tensor it was given, which others may have too: it saves a second output, the
    logits again, which is dropped at once. The gradient of that one is the logits' own.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        how: Rows,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, total, dtype = get_loss(logits, labels, how)
        again = logits.detach()
        ctx.save_for_backward(again, labels, total)
        ctx.set_materialize_grads(False)
        ctx.how, ctx.dtype, ctx.alone = how, dtype, holders_when_alone(logits)
        return loss, again

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor | None, again: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        found = again
        if gradient is not None:
            compute = _twice_differentiable if torch.is_grad_enabled() else _by_chunks
            if not torch.compiler.is_compiling() and is_batched(gradient):
                compute = _at_once
            found = compute(ctx, gradient)
            found = found if again is None else found + again
        return found, None, None


def get_loss(
    logits: torch.Tensor, labels: torch.Tensor, how: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """The loss, chunk by chunk; how many rows it is about; and the type of what it reads."""
    # The score of each row's label is all that it reads.
    places = labels.masked_fill(labels == how.ignored, 0)[:, None]
    kept: torch.Tensor | None = None
    for start in range(0, len(logits), how.num_rows):
        rows = slice(start, start + how.num_rows)
        part = how.way.read(how.way.scores(logits[rows]).gather(1, places[rows]))
        kept = part.new_empty(len(logits)) if kept is None else kept
        kept[rows] = part[:, 0]
    assert kept is not None, "there is a row"
    del places
    return *loss_of(kept, labels, how.reduction, how.ignored), kept.dtype


def _by_chunks(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    logits, labels, total = _saved(ctx)
    logits = logits.detach()
    # Compiled autograd runs this on stand-ins, which nobody holds.
    is_known = ctx.alone is not None and not torch.compiler.is_compiling()
    is_ours = is_known and not graph_is_kept() and is_alone(logits, ctx.alone)
    found = logits if is_ours else torch.empty_like(logits)
    put_gradient(found, gradient, (logits, labels, total), ctx.how, ctx.dtype)
    return found


def _saved(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "leanstep computes the loss some rows at a time, from logits that something has "
            "written to after the loss: write to a copy of them, or have the loss as a whole with "
            f"chunks=False. {error}"
        ) from None
    return saved


def put_gradient(
    place: torch.Tensor,
    gradient: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: Rows,
    dtype: torch.dtype,
) -> None:
    """The gradient of logits, chunk by chunk into its place, which may be theirs.

    `saved` are the logits, the labels and how many rows the loss is about, `dtype` is that of what
    it reads.
    """
    (logits, labels, total), way = saved, how.way
    # The gradient of scores is zero but at each row's label.
    places = labels.masked_fill(labels == how.ignored, 0)
    own = gradients_of_kept(gradient, labels, how.reduction, how.ignored, total, dtype)
    own = own.to(way.scores_dtype(logits.dtype))
    most_rows = min(how.num_rows, len(logits))
    rising = torch.zeros(most_rows, logits.shape[1], dtype=own.dtype, device=logits.device)
    lines = torch.arange(most_rows, device=logits.device)
    for start in range(0, len(logits), how.num_rows):
        rows = slice(start, start + how.num_rows)
        scores = way.scores(logits[rows])
        num_rows = len(scores)
        # Not `scatter_`: some versions have no deterministic one.
        where = lines[:num_rows], places[rows]
        rising[where] = own[rows]
        way.put_gradient(place[rows], rising[:num_rows], scores)
        rising[where] = 0
        # Gone before the next chunk is made.
        del scores


def _at_once(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The same for several gradients in one, as `vmap` hands them over."""
    (logits, labels, total), how = _saved(ctx), ctx.how
    scores = how.way.scores(logits)
    read = how.way.read(scores)
    rising = scores_gradient(gradient, read, labels, how.reduction, how.ignored, total)
    return cast(torch.Tensor, how.way.gradient(rising.to(scores.dtype), scores, logits.dtype))


def _twice_differentiable(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The same as a whole, by torch's own ops: somebody wants the gradient of the gradient."""
    warnings.warn(
        "leanstep computes the loss some rows at a time, and the gradient of its gradient is asked "
        "for: where the two are added up, the last bits are not those of the loss as a whole "
        "(chunks=False).",
        stacklevel=2,
    )
    (logits, labels, _), how = _saved(ctx), ctx.how
    with torch.autocast(logits.device.type, enabled=False):
        scores = functional.log_softmax(logits, 1, dtype=how.way.scores_dtype(logits.dtype))
        loss = functional.nll_loss(
            scores.to(ctx.dtype), labels, reduction=how.reduction, ignore_index=how.ignored
        )
        found: torch.Tensor = torch.autograd.grad(loss, logits, gradient, create_graph=True)[0]
    return found
