"""Tell what autograd would do in place if nobody recorded it.

When two gradients meet, the engine adds the second into the first if nobody else holds it. The
backward of indexing (`gather`, `x[index]`, `max`, `sort`) writes into zeros it has just made. Under
any dispatch mode both decline to, and a recording would show an allocation that never happens
otherwise. So such an op is judged here as torch would judge it without the mode.
"""

from collections.abc import Sequence
from typing import Any

import torch

from leanstep.ir import Value
from leanstep.torch_private.autograd import current_node, in_backward, node_number
from leanstep.torch_private.modes import TorchDispatchMode
from leanstep.torch_private.tensors import storage_address, storage_use_count, tensor_use_count

# What torch's own backward formulas call instead of the op in place while a mode is on.
_SCATTERS = frozenset(
    {
        "aten.index_add.default",
        "aten.index_put.default",
        "aten.masked_scatter.default",
        "aten.scatter.src",
        "aten.scatter_add.default",
    }
)


class InPlace:
    """Follow which node made which storage, and judge each sum and scatter in backward."""

    def __init__(self) -> None:
        self._maker: dict[int, int] = {}
        self._alone = _counts_when_alone()

    def wrote(self, values: Sequence[Value]) -> None:
        """Note which node's run wrote these values."""
        if in_backward() and (node := current_node()) is not None:
            number = node_number(node)
            self._maker.update((value.storage, number) for value in values)

    def sees(self, name: str, args: Sequence[Any], first: Value | None = None) -> bool:
        """Say whether torch would do this op in place."""
        if not in_backward() or torch.is_grad_enabled() or first is None:
            return False
        node = current_node()
        if node is None:
            return False
        own = self._maker.get(first.storage) == node_number(node)
        if name in _SCATTERS:
            # A Function of the user's does what it says.
            return own and not isinstance(node, torch.autograd.function.FunctionCtx)
        return name == "aten.add.Tensor" and self._is_engines(node, args, own)

    def _is_engines(self, node: Any, args: Sequence[Any], own: bool) -> bool:
        """Whether a sum is one that the engine would do into its first summand."""
        if len(args) != 2 or not isinstance(args[1], torch.Tensor):
            return False
        if own and not _has_double_edge(node):
            # The node adds two results of its own: an op like any other.
            return False
        old, new = args
        return old.shape == new.shape and _is_dense(old) and _counts(args) == self._alone


def _has_double_edge(node: Any) -> bool:
    """Whether a node sends two gradients to one place, as the product of a tensor with itself."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return len(set(edges)) < len(edges)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without overlap, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def _counts(args: Sequence[Any]) -> tuple[int, int]:
    """The references to the first summand and to its storage, as seen from here."""
    return (
        tensor_use_count(args[0]),
        storage_use_count(storage_address(args[0])),
    )


class _Probe(TorchDispatchMode):
    counts: tuple[int, int] = (0, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if str(func) == "aten.add.Tensor" and in_backward():
            self._look(args)
        return func(*args, **(kwargs or {}))

    def _look(self, args: Sequence[Any]) -> None:
        self.counts = self._look_deeper(args)

    def _look_deeper(self, args: Sequence[Any]) -> tuple[int, int]:
        return _counts(args)


def _counts_when_alone() -> tuple[int, int]:
    """See, in a sum that nobody else holds, what the counts are with this version of torch."""
    leaf = torch.ones(2, requires_grad=True)
    with torch.enable_grad(), _Probe() as probe:
        shared = leaf * 1.5
        (shared * 2.0 + shared * 3.0).sum().backward()
    counts: tuple[int, int] = probe.counts
    return counts
