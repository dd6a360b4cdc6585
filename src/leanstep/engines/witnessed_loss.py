"""See in a step of the user's whether its loss may be computed in chunks from the next one on.

For the first step of a lazily fitted model, in which torch computes the loss as a whole. While the
scores of all rows are there, the loss is computed some rows at a time as well, and compared; when
backward has the gradient of the logits, that of the last rows is. Nothing of the step is changed.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from leanstep.chunks import EVEN_ROWS, FLOAT_BYTES, rows_in_chunk
from leanstep.engines.loss import Rows, by_name, by_rows, known_way, put_gradient
from leanstep.outcome import same
from leanstep.torch_loss import taken_off, unhooked
from leanstep.torch_private import past_every_mode

# The gradient is compared for one row in so many, at least, since these logits are held for it.
_ROWS_PER_COMPARED = 64

_UNSEEN = "no call of it was seen that could be"


class WitnessedLoss(TorchFunctionMode):
    """Watches a forward for its cross entropy; what it runs itself, it runs `aside`.

    `doubt` says why the loss should stay whole. It is empty once both loss and gradient were seen
    to have the same bits.
    """

    def __init__(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self.doubt = _UNSEEN
        self._aside = aside
        self._handles: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Stand in front of every function of torch, and look at what one of them returns."""
        result = func(*args, **(kwargs or {}))
        if func is functional.cross_entropy:
            self._try(lambda: self._see_loss(result, by_name(args, kwargs or {})))
        return result

    def watch(self) -> None:
        """Look at every function from here on: the forward begins."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Look no more: the forward has ended."""
        taken_off(self)

    def _try(self, compare: Callable[[], str]) -> None:
        """Compare without a trace; whatever is in the way is a reason to leave the loss whole."""
        try:
            with self._aside(), past_every_mode(), unhooked():
                self.doubt = compare()
        except Exception as error:
            self.doubt = f"in chunks it raised {error!r}"

    def _see_loss(self, whole: torch.Tensor, given: Mapping[str, Any]) -> str:
        input, target = given["input"], given["target"]
        if not (isinstance(input, torch.Tensor) and input.dim() == 2 and input.requires_grad):
            return _UNSEEN
        num_rows = rows_in_chunk(max(1, len(input)), FLOAT_BYTES * input.numel())
        way = known_way(num_rows, given)
        if way is None:
            return _UNSEEN
        with torch.enable_grad():
            chunked = by_rows(num_rows, {**given, "input": input.detach().requires_grad_()})
        if chunked is None or not same(whole.detach(), chunked.detach()):
            return "in chunks it had other bits on this device"
        node = _node_of(whole, input)
        if node is None:
            return _UNSEEN
        _, _, total = chunked.grad_fn.saved_tensors  # type: ignore[union-attr]
        how = Rows(way, num_rows, given["reduction"], given["ignore_index"])
        start = (len(input) - min(num_rows, len(input) // _ROWS_PER_COMPARED)) // EVEN_ROWS
        start *= EVEN_ROWS
        # Copies: views would keep all the logits.
        saved = input[start:].detach().clone(), target[start:].clone(), total
        rows = _LastRows(start, saved, how, whole.dtype)
        self._handles = [
            whole.grad_fn.register_prehook(rows.see_rising),  # type: ignore[union-attr]
            node.register_hook(lambda gradients, _: self._see_gradient(rows, gradients[0])),
        ]
        return "its gradient was not asked for"

    def _see_gradient(self, rows: "_LastRows", gradient: torch.Tensor) -> None:
        self._try(lambda: rows.compared(gradient))
        while self._handles:
            self._handles.pop().remove()


@dataclass(slots=True)
class _LastRows:
    """The logits of the rows from `start` on, until backward has their gradient."""

    start: int
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    how: Rows
    dtype: torch.dtype
    rising: torch.Tensor | None = None

    def see_rising(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Note the gradient of the loss: of the whole one, or of every row."""
        self.rising = gradients[0]

    def compared(self, whole: torch.Tensor) -> str:
        """What is wrong with the gradient of these rows, beside that of all."""
        assert self.rising is not None, "the loss has its gradient before the logits have theirs"
        rising = self.rising[self.start :] if self.rising.dim() else self.rising
        with torch.no_grad():
            found = torch.empty_like(self.saved[0])
            put_gradient(found, rising, self.saved, self.how, self.dtype)
        is_same = same(whole[self.start :], found)
        return "" if is_same else "in chunks its gradient had other bits on this device"


def _node_of(loss: torch.Tensor, logits: torch.Tensor) -> Any:
    """The node whose result in backward is what a loss adds to the gradient of its logits."""
    edge = torch.autograd.graph.get_gradient_edge(logits)
    node = loss.grad_fn
    while node is not None and node.next_functions:
        following, place = node.next_functions[0]
        if (following, place) == (edge.node, edge.output_nr):
            return node
        node = following
    return None
