"""Whether anybody else holds the bytes of what a node of autograd's graph has saved.

Backward may then write its result into them. Who is overlooked here reads wrong numbers, so all
that may hold something is counted, and compared with the count in a node where nobody else does.
What nobody can count: a copy of the bytes that is under way on another stream of a GPU, and GPU
memory that another process was given.
"""

import functools
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from leanstep.torch_private.autograd import top_saving_hooks
from leanstep.torch_private.modes import is_traced
from leanstep.torch_private.tensors import address_of, storage_use_count

# How many tensors share some bytes, and how many names their storage has in Python.
Holders = tuple[int, int]


def holders_when_alone(given: torch.Tensor) -> Holders | None:
    """Who will hold, in a node's backward, what it saves of a tensor now, if nobody else does.

    None where that cannot be known: memory that torch has not allocated itself, NumPy's for one,
    has other owners, and hooks that take what is saved may keep it. Those of a recording do not.
    """
    if not given.untyped_storage().resizable():
        return None
    hooks = top_saving_hooks()
    if hooks is None:
        return _when_alone(is_recorded=False)
    recording = getattr(hooks[0], "__self__", None)
    if not getattr(recording, "lets_overwrite", False):
        return None
    return _when_alone(is_recorded=True)


def is_alone(saved: torch.Tensor, expected: Holders) -> bool:
    """Whether a node's backward and what it has saved are all that holds a tensor's bytes."""
    is_sent = saved.device.type == "cpu" and saved.untyped_storage().is_shared()
    return not is_sent and not is_traced() and _holders(saved) == expected


def _holders(tensor: torch.Tensor) -> Holders:
    storage = tensor.untyped_storage()
    return storage_use_count(address_of(storage)), sys.getrefcount(storage)


class _Saving(torch.autograd.Function):
    """Holds one of its outputs, as a node does that asks `is_alone`."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, seen: list[Holders]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        again = given.detach()
        ctx.save_for_backward(again)
        ctx.seen = seen
        return given.sum(), again

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (again,) = ctx.saved_tensors
        again = again.detach()
        ctx.seen.append(_holders(again))
        return torch.zeros_like(again), None


@functools.cache
def _when_alone(is_recorded: bool) -> Holders:
    """Seen in such a node, for versions of torch differ in it.

    On a thread of its own: modes and hooks that are set around here hold what they like.
    """
    seen: list[Holders] = []
    thread = threading.Thread(target=_look, args=(seen, is_recorded))
    thread.start()
    thread.join()
    return seen[0]


def _look(seen: list[Holders], is_recorded: bool) -> None:
    given = torch.ones(1).requires_grad_() * 1
    with _recording_hooks() if is_recorded else nullcontext():
        loss, _ = _Saving.apply(given, seen)  # type: ignore[no-untyped-call]
    del given, _
    loss.backward()


def _recording_hooks() -> AbstractContextManager[None]:
    """Hooks that hold what a recording's hooks do."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: [x.detach()], lambda held: held[0])
