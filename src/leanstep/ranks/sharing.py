"""One plan for all processes: rank 0 plans, everybody gets it, and nobody goes on alone.

Ranks measure different times, so each would find another plan, and a rank that runs other
collectives than the others hangs. So what a model looks like is compared first, on every rank with
every other; rank 0 plans; all ranks receive the plan and compare its checksum. An error on one rank
is raised on all of them. Without a process group, or with one rank, nothing happens.
"""

import hashlib
import json
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from leanstep.errors import InputError, LeanstepError, PlanError
from leanstep.ir import Identity, Plan, codec

Result = TypeVar("Result")


def num_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def together(work: Callable[[], Result]) -> Result:
    """Do something on every rank; if it fails on one, it fails on all of them.

    The error raised is the rank's own, or that of the first rank that has one.
    """
    if num_ranks() == 1:
        return work()
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    said: list[str | None] = [None] * num_ranks()
    dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
    if failed:
        raise LeanstepError(f"rank {failed[0][0]} failed: {failed[0][1]}")
    found: Result = result
    return found


def check_same(identity: Identity) -> None:
    """Raise InputError on every rank unless all have a model that looks the same."""
    if num_ranks() == 1:
        return
    found: list[Any] = [None] * num_ranks()
    dist.all_gather_object(found, identity)
    for rank, other in enumerate(found):
        different = found[0].model_differences(other)
        if different:
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            what = (
                different[0]
                .replace("in the plan", "on rank 0")
                .replace(" here", f" on rank {rank}")
            )
            raise InputError(
                f"ranks 0 and {rank} have different models: {what}{more}. "
                "All ranks must train the same model."
            )


def refuse_communicating(model: nn.Module) -> None:
    """Raise InputError for a model whose ranks wait for each other: one cannot run it alone."""
    if num_ranks() == 1:
        return
    # Late: they take a second to load.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    kinds = (nn.parallel.DistributedDataParallel, nn.SyncBatchNorm, FSDPModule)
    for path, module in model.named_modules():
        if isinstance(module, kinds) or any(
            isinstance(p, DTensor) for p in module.parameters(recurse=False)
        ):
            where = f"{path} is" if path else "the model is"
            raise InputError(
                f"{where} {type(module).__name__}, which waits for the other ranks, and fit runs "
                "steps on rank 0 alone: fit the model before it is wrapped or sharded, or call "
                "leanstep.lean(model, optimizer, budget=...), which runs none of its own"
            )


def from_rank_0(work: Callable[[], Result]) -> Result:
    """What rank 0 made of some work, on every rank; an error of its is raised everywhere."""
    if num_ranks() == 1:
        return work()
    outcome: Any = None
    if dist.get_rank() == 0:
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, _portable(error))
    box = [outcome]
    dist.broadcast_object_list(box, src=0)
    result, failure = box[0]
    if failure is not None:
        raise failure
    found: Result = result
    return found


def _portable(error: Exception) -> Exception:
    """The error, if it can be sent, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return LeanstepError(f"rank 0 failed: {type(error).__name__}: {error}")
    return error


def shared_plan(make_plan: Callable[[], Plan]) -> Plan:
    """The plan of rank 0, with the same checksum on every rank."""
    plan = from_rank_0(make_plan)
    if num_ranks() == 1:
        return plan
    text = json.dumps(codec.to_plain(plan))
    checksum = hashlib.sha256(text.encode()).hexdigest()
    found = [""] * num_ranks()
    dist.all_gather_object(found, checksum)
    if other := [rank for rank, one in enumerate(found) if one != found[0]]:
        raise PlanError(f"rank {other[0]} received another plan than rank 0: nothing was applied")
    return plan
