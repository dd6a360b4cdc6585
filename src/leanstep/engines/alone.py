"""Whether anybody else holds the bytes of what a node of autograd's graph has saved.

Backward may then write its result into them. Who is overlooked here reads wrong numbers, so all
that may hold something is counted, and compared with the count in a node where nobody does.
"""

import functools
import sys
from typing import Any

import torch

from leanstep.torch_private import address_of, saving_hooks_are_set, storage_use_count


def may_overwrite(logits: torch.Tensor) -> bool:
    """Whether nobody but torch's tensors can hold the bytes of what autograd saves now.

    Hooks that take what is saved may give it back and keep it; memory of others (NumPy's, another
    process's) has owners that torch does not count.
    """
    is_torchs_own = logits.grad_fn is not None and logits.untyped_storage().resizable()
    return is_torchs_own and not saving_hooks_are_set()


def is_alone(saved: torch.Tensor) -> bool:
    """Whether a node's backward and what it has saved are all that holds a tensor's bytes."""
    return _num_holders(saved) == _num_holders_when_alone()


def _num_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors share the bytes, and how many names their storage has in Python."""
    storage = tensor.untyped_storage()
    return storage_use_count(address_of(storage)), sys.getrefcount(storage)


@functools.cache
def _num_holders_when_alone() -> tuple[int, int]:
    """Seen once, in a node that holds its output the same way: versions of torch differ in it."""
    seen = []

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            again = given.detach()
            ctx.save_for_backward(again)
            return given.sum(), again

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            (again,) = ctx.saved_tensors
            again = again.detach()
            seen.append(_num_holders(again))
            return torch.zeros_like(again)

    with torch.enable_grad():
        made = torch.ones(1).requires_grad_() * 1
        loss, _ = Saving.apply(made)  # type: ignore[no-untyped-call]
        del made, _
        loss.backward()
    return seen[0]
