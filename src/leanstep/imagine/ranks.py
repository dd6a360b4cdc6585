"""One rank of many, on one machine: FSDP2 over a process group in which nobody else is.

Torch's `fake` process group has any number of ranks and moves nothing. Rank 0 is the one to look
at: where parameters do not divide evenly, the first ranks have the larger parts. The blocks are
sharded one by one and what is left as a whole, as FSDP2's own examples do; each is gathered for its
forward, let go, and gathered again for its backward.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from leanstep.errors import InputError
from leanstep.recorder.blocks import guess_blocks
from leanstep.torch_private.fake import layouts_of_shards_apart

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MOST_RANKS = 1024


def check_ranks(ranks: int) -> None:
    """Raise InputError unless so many ranks can be imagined here."""
    if not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise InputError(f"ranks={ranks!r} is not a number of processes from 1 to {MOST_RANKS}")
    if not dist.is_available():
        raise InputError("ranks= needs a torch with torch.distributed")
    if dist.is_initialized():
        raise InputError(
            "ranks= imagines the other processes, and this one has a process group already: call "
            "leanstep.profile in a process of its own"
        )


@contextmanager
def imagined_ranks(ranks: int) -> Iterator["DeviceMesh"]:
    """All ranks as a mesh, of which this process is the first; gone after the block."""
    # Late: it takes a second to load.
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        with layouts_of_shards_apart():
            yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def _apart(model: nn.Module) -> Iterator[nn.Module]:
    """The blocks that may be gathered without the others: they share no parameter with them."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for path in filter(None, guess_blocks(model)[0]):
        module = model.get_submodule(path)
        inside = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        if inside and all(uses[key] == number for key, number in inside.items()):
            yield module


def shard(model: nn.Module, optimizer: torch.optim.Optimizer | None, mesh: "DeviceMesh") -> None:
    """Shard a model block by block, unless it is, and let its optimizer have the shards."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    if optimizer is not None and optimizer.state:
        raise InputError("the factory's optimizer has stepped: with ranks= it must be a new one")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in list(_apart(model)):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shards = dict(model.named_parameters())
    for group in optimizer.param_groups if optimizer is not None else ():
        group["params"] = [
            shards[names[id(whole)]] if id(whole) in names else whole for whole in group["params"]
        ]
