"""Average gradients over processes by hand, after backward, in flat pieces of bounded size.

DDP copies every gradient into buckets, which it holds for as long as the model lives: as many bytes
again as the gradients. In return it sends the first buckets while backward still runs. Where memory
is short, gradients are better averaged when backward has ended, a piece at a time: what it takes is
one piece. (VISSL calls this `MANUAL_GRADIENT_REDUCTION`.)

The numbers are DDP's: each gradient is multiplied by one over the number of processes, then summed;
parameters and buffers start as those of rank 0, and buffers are taken from there before a forward
whose gradients are averaged. A parameter that was used on some ranks counts as zero on the others,
and one that was used nowhere keeps what it has.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from leanstep.errors import InputError
from leanstep.torch_private.autograd import at_end_of_backward
from leanstep.units import parse_budget


class Reduction:
    """The averaging of a model's gradients; `remove()` ends it."""

    def __init__(
        self, model: torch.nn.Module, group: Any, piece_bytes: int, *, broadcast_buffers: bool
    ) -> None:
        self._model, self._group, self._piece_bytes = model, group, piece_bytes
        self._broadcasts = broadcast_buffers
        self._is_on, self._is_queued, self._is_due = True, False, True
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._handles = [p.register_post_accumulate_grad_hook(self._queue) for p in self._trained]
        self._handles.append(model.register_forward_pre_hook(self._before_forward))
        self._send([*model.parameters(), *model.buffers()])

    def remove(self) -> None:
        """Leave gradients as backward makes them."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients inside the block without averaging them."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def reduce(self) -> None:
        """Average all gradients now."""
        self._fill_missing()
        gradients = [p.grad for p in reversed(self._trained) if p.grad is not None]
        for _, alike in groupby(gradients, key=lambda gradient: (gradient.dtype, gradient.device)):
            self._reduce_alike(list(alike))

    def _queue(self, _: torch.Tensor) -> None:
        if self._is_on and not self._is_queued:
            self._is_queued = True
            at_end_of_backward(self._after_backward)

    def _after_backward(self) -> None:
        self._is_queued = False
        with torch.no_grad():
            self.reduce()

    def _before_forward(self, *_: Any) -> None:
        if self._is_due and self._broadcasts:
            self._send(self._model.buffers())
        self._is_due = self._is_on and torch.is_grad_enabled()

    def _send(self, tensors: Iterable[torch.Tensor]) -> None:
        source = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        for tensor in tensors:
            dist.broadcast(tensor.detach(), source, self._group)

    def _fill_missing(self) -> None:
        """Let every rank have the gradients that some rank has."""
        has = [parameter.grad is not None for parameter in self._trained]
        device = self._trained[0].device
        used = torch.tensor(has, dtype=torch.int32, device=device)
        dist.all_reduce(used, dist.ReduceOp.MAX, self._group)
        for parameter, is_used in zip(self._trained, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _reduce_alike(self, gradients: list[torch.Tensor]) -> None:
        capacity = max(1, self._piece_bytes // gradients[0].element_size())
        total = sum(gradient.numel() for gradient in gradients)
        piece = torch.empty(
            min(capacity, total), dtype=gradients[0].dtype, device=gradients[0].device
        )
        scale = 1 / dist.get_world_size(self._group)
        for parts in _filled(gradients, piece.numel()):
            filled = 0
            for part in parts:
                torch.mul(part, scale, out=piece[filled : filled + part.numel()])
                filled += part.numel()
            dist.all_reduce(piece[:filled], dist.ReduceOp.SUM, self._group)
            for part in reversed(parts):
                filled -= part.numel()
                part.copy_(piece[filled : filled + part.numel()])


def _filled(gradients: list[torch.Tensor], capacity: int) -> Iterator[list[torch.Tensor]]:
    """Flat parts of gradients, as many at a time as fill a piece."""
    parts: list[torch.Tensor] = []
    room = capacity
    for gradient in gradients:
        flat = _flat(gradient)
        start = 0
        while start < flat.numel():
            part = flat[start : start + room]
            parts.append(part)
            start, room = start + part.numel(), room - part.numel()
            if not room:
                yield parts
                parts, room = [], capacity
    if parts:
        yield parts


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient's memory as one row, whatever the order of its dimensions."""
    is_dense = gradient.layout is torch.strided
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True) if is_dense else []
    if not is_dense or not gradient.permute(order).is_contiguous():
        raise InputError(
            f"a gradient of {tuple(gradient.shape)} is sparse or has gaps: "
            "reduce_gradients averages dense ones; use DistributedDataParallel"
        )
    return gradient.permute(order).view(-1)


def reduce_gradients(
    model: torch.nn.Module,
    *,
    group: Any = None,
    piece: str | int = "25MiB",
    broadcast_buffers: bool = True,
) -> Reduction:
    """Train a model on several processes as DistributedDataParallel does, without its buckets.

    Call it on every rank once the model is on its device, and use the model itself in the loop.
    Averaging happens when backward ends, before anything of yours sees the gradients.

    Args:
        model: the same on every rank; its parameters and buffers are taken from rank 0.
        group: the process group; by default the world.
        piece: how much memory one piece may take.
        broadcast_buffers: take the buffers of rank 0 before every forward, as DDP does.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            "there is no process group: call torch.distributed.init_process_group first "
            "(torchrun sets the variables that it reads)"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError("the model has no trainable parameters: there are no gradients to average")
    return Reduction(model, group, parse_budget(piece), broadcast_buffers=broadcast_buffers)
