"""Blocks run as compiled code that keeps for backward what a form says.

Dynamo captures a block's forward with its parameters as inputs, so equal blocks share one program.
AOTAutograd makes the joint graph of forward and backward of it, and Inductor kernels of that. In
between stands our partition: the form's values are handed over, everything else is computed again.

Never silently unplanned: a graph break raises, every call of the compiled graph is counted, and
whoever calls where compiled code does not run is told so.
"""

import functools
import hashlib
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from leanstep.eager import is_compiler_loaded
from leanstep.engines.apart import Dropper, Rebuild
from leanstep.engines.attach import as_given, original_class
from leanstep.engines.joint import Apart, JointGraph, LostNodeError
from leanstep.engines.node import short_way
from leanstep.engines.parking import Keep, Spaces, hooks_of, kept_or_parked
from leanstep.engines.scope import Scope
from leanstep.ir import Form, Kind
from leanstep.torch_private.autograd import saving_hooks_are_set
from leanstep.torch_private.compiler import (
    ShortCall,
    compile_alone_with_inductor,
    compile_with_inductor,
    compiler_errors,
    is_backward_compiled,
    lay_out_inputs,
    recompile_limit,
    without_twins,
)
from leanstep.torch_private.modes import modes_are_active
from leanstep.torch_private.stance import is_compiler_on
from leanstep.torch_private.tensors import tree_leaves

# One more whenever the same names would give another program.
PARTITION_VERSION = 4

# Inductor keeps what a fused kernel passes on inside in float32, and lets the compiler of a kernel
# fuse products and sums. So a value that is computed again in another kernel may have other bits.
PRECISE = {"emulate_precision_casts": True}

# Casts of weights, counters, the last steps of sums: small kernels take the CPU longer to launch
# than the device to run. Those that do not wait for each other become one.
JOINED = {"combo_kernels": True}

_numbers = itertools.count()


class CompiledForm:
    """A kind of block compiled in one form; `runs` counts calls of compiled code.

    `compile_graph` makes a function of a captured graph, and `compile_alone` of one without a
    backward; the tests have some that need no compiler. For `whole` see `Form`.
    """

    compile_graph = staticmethod(compile_with_inductor)
    compile_alone = staticmethod(compile_alone_with_inductor)

    def __init__(
        self,
        forward: Callable[..., Any],
        kept: tuple[str, ...],
        settings: dict[str, Any],
        whole: tuple[str, ...] = (),
    ) -> None:
        self.runs = self.captures = 0
        self._kept, self._whole, self._settings = kept, whole, settings
        self._keep: Keep | None = None
        self._is_dropping = True
        names = "\n".join((str(PARTITION_VERSION), *sorted(whole or kept)))
        self._key = f"leanstep {hashlib.sha256(names.encode()).hexdigest()}"
        self._run = compiled_function(forward, self._compiled)

    def __call__(
        self,
        subject: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        keep: Keep | None = None,
        *,
        is_dropping: bool = True,
    ) -> Any:
        """Run one call; what cannot be captured raises one of `compiler_errors()`.

        The hooks on what it saves are set around the compiled graph alone: Dynamo, which looks at
        them, would compile the call anew for each. Who is not dropping leaves what is saved alone.
        """
        self._keep, self._is_dropping = keep, is_dropping
        try:
            return self._run(subject, *args, **kwargs)
        finally:
            self._keep, self._is_dropping = None, True

    def _compiled(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile what Dynamo has captured."""
        self.captures += 1
        split: list[Apart] = []

        def partition(joint: Any, num_outputs: int, static: list[int]) -> tuple[Any, Any]:
            known = JointGraph(without_twins(joint), num_outputs, static)
            if not self._whole:
                return known.split(self._kept)
            split.append(known.apart(self._whole, self._kept))
            return split[0].forward, split[0].backward

        dropper = Dropper(lambda: self._is_dropping)
        wrap = dropper.wrapped if self._whole else None
        with quietly():
            made = self.compile_graph(graph, inputs, partition, self._key, self._settings, wrap)
            if split and split[0].dropped:
                dropper.rebuild = self._rebuild(split[0], dropper)
        run = short_way(*made)

        def counted(*args: Any) -> Any:
            self.runs += 1
            if self._keep is None:
                return run(*args)
            with hooks_of(self._keep):
                return run(*args)

        return counted

    def _rebuild(self, split: Apart, dropper: Dropper) -> Rebuild:
        strides = tuple(dropper.stride(node) for node in split.sources)
        lay_out_inputs(split.rebuild, strides)
        return Rebuild(
            places=tuple(dropper.results[node.name] for node in split.dropped),
            arguments=split.arguments(split.dropped),
            sources=split.arguments(split.sources),
            strides=strides,
            run=self.compile_alone(split.rebuild, self._settings),
        )


def compiled_function(
    forward: Callable[..., Any], backend: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of a block and its arguments, to be compiled by a backend.

    With a code object of its own: Dynamo counts recompilations for each of these, and gives up
    after eight.
    """

    def call(subject: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(subject, *args, **kwargs)

    name = f"leanstep_block_{next(_numbers)}"
    code = call.__code__.replace(co_name=name)
    fresh = FunctionType(code, call.__globals__, name, call.__defaults__, call.__closure__)
    with quietly():
        run: Callable[..., Any] = torch.compile(
            fresh, backend=backend, fullgraph=True, dynamic=False
        )
    return ShortCall(fresh, run)


@contextmanager
def quietly() -> Iterator[None]:
    """Let torch's compiler use what torch has deprecated: a filter of the user's may make it raise.

    Such as `-W error`, which is right for the user's own code.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def in_turn(children: tuple[torch.nn.Module, ...], hidden: Any) -> Any:
    """Call some children of a Sequential, one after the other."""
    for child in children:
        hidden = child(hidden)
    return hidden


@functools.lru_cache(maxsize=512)
def compiled_form(
    forward: Callable[..., Any],
    kind: str,
    kept: tuple[str, ...],
    whole: tuple[str, ...],
    *,
    precise: bool,
    joins_kernels: bool,
) -> CompiledForm:
    """The compiled form of a kind of block, made once in a process: compiling takes seconds."""
    settings = {**(PRECISE if precise else {}), **(JOINED if joins_kernels else {})}
    return CompiledForm(forward, kept, settings, whole)


def subject_of(module: torch.nn.Module, children: tuple[str, ...]) -> tuple[Any, Any]:
    """What a compiled call gets in place of `self`, and the function that it runs."""
    if children:
        return tuple(module.get_submodule(name) for name in children), in_turn
    return as_given(module), original_class(module).forward


class CompiledBlock:
    """The calls of one block that follow one form."""

    def __init__(self, scope: Scope, kind: Kind, form: Form) -> None:
        self._scope, self._kind, self._form = scope, kind, form
        self._compiled: tuple[Any, CompiledForm] | None = None

    @classmethod
    def of(cls, scope: Scope, form: str, kinds: Collection[Kind]) -> "CompiledBlock | None":
        """The block in the form of a name, or None for no name."""
        for kind in kinds if form else ():
            if (found := kind.form(form)) is not None:
                return cls(scope, kind, found)
        return None

    def run(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        spaces: Spaces | None = None,
    ) -> tuple[Any, str | None]:
        """Run one call: what it returns, or why it has not run."""
        if reason := obstacle(rebuilds=bool(self._form.whole)):
            return None, reason
        subject, forward = subject_of(module, self._scope.children)
        compiled = self._compiled_form(forward)
        before = compiled.runs
        keep = None if spaces is None else kept_or_parked(spaces)
        # Hooks of ours would stand before those of the user.
        is_dropping = not saving_hooks_are_set()
        try:
            out = compiled(subject, args, kwargs, keep, is_dropping=is_dropping)
        except compiler_errors() as error:
            # Raised before anything has run: what the user's own code raises is seen again below.
            return None, reason_of(error)
        if compiled.runs == before:
            warnings.warn(
                f"leanstep: torch ran {self._scope.name} as plain code, without its plan",
                stacklevel=2,
            )
        return out, None

    def _compiled_form(self, forward: Callable[..., Any]) -> CompiledForm:
        """The compiled form of a function: the same at every call, as a rule."""
        known = self._compiled
        if known is not None and known[0] is forward:
            return known[1]
        kind, form = self._kind, self._form
        names = kind.name, form.kept, form.whole
        found = compiled_form(
            forward, *names, precise=kind.precise, joins_kernels=kind.joins_kernels
        )
        self._compiled = forward, found
        return found

    def tell_backward(self, out: Any, saw_backward: Callable[[], None]) -> None:
        """Let it be known when backward comes to a call."""
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: saw_backward())
                return


def obstacle(*, rebuilds: bool) -> str | None:
    """Why compiled code would not run here and now; None where it would."""
    if modes_are_active():
        return "a dispatch mode is active, under which torch runs no compiled code"
    if is_compiler_loaded() and not is_compiler_on():
        return "torch.compile is switched off"
    if rebuilds and is_backward_compiled():
        return "compiled autograd is on, which looks past what rebuilds dropped values"
    return None


def reason_of(error: BaseException) -> str:
    """In a line why a block could not be compiled."""
    cause = getattr(error, "inner_exception", None) or error
    if isinstance(cause, LostNodeError):
        return str(cause)
    if isinstance(cause, recompile_limit()):
        return "torch compiles a function for eight sorts of arguments, and this is the ninth"
    first_line = next((line for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first_line.strip()}"
