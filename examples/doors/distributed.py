"""Several processes: `torchrun --standalone --nproc-per-node 2 examples/doors/distributed.py`.

DDP (fitted before it is wrapped), gradients averaged by hand without DDP's buckets, and FSDP2 with
the one line. Rank 0 plans, and every rank checks that it got the same plan.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import leanstep
from leanstep import models


def train(called, batch, loss, optimizer):
    torch.manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(4):
        value = loss(called, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def ddp():
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
    return train(DistributedDataParallel(model), batch, loss, optimizer)


def ddp_fitted():
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="70%")
    if dist.get_rank() == 0:
        print(fitted)
    return train(DistributedDataParallel(model), batch, loss, optimizer)


def by_hand():
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
    leanstep.lean(model, optimizer, budget="70%")
    leanstep.reduce_gradients(model, piece="1MiB")
    return train(model, batch, loss, optimizer)


def fsdp(is_lean):
    model, batch, loss, _ = models.build("gpt2-tiny", batch=8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The parameters are others now.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if is_lean:
        leanstep.lean(model, optimizer, budget="80%")
    return train(model, batch, loss, optimizer)


dist.init_process_group("gloo")
results = {"ddp": ddp(), "ddp, fitted": ddp_fitted(), "by hand, lean": by_hand()}
sharded = {"fsdp2": fsdp(False), "fsdp2, lean": fsdp(True)}
for group in (results, sharded):
    if len({tuple(losses) for losses in group.values()}) != 1:
        raise SystemExit(f"rank {dist.get_rank()}: the numbers differ: {group}")
    if dist.get_rank() == 0:
        print(f"{', '.join(group)}: equal, bit for bit")
dist.destroy_process_group()
