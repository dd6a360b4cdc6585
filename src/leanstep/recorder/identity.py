"""Say of a model and a batch what a plan has to know them again."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from leanstep.ir import Identity, TensorLook
from leanstep.torch_private.tensors import tree_leaves


def identity_of(model: torch.nn.Module, batch: Any = None) -> Identity:
    """Name a model by its class and what its parameters look like, a batch by its tensors."""
    parameters = list(model.named_parameters())
    return Identity(
        model=type(model).__name__,
        num_elements=sum(parameter.numel() for _, parameter in parameters),
        parameters=tuple(TensorLook(name, _look(p)) for name, p in parameters),
        batch=tuple(TensorLook(path, _look(tensor)) for path, tensor in _tensors(batch, "")),
        evaluating=tuple(path for path, module in model.named_modules() if not module.training),
    )


def _look(tensor: torch.Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "one number"
    frozen = (
        ", frozen" if isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad else ""
    )
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}{frozen}"


def _tensors(batch: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, each with its place: `input_ids`, `0`, `targets.boxes.1`."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
        return
    if isinstance(batch, Mapping):
        parts = [(str(name), part) for name, part in batch.items()]
    elif isinstance(batch, (tuple, list)):
        parts = [(str(place), part) for place, part in enumerate(batch)]
    else:
        leaves = tree_leaves(batch)
        parts = [(str(place), leaf) for place, leaf in enumerate(leaves) if leaf is not batch]
    for name, part in parts:
        yield from _tensors(part, f"{path}.{name}" if path else name)
