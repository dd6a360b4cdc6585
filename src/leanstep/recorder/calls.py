"""Which module calls run, and which of them an op belongs to, in backward too."""

import torch

from leanstep.ir import ModuleCall
from leanstep.recorder.source import user_source
from leanstep.torch_private.autograd import (
    current_node,
    in_backward,
    next_node_number,
    node_number,
)

# The module call of an op and its line in the user's code.
Origin = tuple[int, str]

NOWHERE: Origin = (-1, "")


class Calls:
    """The calls of modules in the order they begin; `-1` is the call around them all."""

    def __init__(self) -> None:
        self.begun: list[ModuleCall] = []
        self._stack: list[int] = [-1]
        self._occurrences: dict[str, int] = {}
        self._origins: dict[int, Origin] = {}

    @property
    def innermost(self) -> int:
        """The number of the call that runs now."""
        return self._stack[-1]

    @property
    def is_outside(self) -> bool:
        """Whether no call runs now."""
        return len(self._stack) == 1

    def enter(self, path: str, module: torch.nn.Module, start: int) -> None:
        """Note that a module's forward begins; only calls that a plan can be about are counted."""
        occurrence = -1
        if torch.is_grad_enabled() and not in_backward():
            occurrence = self._occurrences.get(path, 0)
            self._occurrences[path] = occurrence + 1
        name = type(module).__name__
        self.begun.append(ModuleCall(path, name, occurrence, self.innermost, start, -1))
        self._stack.append(len(self.begun) - 1)

    def leave(self, stop: int) -> None:
        """Note that the innermost module's forward ended."""
        index = self._stack.pop()
        call = self.begun[index]
        self.begun[index] = ModuleCall(
            call.path, call.class_name, call.occurrence, call.parent, call.start, stop
        )

    def drop_open(self) -> None:
        """Forget the calls that have begun and not ended."""
        if not self.is_outside:
            del self.begun[self._stack[1] :], self._stack[1:]

    def origin_in_forward(self) -> Origin:
        """Where an op of forward comes from; what its node does in backward will too."""
        origin = self.innermost, user_source()
        # The first op after a node is made is the node's own; ops without gradient follow it.
        self._origins.setdefault(next_node_number() - 1, origin)
        return origin

    def origin_of_node(self) -> Origin | None:
        """Where the op comes from whose backward runs now, if any does."""
        node = current_node() if in_backward() else None
        return None if node is None else self._origins.get(node_number(node), NOWHERE)
