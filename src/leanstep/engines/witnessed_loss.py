"""See in a step of the user's whether its loss may be computed in chunks from the next one on.

For the first step of a lazily fitted model, in which torch computes the loss as a whole. While the
scores of all rows are there, the loss is computed some rows at a time as well, and compared; when
backward has the gradient of the logits, that of the last rows is. Nothing of the step is changed.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.chunks import EVEN_ROWS, FLOAT_BYTES, rows_in_chunk
from leanstep.engines.loss import Rows, are_for_rows, get_loss, put_gradient
from leanstep.recorder.losses import given_arguments
from leanstep.step.outcome import same
from leanstep.torch_private.loss import LOSS, LOSS_BACKWARD, SCORES, SCORES_BACKWARD, Way
from leanstep.torch_private.modes import past_every_mode

# The gradient is compared for one row in so many, at least, since these logits are held for it.
_ROWS_PER_COMPARED = 64

_OPS = {SCORES, LOSS, LOSS_BACKWARD, SCORES_BACKWARD}

_UNSEEN = "no call of it was seen that could be"
_TWICE = "its gradient has a gradient, which is summed up in another order then"


class WitnessedLoss:
    """Is told of every op of a step, with what it returns; what it runs itself, it runs `aside`.

    `doubt` says why the loss should stay whole. It is empty once both loss and gradient were seen
    to have the same bits. That is of the last loss: a step with several has none in chunks.
    """

    def __init__(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        self.doubt = _UNSEEN
        self._aside = aside
        self._scores: _Scores | None = None
        self._rows: _LastRows | None = None

    def __call__(self, func: Any, args: Sequence[Any], out: Any) -> None:
        """Look at one op; whatever is in the way is a reason to leave the loss whole."""
        if func not in _OPS or out is NotImplemented:
            return
        has_gradient = torch.is_grad_enabled()
        try:
            with self._aside(), past_every_mode(), torch.no_grad():
                self._see(func, args, out, has_gradient=has_gradient)
        except Exception as error:
            self._rows, self.doubt = None, f"in chunks it raised {error!r}"

    def _see(self, func: Any, args: Sequence[Any], out: Any, *, has_gradient: bool) -> None:
        rows = self._rows
        if func is SCORES:
            self._scores = _Scores(args[0].dtype, out.dtype, out.data_ptr())
        elif func is LOSS:
            self._rows = None
            self.doubt = self._compared(args[0], out[0], has_gradient=has_gradient)
        elif rows is None:
            return
        elif func is LOSS_BACKWARD and args[1].data_ptr() == rows.read:
            rows.rising = args[0]
        elif func is SCORES_BACKWARD and args[1].data_ptr() == rows.scores:
            self._rows = None
            self.doubt = _TWICE if has_gradient else rows.compared(out)

    def _compared(self, read: torch.Tensor, whole: torch.Tensor, *, has_gradient: bool) -> str:
        """What is wrong with the loss in chunks, beside that of torch."""
        given, scores = given_arguments(), self._scores
        if given is None or scores is None or not has_gradient:
            return _UNSEEN
        logits, labels = given["input"], given["target"]
        num_rows = rows_in_chunk(max(1, len(logits)), FLOAT_BYTES * logits.numel())
        if not are_for_rows(num_rows, given):
            return _UNSEEN
        way = scores.way(logits.dtype, read.dtype)
        how = Rows(way, num_rows, given["reduction"], given["ignore_index"])
        with torch.autocast(logits.device.type, enabled=False):
            chunked, total, dtype = get_loss(logits.detach(), labels, how)
        if not same(whole, chunked):
            return "in chunks it had other bits on this device"
        start = (len(logits) - min(num_rows, len(logits) // _ROWS_PER_COMPARED)) // EVEN_ROWS
        last = logits.detach()[start * EVEN_ROWS :]
        # Copies: views would keep all the logits.
        saved = last.clone(), labels[start * EVEN_ROWS :].clone(), total
        place = _Place(weakref.ref(last.untyped_storage()), last.storage_offset(), last.stride())
        self._rows = _LastRows(read.data_ptr(), scores.address, saved, place, how, dtype)
        return "its gradient was not asked for"


@dataclass(frozen=True, slots=True)
class _Scores:
    """Scores that were made: of which type, as which type, and where they are."""

    of: torch.dtype
    dtype: torch.dtype
    address: int

    def way(self, logits: torch.dtype, read: torch.dtype) -> Way:
        """How torch has made them, and read them for the loss."""
        cast = self.of if self.of is not logits else None
        return Way(cast, self.dtype is not self.of, read if read is not self.dtype else None)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where rows of logits are, for as long as somebody holds them."""

    storage: "weakref.ref[torch.UntypedStorage]"
    offset: int
    stride: tuple[int, ...]

    def holds(self, rows: torch.Tensor) -> bool:
        """Whether nobody has written there since, which autograd does not always see."""
        storage = self.storage()
        if storage is None:
            return True
        now = torch.empty(0, dtype=rows.dtype, device=rows.device)
        return same(now.set_(storage, self.offset, rows.shape, self.stride), rows)


@dataclass(slots=True)
class _LastRows:
    """The last rows of logits until backward has their gradient, and where torch has their scores.

    `read` is the address of what the loss reads, and `scores` that of what it is made of; `saved`
    are copies of logits and labels, and how many rows the loss is about.
    """

    read: int
    scores: int
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    place: _Place
    how: Rows
    dtype: torch.dtype
    rising: torch.Tensor | None = None

    def compared(self, whole: torch.Tensor) -> str:
        """What is wrong with the gradient of these rows, beside that of all."""
        rows, num_rows = self.saved[0], len(self.saved[0])
        if self.rising is None:
            return "its gradient is made in another way"
        if not self.place.holds(rows):
            return "its logits are written to before backward"
        rising = self.rising[-num_rows:] if self.rising.dim() else self.rising
        found = torch.empty_like(rows)
        put_gradient(found, rising, self.saved, self.how, self.dtype)
        is_same = same(whole[-num_rows:].to(rows.dtype), found)
        return "" if is_same else "in chunks its gradient had other bits on this device"
