"""What CUDA's allocator would count, where no allocator is at work."""

import dataclasses
from collections.abc import Sequence

import torch

from leanstep.ir import Graph, Op
from leanstep.recorder.signatures import CallSpec, TensorSpec
from leanstep.truth import IdleMeter, cuda_bytes


class ImaginedMeter(IdleMeter):
    """Count storages as CUDA's allocator does; rises follow from the graph (`with_rises`)."""

    sees_fakes = True

    @property
    def is_on_host(self) -> bool:
        """It is another device's memory that is counted."""
        return False

    def nbytes(self, storage: torch.UntypedStorage) -> int:
        """What a storage would take from the allocator."""
        return cuda_bytes(storage.nbytes())

    def draws_on_host(self, result: torch.Tensor) -> bool:
        """On CUDA each op notes where in the stream it drew: no draw depends on the one before."""
        return False


def with_rises(graph: Graph, specs: Sequence[CallSpec]) -> Graph:
    """Let every op raise the level by what it allocates, and by the workspace of its kernel."""
    workspace = [workspace_bytes(spec) for spec in specs]
    ops = tuple(
        dataclasses.replace(op, rise_bytes=_born_bytes(graph, index, op) + workspace[op.cost])
        for index, op in enumerate(graph.ops)
    )
    return dataclasses.replace(graph, ops=ops)


def _born_bytes(graph: Graph, index: int, op: Op) -> int:
    storages = (graph.storages[value.storage] for value in op.writes)
    return sum(storage.nbytes for storage in storages if storage.birth == index)


def workspace_bytes(spec: CallSpec) -> int:
    """What a CUDA kernel allocates for itself, where that is known and large."""
    name = str(spec.func)
    if "attention_backward" in name and name.startswith("aten._scaled_dot_product"):
        # The gradient of the queries is summed up in float32 before it is rounded.
        query = spec.args[1]
        if isinstance(query, TensorSpec) and query.dtype.itemsize < 4:
            return cuda_bytes(4 * torch.Size(query.size).numel())
    return 0
