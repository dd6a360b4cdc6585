"""Every private name of torch's compiler, with what it is for: Dynamo, AOTAutograd, Inductor.

All of them were seen in torch 2.12 and 2.13. Everything is loaded
late: torch takes a second and more to load its compiler.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.fx

from leanstep.torch_private.nodes import Halves, Parts, Run
from leanstep.torch_private.programs import ShortProgram
from leanstep.torch_private.stance import active_compiler

# A joint graph of forward and backward in, a graph of each out: (joint, number of outputs of
# forward, places of inputs that stay where they are) -> (forward, backward).
Partition = Callable[[torch.fx.GraphModule, int, list[int]], tuple[Any, Any]]

# A graph that will be compiled, and whether it is the one of backward, in; out what makes of its
# program the one that shall run in its place.
Wrap = Callable[[torch.fx.GraphModule, bool], Callable[[Run], Run]]


def compile_with_inductor(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    key: str,
    settings: dict[str, Any],
    wrap: Wrap | None = None,
) -> tuple[Callable[..., Any], Halves | None]:
    """Compile what Dynamo has captured, split into forward and backward by a partition of ours.

    `key` names the partition in Inductor's caches, of which only kernels are taken: the partition
    is asked in any case.
    """
    # Late: torch loads its compiler for this.
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
            static = kwargs.get("static_lifetime_input_indices") or []
            return partition(gm, kwargs["num_fwd_outputs"], static)

        def uuid(self) -> str:
            return key

        def __reduce__(self) -> tuple[Any, ...]:
            # Inductor pickles its settings to find what it has compiled before.
            return str, (key,)

    parts, forwards = Parts(), []

    def compile_part(part: Any, part_inputs: Any, **choices: Any) -> Any:
        is_backward = bool(choices.get("is_backward"))
        # First: Inductor's passes put other nodes in the place of those that the graph returns.
        wrapped = None if wrap is None else wrap(part, is_backward)
        parts.begin(part, is_backward)
        compiled: Any = compile_fx_inner(part, part_inputs, **choices)
        short = ShortProgram(compiled)
        if not is_backward:
            forwards.append(short)
        run = short if wrapped is None else _boxed(wrapped(short))
        parts.end(is_backward, run)
        return run

    # What backward may take for granted of a CUDA graph's results, Inductor asks of its own object.
    patches = {**settings, "custom_partitioner_fn": Partitioner(), "triton.cudagraphs": False}
    with _compiling_both():
        compiled: Any = compile_fx(
            graph, list(inputs), inner_compile=compile_part, config_patches=patches
        )
    halves = parts.halves(len(inputs))
    for short in forwards:
        # Of two views of a tensor AOTAutograd may hand over that tensor, which no guard has seen.
        # And hooks of the user's may hand backward another layout than was saved.
        short.is_guarded = halves is not None
    return compiled, halves


def _compiling_both() -> AbstractContextManager[Any]:
    """Have AOTAutograd compile backward together with forward, and neither come from its cache."""
    from torch._functorch import config

    patch: Any = config.patch
    both: AbstractContextManager[Any] = patch(
        enable_autograd_cache=False, force_non_lazy_backward_lowering=True
    )
    return both


def _boxed(run: Run) -> Run:
    """The function, marked as one that takes its arguments in a list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class ShortCall:
    """A function and what torch has compiled of it, past the Python that torch has around a call.

    That takes as long as a few kernels take to launch. Torch's guards are asked as ever: they alone
    decide whether compiled code may run. Where they say no, torch is called, and may compile anew.
    """

    def __init__(self, function: FunctionType, compiled: Callable[..., Any]) -> None:
        code, cells = function.__code__, function.__closure__ or ()
        self._function, self._compiled = function, compiled
        # As the guards want them: what a function is called with, and what it closes over.
        self._names = code.co_varnames[:3]
        free = zip(code.co_freevars, cells, strict=True)
        self._free = {name: cell.cell_contents for name, cell in free}
        # Guards and code of one entry, together: another thread may find another.
        self._known: tuple[Any, weakref.ref[CodeType]] | None = None

    def __call__(self, subject: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it with a first argument and others."""
        known = self._known
        if known is not None and active_compiler() is None:
            guards, code = known[0], known[1]()
            values = subject, args, kwargs
            # Guards that are out of date have lost their entry.
            if (
                guards.cache_entry is not None
                and code is not None
                and guards.check({**self._free, **dict(zip(self._names, values, strict=True))})
            ):
                return self._function_of(code)(subject, *args, **kwargs)
        out = self._compiled(subject, *args, **kwargs)
        self._known = self._last_run()
        return out

    def _last_run(self) -> "tuple[Any, weakref.ref[CodeType]] | None":
        """The guards and the code of what torch has just run: the first of what it has compiled.

        Held weakly: torch cleans up behind code that is gone.
        """
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        own = self._function.__code__
        for entry in _debug_get_cache_entry_list(own)[:1]:
            if entry.code.co_freevars == own.co_freevars:
                return entry.guard_manager, weakref.ref(entry.code)
        return None

    def _function_of(self, code: CodeType) -> FunctionType:
        own = self._function
        names = own.__name__, own.__defaults__, own.__closure__
        return FunctionType(code, own.__globals__, *names)


def is_backward_compiled() -> bool:
    """Whether compiled autograd is on, which looks into backward's graphs past what wraps them."""
    loaded: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return loaded is not None and bool(loaded.compiled_autograd_enabled)


def compile_to_python(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    partition: Partition,
    key: str,
    settings: dict[str, Any],
    wrap: Wrap | None = None,
) -> tuple[Callable[..., Any], Halves | None]:
    """The same without a compiler of C++ or Triton: both graphs run op by op."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import aot_autograd as joint_graphs

    def split(joint: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        static = kwargs.get("static_lifetime_input_indices") or []
        return partition(joint, kwargs["num_fwd_outputs"], static)

    parts = Parts()

    def compile_part(part: Any, _: Any, *, is_backward: bool) -> Any:
        parts.begin(part, is_backward)
        run = joint_graphs.make_boxed_func(part.forward)  # type: ignore[attr-defined]
        if wrap is not None:
            run = _boxed(wrap(part, is_backward)(run))
        parts.end(is_backward, run)
        return run

    backend = aot_autograd(
        fw_compiler=functools.partial(compile_part, is_backward=False),
        bw_compiler=functools.partial(compile_part, is_backward=True),
        partition_fn=split,
        # As under Inductor: who writes an input says so in the graph.
        keep_inference_input_mutations=True,
    )
    with _compiling_both():
        compiled: Callable[..., Any] = backend(graph, list(inputs))
    return compiled, parts.halves(len(inputs))


def compile_alone_with_inductor(graph: torch.fx.GraphModule, settings: dict[str, Any]) -> Run:
    """Compile a graph that has no backward; the function empties the list it is called with."""
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    # Equal blocks share the program, and a CUDA graph would have their results share memory.
    patches = {**settings, "triton.cudagraphs": False}
    # A context of its own: that of the capture knows the layouts of another graph.
    with config.patch(patches), tracing(TracingContext(detect_fake_mode(inputs))):
        compiled: Any = compile_fx_inner(graph, inputs)
    return ShortProgram(compiled)


def result_strides(compiled: Any) -> list[tuple[int, ...] | None]:
    """How a compiled program lays out what it returns, as far as it tells.

    Kernels may save in another order than ops would: convolutions like channels last.
    """
    told = getattr(compiled, "output_strides", None) or ()
    return [_numbers(one) for one in told]


def _numbers(stride: Sequence[Any] | None) -> tuple[int, ...] | None:
    try:
        return None if stride is None else tuple(map(int, stride))
    except (TypeError, ValueError):
        # It depends on a size that is not known beforehand.
        return None


def lay_out_inputs(graph: torch.fx.GraphModule, strides: Sequence[tuple[int, ...]]) -> None:
    """Have a graph that will be compiled expect its inputs in these layouts."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, stride in zip(inputs, strides, strict=True):
        value = node.meta["val"]
        if tuple(value.stride()) != stride:
            node.meta["val"] = value.new_empty_strided(value.shape, stride)


def compile_alone_to_python(graph: torch.fx.GraphModule, settings: dict[str, Any]) -> Run:
    """The same without a compiler of C++ or Triton."""
    return lambda inputs: graph.forward(*inputs)


def extract_graph(
    joint: torch.fx.GraphModule,
    inputs: Sequence[Any],
    made: Sequence[Any],
    outputs: Sequence[Any],
) -> torch.fx.GraphModule:
    """The part of a graph that makes some nodes of others, by those named and no more.

    A node that nobody reads may still do something: draw from a generator.
    """
    fresh = torch.fx.Graph()
    known: dict[Any, Any] = {}
    for node in inputs:
        known[node] = fresh.placeholder(node.name)
        known[node].meta.update(node.meta)
    for node in made:
        known[node] = fresh.node_copy(node, known.__getitem__)
    fresh.output(tuple(known[node] for node in outputs))
    return torch.fx.GraphModule(joint, fresh)


def without_twins(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The joint graph with equal nodes made one, as torch's own partition begins."""
    from torch._functorch.compile_utils import fx_graph_cse

    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    joint.recompile()
    return joint


def split_joint_graph(
    joint: torch.fx.GraphModule, kept: Sequence[Any], num_outputs: int, static: list[int]
) -> tuple[Any, Any]:
    """Forward and backward of a joint graph without twins; `kept` are the nodes handed over."""
    from torch._functorch import partitioners

    primals = [node for node in joint.graph.nodes if is_primal(node)]
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        [*primals, *kept],
        saved_sym_nodes=[],
        num_fwd_outputs=num_outputs,
        static_lifetime_input_nodes=_ordered_set(primals[index] for index in static),
    )
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    early: Any = partitioners.raise_getitems  # type: ignore[attr-defined]
    return early(forward), early(backward)


def hand_over_unread(forward: Any, backward: Any, names: Sequence[str], num_outputs: int) -> None:
    """Have forward save some more of its nodes, which backward gets and does not read.

    Torch's own function leaves out what backward does not read. They come first of all that is
    saved: what is held apart comes last.
    """
    output = forward.graph.output_node()
    (outputs,) = output.args
    saved = outputs[num_outputs:]
    more = [node for node in forward.graph.nodes if node.name in names]
    output.args = (type(outputs)((*outputs[:num_outputs], *more, *saved)),)
    if "desc" in output.meta:
        from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

        numbers = range(len(saved), len(saved) + len(more))
        told = output.meta["desc"]
        more_told = map(SavedForBackwardsAOTOutput, numbers)
        output.meta["desc"] = [*told[:num_outputs], *more_told, *told[num_outputs:]]
    (first,) = (node for node in backward.graph.nodes if node.name == saved[0].name)
    with backward.graph.inserting_before(first):
        for node in more:
            backward.graph.placeholder(node.name).meta.update(node.meta)
    forward.recompile()
    backward.recompile()


def _ordered_set(items: Iterator[Any]) -> Any:
    from torch.utils._ordered_set import OrderedSet

    return OrderedSet(items)


def is_primal(node: Any) -> bool:
    """Whether a node of a joint graph is an input of forward."""
    return node.op == "placeholder" and "tangents" not in str(node.target)


def is_held_apart(node: Any) -> bool:
    """Whether a node that is handed over is not saved: what an autograd.Function puts on `ctx`.

    No hook sees it. Such come last.
    """
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def kept_by_torch(
    joint: torch.fx.GraphModule, num_outputs: int, static: list[int], budget: float
) -> tuple[str, ...]:
    """The nodes that torch's own partition hands over at an `activation_memory_budget`."""
    from torch._functorch import config, partitioners

    alone = copied(joint)
    with config.patch(activation_memory_budget=budget):
        forward, _ = partitioners.min_cut_rematerialization_partition(
            alone, None, num_fwd_outputs=num_outputs, static_lifetime_input_indices=static
        )
    (outputs,) = next(node for node in forward.graph.nodes if node.op == "output").args
    return tuple(node.name for node in outputs[num_outputs:])


def copied(joint: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The same nodes under the same names: `deepcopy` would warn."""
    fresh = torch.fx.Graph()
    outputs: Any = fresh.graph_copy(joint.graph, {})
    fresh.output(outputs).meta.update(joint.graph.output_node().meta)
    return torch.fx.GraphModule(joint, fresh)


def is_operator(target: Any) -> bool:
    """Whether a node calls an operator of torch's, one that has a schema."""
    return isinstance(target, torch._ops.OpOverload)


def operator_returns(operator: Any) -> list[Any]:
    """The results of an operator's schema, each with what it aliases."""
    returns: list[Any] = operator._schema.returns
    return returns


def compiler_errors() -> tuple[type[Exception], ...]:
    """What torch raises before a compiled call has run anything."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException, recompile_limit())


def recompile_limit() -> type[Exception]:
    """What torch raises when a function has been compiled too often."""
    from torch._dynamo import exc

    return exc.FailOnRecompileLimitHit


def cause_in_backend(error: BaseException) -> BaseException | None:
    """The exception that a backend of ours raised, out of Dynamo's wrapping."""
    return getattr(error, "inner_exception", None)
