"""Every private name of Inductor's programs: the Python that launches what it has compiled.

What does not look as it did in torch 2.11 to 2.13 is left to torch.
"""

import sys
from collections.abc import Callable, Mapping
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from leanstep.torch_private.nodes import READ_VERSIONS, Run

_PROGRAMS = "torch._inductor.runtime.compile_tasks."

# What a program asks of its inputs' layouts, and of those of what the operators it calls return.
_CHECK = "assert_size_stride"

# Of a kernel that is launched without Triton: what it is launched with.
_OF_KERNEL = (
    "function",
    "num_warps",
    "shared",
    "arg_tys",
    "has_global_scratch",
    "has_profile_scratch",
)


class ShortProgram:
    """A program of Inductor's that leaves out what it has seen to at its first call.

    There it chooses a launcher for each kernel; and where guards stand before every call, it sees
    that inputs are laid out as they promise. The CPU would take longer to ask that again than the
    device takes for a small kernel.
    """

    def __init__(self, compiled: Callable[..., Any], *, is_guarded: bool = False) -> None:
        # As the compiler marks it: called with a list of arguments, it empties the list. Who wraps
        # it copies what the instance has, not what its class has.
        self._boxed_call = True
        self.output_strides = getattr(compiled, "output_strides", None)
        self.is_guarded = is_guarded
        self._compiled = compiled
        self._short: Run | None = None

    def __call__(self, arguments: list[Any]) -> Any:
        """Run it as torch does, and from then on without what is known by then."""
        if torch.autograd.profiler._is_profiler_enabled:
            # It wants to hear of every kernel.
            return self._compiled(arguments)
        if self._short is None:
            results = self._compiled(arguments)
            self._short = shortened(self._compiled, is_guarded=self.is_guarded)
            return results
        return self._short(arguments)


def shortened(compiled: Callable[..., Any], *, is_guarded: bool) -> Run:
    """What a program that has run calls, or the program where that is not known well enough."""
    if not torch.__version__.startswith(READ_VERSIONS):
        return compiled
    try:
        return _shortened(getattr(compiled, "current_callable", None), is_guarded) or compiled
    except (AttributeError, TypeError, ValueError):
        # Something looks different after all.
        return compiled


def _shortened(call: Any, is_guarded: bool) -> Run | None:
    if isinstance(call, MethodType):
        inner = _shortened(call.__func__, is_guarded)
        return None if inner is None else MethodType(inner, call.__self__)
    if not isinstance(call, FunctionType):
        return None
    if (call.__module__ or "").startswith(_PROGRAMS):
        # A copy: somebody else's equal program may be the same module.
        known = _known(call.__globals__, is_guarded)
        return _rebuilt(call, {**call.__globals__, **known}, call.__closure__)
    if call.__module__ == "torch._inductor.utils" and call.__code__.co_freevars:
        return _around_program(call, is_guarded)
    return None


def _around_program(call: FunctionType, is_guarded: bool) -> Run | None:
    """The function that aligns a program's inputs, around the short program."""
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    model = cells.get("model")
    inner = None if model is None else _shortened(model.cell_contents, is_guarded)
    if inner is None:
        return None
    cells["model"] = CellType(inner)
    return _rebuilt(call, call.__globals__, tuple(cells.values()))


def _rebuilt(call: FunctionType, names: dict[str, Any], cells: Any) -> FunctionType:
    return FunctionType(call.__code__, names, call.__name__, call.__defaults__, cells)


def _known(names: Mapping[str, Any], is_guarded: bool) -> dict[str, Any]:
    """What stands for some of a program's names once it has run."""
    known: dict[str, Any] = {}
    if is_guarded and _CHECK in names:
        known[_CHECK] = _check_of_results(names[_CHECK])
    for name, value in names.items():
        if (launcher := _launcher(value)) is not None:
            known[name] = SimpleNamespace(run=launcher)
    return known


def _check_of_results(check: Callable[..., None]) -> Callable[..., None]:
    """The check of what operators return, which guards do not promise; inputs pass."""

    def checked(tensor: Any, size: Any, stride: Any, source: str = "input") -> None:
        if source != "input":
            check(tensor, size, stride, source)

    return checked


def _launcher(kernel: Any) -> Any:
    """What launches a kernel of Triton's from now on; None while torch may choose another.

    From torch 2.13 on torch keeps it, and calls it after a few questions at every launch.
    """
    loaded: Any = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if loaded is None or type(kernel) is not loaded.CachingAutotuner:
        return None
    if hasattr(kernel, "_cached_launcher"):
        return kernel._cached_launcher
    is_watched = kernel.triton_interpret or kernel.dump_launch_params or kernel.dump_launch_tensors
    if is_watched or len(kernel.launchers) != 1:
        return None
    (launcher,) = kernel.launchers
    may_tune = kernel.inductor_meta.get("coordinate_descent_tuning", False)
    is_chosen = not may_tune or getattr(launcher.config, "found_by_coordesc", False)
    # Where it is not static it may want memory, for which torch sets an allocator every time.
    is_static = getattr(launcher, "_is_static", False)
    if not is_static or not is_chosen or launcher.store_cubin:
        return None
    return _direct(launcher)


def _direct(launcher: Any) -> Any:
    """A static launcher that hands its arguments to the driver with no questions in between."""
    kernel = getattr(launcher.__globals__.get("runner"), "__self__", None)
    facts: list[Any] = [getattr(kernel, name, None) for name in _OF_KERNEL]
    launch = getattr(getattr(kernel, "C_impl", None), "_launch_kernel", None)
    if torch.version.hip is not None or launch is None or None in facts:
        return launcher
    function, num_warps, shared_bytes, kinds, *has_scratch = facts
    unused = (None,) * sum(has_scratch)
    kinds += "O" * len(unused)

    def run(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        given = arguments + unused
        launch(function, x, y, z, num_warps, shared_bytes, kinds, given, stream)

    return _rebuilt(launcher, {**launcher.__globals__, "runner": run}, launcher.__closure__)
