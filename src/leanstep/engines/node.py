"""A compiled block in autograd's graph, without what AOTAutograd wraps around forward and backward.

Its wrappers see to views, writes, draws, subclasses and sizes that change, and ask at every call
whether there are any. Most blocks have none of that, and then this is all that is left to do. It
takes the CPU a fraction of the time, which counts where kernels are short.
"""

from collections.abc import Callable
from typing import Any

import torch

from leanstep.eager import never_compiled
from leanstep.engines.apart import laid_out
from leanstep.step.training import autocast_is_on
from leanstep.torch_private.compiler import is_backward_compiled
from leanstep.torch_private.nodes import (
    AutocastOff,
    Halves,
    apply_node,
    graph_is_kept,
    leave_out_gradients,
    let_go_of_saved,
    once_differentiated,
    save,
)
from leanstep.torch_private.stance import active_compiler, leave_uncompiled


def short_way(run: Callable[..., Any], halves: Halves | None) -> Callable[..., Any]:
    """What torch has made of a graph, or the same with less around it where that is possible."""
    if halves is None:
        return run
    node = _node_of(halves)

    def call(*inputs: Any) -> Any:
        # Compiled autograd knows torch's own; and a block may switch gradients on by itself.
        if is_backward_compiled() or not torch.is_grad_enabled():
            return run(*inputs)
        if not autocast_is_on():
            return apply_node(node, inputs)
        # Casts are in the graph.
        with AutocastOff():
            return apply_node(node, inputs)

    return call


def _node_of(halves: Halves) -> type[torch.autograd.Function]:
    num_outputs = len(halves.has_gradient)
    without = [place for place, has in enumerate(halves.has_gradient) if not has]
    uncompiled = never_compiled(_backward)

    class CompiledBlockNode(torch.autograd.Function):
        # From torch 2.13 on gradients come in a list, and can be let go of one by one.
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            results = halves.forward(list(inputs))
            save(ctx, results[num_outputs:])
            if halves.written:
                torch.autograd.graph.increment_version([inputs[at] for at in halves.written])
            if without:
                leave_out_gradients(ctx, [results[place] for place in without])
            return tuple(results[:num_outputs])

        @staticmethod
        def backward(ctx: Any, *given: Any) -> tuple[Any, ...]:
            gradients = given[0] if isinstance(given[0], list) else list(given)
            # A step that is compiled as a whole has its compiler at work here.
            run = _backward if active_compiler() is None else uncompiled
            return run(halves, ctx, gradients)

    leave_uncompiled(CompiledBlockNode.backward)
    return CompiledBlockNode


def _backward(halves: Halves, ctx: Any, gradients: list[Any]) -> tuple[Any, ...]:
    _check(halves)
    arguments = [*ctx.saved_tensors, *_wanted(halves, gradients)]
    if graph_is_kept():
        # Another backward follows, and needs what this one would write into.
        for place in halves.donated:
            arguments[place] = _copied(arguments[place])
    let_go_of_saved(ctx)
    if torch.is_grad_enabled():
        return once_differentiated(lambda: _gradients(halves, arguments))
    return _gradients(halves, arguments)


def _wanted(halves: Halves, gradients: list[Any]) -> list[torch.Tensor]:
    """The gradients that backward's program takes, as it takes them; `gradients` is emptied."""
    pairs = zip(gradients, halves.has_gradient, strict=True)
    wanted = [gradient for gradient, has in pairs if has]
    gradients.clear()
    for place, stride in enumerate(halves.strides):
        gradient = wanted[place]
        if type(gradient) not in (torch.Tensor, torch.nn.Parameter):
            kind = type(gradient).__name__
            raise RuntimeError(
                f"leanstep: a compiled block's output gets a {kind} for its gradient, and its "
                'backward takes plain tensors: hand it one, or fit with engine="replay"'
            )
        wanted[place] = laid_out(gradient, stride)
    return wanted


def _gradients(halves: Halves, arguments: list[Any]) -> tuple[Any, ...]:
    if not autocast_is_on():
        return tuple(halves.backward(arguments))
    with AutocastOff():
        return tuple(halves.backward(arguments))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout, which `clone` does not promise."""
    fresh = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return fresh.copy_(tensor)


def _check(halves: Halves) -> None:
    """Refuse what backward was not compiled for, as torch does."""
    if not halves.is_deterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "leanstep: torch.use_deterministic_algorithms(True) was called between forward and "
            "backward of a compiled block: call it before forward"
        )
