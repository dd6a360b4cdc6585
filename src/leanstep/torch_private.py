"""Every name of torch that begins with an underscore, with what it is for.

All of them were seen in torch 2.11 (CUDA) and 2.13 (CPU). When a new torch breaks leanstep, the
repair belongs in this file.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules import module as _modules

# The step hooks that apply to every optimizer of the process.
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

# Flattens nested arguments (tuples, dicts, registered dataclasses) into leaves.
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten


class TorchDispatchMode(_TorchDispatchMode):
    """Sees every op below autograd while it is active; torch's own has no annotations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


def storage_address(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, valid while the storage lives."""
    return address_of(tensor.untyped_storage())


def address_of(storage: torch.UntypedStorage) -> int:
    """The identity of a storage, valid while it lives."""
    address: int = storage._cdata
    return address


# What a tensor class has that is made of others, as DTensor is; same name in torch 2.11 to 2.13.
_WRAPS = "__tensor_flatten__"


def wraps_others(kind: type) -> bool:
    """Whether tensors of a class are made of other tensors: they have no memory themselves."""
    return hasattr(kind, _WRAPS)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is spread over several; any other is itself."""
    if not wraps_others(type(tensor)):
        return tensor
    loaded = sys.modules.get("torch.distributed.tensor")
    if loaded is None or not isinstance(tensor, loaded.DTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def storage_use_count(address: int) -> int:
    """How many tensors share a storage that is alive and whose Python object was once made."""
    count: int = torch._C._storage_Use_Count(address)
    return count - _counts_of_python_object()


@functools.cache
def _counts_of_python_object() -> int:
    """What a storage's Python object adds to its count: none or one, by torch's version."""
    tensor = torch.empty(1)
    count: int = torch._C._storage_Use_Count(storage_address(tensor))
    return count - 1


def tensor_use_count(tensor: torch.Tensor) -> int:
    """How many references a tensor has in C++ and Python together."""
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


def current_node() -> Any | None:
    """The autograd node being run, or the last one while its gradients are handed on."""
    return torch._C._current_autograd_node()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call something when the backward that runs now has ended; what DDP does."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def node_number(node: Any) -> int:
    """The number a node got when forward created it."""
    number: int = node._sequence_nr()
    return number


def next_node_number() -> int:
    """The number that the next node made on this thread will get."""
    return torch._C._autograd._get_sequence_nr()


def memory_event_bytes(profiler: torch.profiler.profile) -> list[int]:
    """The CPU allocator's events in order: bytes taken (positive) or given back (negative)."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return [event.nbytes() for event in results.events() if event.name() == "[memory]"]


def with_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """The tensor as one whose conjugate or negative is taken when it is read."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


# Whether autocast is on for any device, in one call.
any_autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled


def saving_hooks_work() -> bool:
    """Whether tensors that autograd saves can be replaced; under torch.func they cannot.

    Under vmap they are batches without a storage.
    """
    enabled: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    # In forward mode a tensor carries a second one, which is not saved through hooks.
    return enabled and not is_transformed and torch.autograd.forward_ad._current_level < 0


def saving_hooks_are_set() -> bool:
    """Whether somebody's hooks take what autograd saves: `save_on_cpu`, or a checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def top_saving_hooks() -> tuple[Any, Any] | None:
    """The innermost hooks that take what autograd saves."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def is_traced() -> bool:
    """Whether ops are written down for another program, or transformed; both want plain code.

    The tensors of a transform of torch.func (vmap, grad) have no storage.
    """
    is_transformed = torch._C._functorch.maybe_current_level() is not None
    return is_transformed or torch._C._is_tracing() or torch.compiler.is_compiling()


def below_autograd() -> AbstractContextManager[None]:
    """Run ops as autograd runs them: nothing is recorded for backward, whatever the grad mode."""
    guard: AbstractContextManager[None] = torch._C._AutoDispatchBelowAutograd()
    return guard


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history; writes to either are counted for both.

    Below autograd, where dispatch modes run, `detach` alone would begin to count anew.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_VIEWS):
        return tensor.detach()
    with torch._C._SetExcludeDispatchKeyGuard(_VIEWS, False):
        return tensor.detach()


# The layer of dispatch that lets a view share its base's count of writes.
_VIEWS = torch._C.DispatchKey.ADInplaceOrView


def version(tensor: torch.Tensor) -> int:
    """How often a tensor's storage was written in place; shared by all its views.

    Nobody counts for tensors made in inference mode.
    """
    try:
        return tensor._version
    except RuntimeError:
        # Asked first, `is_inference` would take longer than the answer.
        return 0


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each of some tensors was written."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [version(tensor) for tensor in tensors]


@contextmanager
def same_versions_after(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let what is written inside the block count as never written: contents are put back."""
    tensors = [tensor for tensor in tensors if not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    try:
        yield
    finally:
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def original_step(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """The optimizer's own step, past what a learning-rate scheduler put in front of it."""
    step = type(optimizer).step
    return lambda: step(optimizer)


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """The dictionaries that hold an optimizer's step hooks, and those of all optimizers."""
    return [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    ]


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    """The dictionaries that hold a module's forward hooks."""
    return [module._forward_pre_hooks, module._forward_hooks]


def remove_forward_hooks(module: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Take a function off a module that nobody has a handle of: it is a copy."""
    for hooks in forward_hooks(module):
        for key in [key for key, hook in hooks.items() if hook is function]:
            del hooks[key]
            for which in (
                module._forward_hooks_always_called,
                module._forward_hooks_with_kwargs,
                module._forward_pre_hooks_with_kwargs,
            ):
                which.pop(key, None)


# The module and the function in which torch calls what `torch.compile` has wrapped.
COMPILED_CALL = ("torch._dynamo.eval_frame", "compile_wrapper")


def is_compiler_on() -> bool:
    """Whether torch compiles what it was asked to, and was not told to step aside."""
    loaded = sys.modules.get(COMPILED_CALL[0])
    if loaded is None:
        return False
    return loaded._stance.stance != "force_eager" and not loaded.config.disable


# What compiles the frames that begin now on this thread; None: nothing does. The function itself,
# for a function around it would be a frame to compile.
active_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def leave_uncompiled(function: Any) -> None:
    """Let the compiler pass over a function's own frame; what it calls is another matter."""
    # Late: this loads the compiler.
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


class CompilerStepsAside:
    """Let what was compiled run as it was written, once the compiler is loaded.

    Does what `torch.compiler.set_stance("force_eager")` does, in a fifth of its time.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        compiler = sys.modules[COMPILED_CALL[0]]
        self._before = compiler._set_stance(_force_eager())

    def __exit__(self, *_: object) -> None:
        sys.modules[COMPILED_CALL[0]]._set_stance(self._before)


@functools.cache
def _force_eager() -> Any:
    return sys.modules[COMPILED_CALL[0]].DynamoStance("force_eager")


# The child of the modules that `checkpoint_wrapper` of torch.distributed puts around others.
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"


def composable_checkpoint(module: torch.nn.Module) -> Any | None:
    """The state that `torch.distributed._composable.checkpoint` keeps of a module, if it does."""
    home = "torch.distributed._composable.checkpoint_activation"
    hooks = module._forward_pre_hooks.values()
    # Asked for a module that it does not know, it would leave a dictionary there.
    known = any(getattr(hook, "__module__", "") == home for hook in hooks)
    return sys.modules[home].checkpoint.state(module) if known else None


def global_forward_hooks() -> list[dict[int, Any]]:
    """The dictionaries that hold the forward hooks of every module of the process."""
    return [_modules._global_forward_pre_hooks, _modules._global_forward_hooks]


def global_hooks() -> list[dict[int, Any]]:
    """The dictionaries that hold all hooks of every module of the process."""
    return [
        *global_forward_hooks(),
        _modules._global_backward_pre_hooks,
        _modules._global_backward_hooks,
    ]


# The names under which a module holds its hooks.
HOOK_GROUPS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

# Every call of a module goes through this function: its frame on the stack holds the module.
MODULE_CALL_CODE = torch.nn.Module._call_impl.__code__


def operator_arguments(operator: Any) -> list[Any]:
    """The arguments of an operator's schema, each with its name and what it aliases."""
    arguments: list[Any] = operator._schema.arguments
    return arguments


@contextmanager
def past_every_mode() -> Iterator[None]:
    """Work on real tensors as if no mode were active."""
    # Setting modes aside takes longer than a small op: mostly there are none.
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    with torch._C.DisableTorchFunction(), _disable_current_modes() if has_modes else nullcontext():
        yield


def on_storage_of(
    tensor: torch.Tensor, dtype: torch.dtype, place: tuple[Any, Sequence[int], Sequence[int]]
) -> torch.Tensor:
    """A tensor at a place (offset, size, strides) of another's storage.

    No view for autograd: autocast caches the casts of weights that are none.
    """
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), *place)


def generator_bytes(state: torch.Tensor | None = None) -> bytes:
    """The state of the CPU's generator, or one taken earlier; read past every mode."""
    with past_every_mode():
        return (torch.get_rng_state() if state is None else state).numpy().tobytes()


def modes_are_active() -> bool:
    """Whether a dispatch mode watches ops: compiled code would not run then, and not again."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


def is_innermost(mode: TorchDispatchMode) -> bool:
    """Whether a dispatch mode is the one that sees ops first."""
    return _get_current_dispatch_mode() is mode
