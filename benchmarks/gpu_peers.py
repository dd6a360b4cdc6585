"""What a user can have today without leanstep, each as a context around a model's blocks."""

import functools
from contextlib import contextmanager

import torch
from torch.utils.checkpoint import checkpoint


@contextmanager
def forwards_replaced(blocks, wrap):
    for block in blocks:
        block.forward = wrap(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def checkpointed(every):
    def method(blocks):
        def wrap(forward):
            return functools.partial(checkpoint, forward, use_reentrant=False)

        return forwards_replaced(blocks[::every], wrap)

    return method


@contextmanager
def regional(blocks, budget=1.0):
    from torch._functorch import config

    torch._dynamo.reset()
    with config.patch(activation_memory_budget=budget):
        for block in blocks:
            block.compile()
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None
            torch._dynamo.reset()


@contextmanager
def regional_checkpointed(blocks):
    torch._dynamo.reset()

    def wrap(forward):
        compiled = torch.compile(forward)
        return functools.partial(checkpoint, compiled, use_reentrant=False)

    with forwards_replaced(blocks, wrap):
        yield
    torch._dynamo.reset()


@contextmanager
def switched_off(blocks):
    """The blocks without what a peer has put in front of them, for a while."""
    compiled = [(block, block._compiled_call_impl) for block in blocks]
    replaced = [(block, forward) for block in blocks if (forward := vars(block).pop("forward", 0))]
    for block in blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in compiled:
            block._compiled_call_impl = call
        for block, forward in replaced:
            block.forward = forward


def offloaded(blocks):
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


PEERS = {
    "checkpoint": checkpointed(1),
    "every2": checkpointed(2),
    "regional": regional,
    "regional-0.5": functools.partial(regional, budget=0.5),
    "regional-0.2": functools.partial(regional, budget=0.2),
    "regional+checkpoint": regional_checkpointed,
    "save_on_cpu": offloaded,
}
