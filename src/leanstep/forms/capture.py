"""Capture the joint graph of a block without compiling it."""

import itertools
import os
from typing import Any

from leanstep.engines.inductor import CompiledForm, compiled_function, quietly
from leanstep.engines.joint import JointGraph
from leanstep.forms.kinds import Example
from leanstep.torch_private.compiler import cause_in_backend, compiler_errors, copied, without_twins

_numbers = itertools.count()


class _Captured(Exception):
    def __init__(self, joint: JointGraph) -> None:
        super().__init__("captured")
        self.joint = joint


class CaptureError(Exception):
    """A block that cannot be captured, and why."""


def capture(example: Example, settings: dict[str, Any]) -> JointGraph:
    """The joint graph of a block's call, as the partition of a form will get it."""

    def partition(joint: Any, num_outputs: int, static: list[int]) -> Any:
        raise _Captured(JointGraph(copied(without_twins(joint)), num_outputs, static))

    # A name that nobody has used: what is known by it would not be captured.
    key = f"leanstep capture {os.getpid()} {next(_numbers)}"

    def backend(graph: Any, inputs: Any) -> Any:
        with quietly():
            run, _ = CompiledForm.compile_graph(graph, inputs, partition, key, settings)
            return run

    subject, forward = example.subject
    try:
        with example.modes():
            compiled_function(forward, backend)(subject, *example.args, **example.kwargs)
    except compiler_errors() as error:
        cause = cause_in_backend(error)
        if isinstance(cause, _Captured):
            return cause.joint
        raise CaptureError(_first_line(cause or error)) from error
    raise CaptureError("nothing in it needs a gradient, or it was not captured")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
