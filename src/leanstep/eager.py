"""Keep torch.compile out of what leanstep does.

A model may be compiled after it was fitted. Dynamo would then trace the runtime itself: modes and
saved-tensor hooks would be folded into a graph, or left out of it. So the places where a compiled
program can enter leanstep run as they are: the graph breaks at a fitted block, its plan stays in
force, and what lies outside of the blocks is compiled.

The other way round, compiled code that is called while ops are recorded would not only run
uncompiled: Dynamo would remember not to compile it ever again. So it is told to step aside.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from leanstep.torch_private.stance import (
    COMPILED_CALL,
    CompilerStepsAside,
    active_compiler,
    is_compiler_on,
    leave_uncompiled,
)

REASON = (
    "leanstep: a block with a plan runs uncompiled. Compile without fullgraph=True, "
    "or call remove() on what leanstep.fit returned"
)


@functools.cache
def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run as it is also where its caller is compiled."""
    # Late: torch loads its compiler for this, which takes a second.
    run: Callable[..., Any] = torch.compiler.disable(function, reason=REASON)
    return run


@functools.cache
def seldom_compiled(function: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """The same for what torch itself calls, often, and mostly where nothing is compiled."""
    run: Callable[[Any], torch.Tensor] = never_compiled(function)

    def call(argument: object) -> torch.Tensor:
        return function(argument) if active_compiler() is None else run(argument)

    leave_uncompiled(call)
    return call


def uncompiled() -> AbstractContextManager[None]:
    """Let what torch.compile has wrapped run as it was written, inside the block."""
    return CompilerStepsAside() if is_compiler_loaded() else nullcontext()


def is_compiler_loaded() -> bool:
    """Whether anything can be compiled at all; without this, loading it would take a second."""
    return COMPILED_CALL[0] in sys.modules


def is_compiled_call(frame: FrameType) -> bool:
    """Whether a frame is the one in which torch calls a compiled function."""
    code = frame.f_code
    return code.co_name == COMPILED_CALL[1] and frame.f_globals.get("__name__") == COMPILED_CALL[0]


def is_called_by_compiled() -> bool:
    """Whether a compiled function or model is being called on this thread."""
    frame: FrameType | None = sys._getframe(1) if is_compiler_loaded() else None
    name = COMPILED_CALL[1]
    while frame is not None:
        # The name first: this looks at every frame of the stack, in every call of a block.
        if frame.f_code.co_name == name and is_compiled_call(frame):
            return is_compiler_on()
        frame = frame.f_back
    return False


@dataclass
class CompilerWatch:
    """Warn once when a fitted model is called from compiled code."""

    warned: bool = False

    def see(self, name: str) -> None:
        """Look who calls a block."""
        if self.warned or not is_called_by_compiled():
            return
        self.warned = True
        warnings.warn(
            f"leanstep: {name} has a plan and is called from code that torch.compile has compiled. "
            "Blocks with a plan run uncompiled and keep it; only what lies outside of them is "
            "compiled, and fit has not measured that.",
            stacklevel=2,
        )
