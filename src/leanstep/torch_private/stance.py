"""Whether torch's compiler is at work, and how it is told to step aside; nothing here loads it."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

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
