"""Private names that a node of our own in autograd's graph needs, and AOTAutograd's wrappers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from leanstep.torch_private.autograd import top_saving_hooks

# A program as the compiler makes it: it empties the list of arguments that it is called with.
Run = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Halves:
    """The programs of forward and backward, and all that torch does around them.

    Forward returns its outputs and then what it saves; backward takes what was saved and then a
    gradient of each output that `has_gradient`, laid out as `strides` say. `written` are inputs
    that forward writes and autograd shall know of. `donated` are places among what was saved that
    backward may write into.
    `is_deterministic`: compiled where torch was asked for such algorithms alone.
    """

    forward: Run
    backward: Run
    has_gradient: tuple[bool, ...]
    strides: tuple[tuple[int, ...], ...]
    written: tuple[int, ...]
    donated: tuple[int, ...]
    is_deterministic: bool


# What AOTAutograd's wrappers see to beside that, by the name of its metadata.
_SEEN_TO = (
    "dynamic_outputs",
    "dynamic_saved_tensors_idxs",
    "indices_of_inputs_that_requires_grad_with_mutations_in_bw",
    "is_rng_op_functionalized",
    "num_backward_tokens",
    "num_graphsafe_rng_states",
    "num_intermediate_bases",
    "num_mutated_inp_runtime_indices",
    "num_opaque_objects_saved_for_bw",
    "num_outputs_aliased",
    "num_symints_saved_for_bw",
    "num_tensors_saved_with_no_vc_check",
    "num_unsafe_view_outputs",
    "tokens",
)
# The same, from torch 2.12 on.
_SEEN_TO_LATER = ("act_input_indices",)
# The versions of torch whose wrappers and programs were read.
READ_VERSIONS = ("2.11", "2.12", "2.13")


class Parts:
    """What AOTAutograd has compiled while it made one function."""

    def __init__(self) -> None:
        self._runs: dict[bool, Run] = {}
        self._inputs: dict[bool, list[Any]] = {}
        self._outputs: dict[bool, Sequence[Any]] = {}
        self._metadata: Any = None
        self._has_inlined_hooks = False

    def begin(self, graph: torch.fx.GraphModule, is_backward: bool) -> None:
        """Note a graph as it is before the compiler has changed it."""
        from torch._guards import TracingContext

        nodes = graph.graph.nodes
        self._inputs[is_backward] = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        outputs: Any = graph.graph.output_node().args[0]
        self._outputs[is_backward] = outputs
        context = TracingContext.try_get()
        self._metadata = None if context is None else context.fw_metadata
        # Such hooks become part of both graphs, and torch switches them off around calls.
        hooks = top_saving_hooks() or ()
        self._has_inlined_hooks = any(isinstance(hook, torch.fx.GraphModule) for hook in hooks)

    def end(self, is_backward: bool, run: Run) -> None:
        """Note what has become of it."""
        self._runs[is_backward] = run

    def halves(self, num_inputs: int) -> Halves | None:
        """Both, if torch's wrappers do no more than `Halves` says."""
        metadata = self._metadata
        if len(self._runs) < 2 or metadata is None or self._has_inlined_hooks:
            return None
        wanted = [info.requires_grad for info in metadata.input_info]
        given = [output is not None for output in self._outputs[True]]
        if not is_plain(metadata) or len(self._inputs[False]) != num_inputs or given != wanted:
            return None
        has_gradient = tuple(info.requires_grad for info in metadata.output_info)
        gradients = self._inputs[True][-sum(has_gradient) :]
        num_saved = len(self._outputs[False]) - len(has_gradient)
        if num_saved + len(gradients) != len(self._inputs[True]):
            return None
        return Halves(
            self._runs[False],
            self._runs[True],
            has_gradient,
            strides=tuple(tuple(gradient.stride()) for gradient in gradients),
            written=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
            donated=tuple(metadata.bw_donated_idxs or ()),
            is_deterministic=metadata.deterministic is not False,
        )


def is_plain(metadata: Any) -> bool:
    """Whether AOTAutograd's wrappers have nothing to see to but what `Halves` says."""
    from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

    if not torch.__version__.startswith(READ_VERSIONS):
        return False
    seen_to = [getattr(metadata, name) for name in _SEEN_TO]
    seen_to += [getattr(metadata, name, None) for name in _SEEN_TO_LATER]
    classes = (
        *metadata.subclass_inp_meta,
        *metadata.subclass_fw_graph_out_meta,
        *metadata.subclass_tangent_meta,
    )
    return (
        not any(seen_to)
        and metadata.grad_enabled_mutation is None
        and all(isinstance(one, PlainTensorMeta) for one in classes)
        and all(_is_own_tensor(info, OutputType) for info in metadata.output_info)
        and any(info.requires_grad for info in metadata.output_info)
    )


def _is_own_tensor(info: Any, types: Any) -> bool:
    wants_gradient = getattr(info, "requires_grad_for_backward", info.requires_grad)
    is_own = info.output_type is types.non_alias and issubclass(info.raw_type, torch.Tensor)
    return is_own and wants_gradient == info.requires_grad


# Autocast off for a while, at the price of one call.
AutocastOff = torch._C._DisableAutocast

# Whether the backward that runs now leaves what was saved in place: another may follow.
graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def apply_node(node: type[torch.autograd.Function], inputs: Sequence[Any]) -> Any:
    """Put a node into the graph; transforms of torch.func are not asked for."""
    return super(torch.autograd.Function, node).apply(*inputs)  # type: ignore[misc]


def save(ctx: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Have a node save some tensors; a view would keep alive what its base was made of."""
    ctx.save_for_backward(*[x.detach() if x._is_view() else x for x in tensors])


def let_go_of_saved(ctx: Any) -> None:
    """Drop a node's hold on what it saved while its backward runs, unless another may follow."""
    ctx.maybe_clear_saved_tensors()


def leave_out_gradients(ctx: Any, outputs: Sequence[torch.Tensor]) -> None:
    """Have some outputs without a gradient, and no zeros in the place of it."""
    ctx.mark_non_differentiable(*outputs)
    ctx._materialize_non_diff_grads = False


def once_differentiated(compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Gradients that raise where somebody asks for theirs."""
    with torch.no_grad():
        gradients = compute()
    message = b"leanstep: a compiled block can be differentiated once, not twice"
    refusal: Any = torch._C._functions.DelayedError(message, len(gradients))
    # It refuses what comes of something that needs a gradient.
    marked = (g if g is None else g.detach().requires_grad_() for g in gradients)
    refused: tuple[Any, ...] = refusal(*marked)
    return refused
