"""Whole modules through torch's own checkpointing: keeps inputs, runs the module again.

Used where a recording cannot be replayed. What torch leaves to its user is done here: buffers
move once, user hooks inside the block fire once, and Python's own random numbers repeat.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from leanstep.torch_private import forward_hooks


def run_checkpointed(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rounds: Any,
) -> Any:
    """Run a module so that backward runs it again instead of holding what it saved."""
    call = _CheckpointedCall(module, forward, rounds)
    return checkpoint(call, *args, use_reentrant=False, **kwargs)


class _CheckpointedCall:
    """The function that checkpointing calls twice: once in forward, once in backward."""

    def __init__(
        self, module: torch.nn.Module, forward: Callable[..., Any], rounds: Any
    ) -> None:
        self.module, self.forward, self.rounds = module, forward, rounds
        self.is_second = False
        self.fired: dict[int, bool] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_second:
            self.is_second = True
            with _watched_hooks(self.module, self.fired):
                return self.forward(self.module, *args, **kwargs)
        self.rounds.saw_backward()
        active, self.rounds.active = self.rounds.active, True
        try:
            with _silent_hooks(self.module, self.fired), _same_buffers(self.module):
                return self.forward(self.module, *args, **kwargs)
        finally:
            self.rounds.active = active


@contextmanager
def _same_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Put every buffer back as it was: forward has moved it already."""
    copies = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


@contextmanager
def _watched_hooks(module: torch.nn.Module, changed: dict[int, bool]) -> Iterator[None]:
    """Note which hooks inside the block change what passes through them."""

    def watch(hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            changed[id(hook)] = changed.get(id(hook), False) or result is not None
            return result

        return watched

    with _replaced_hooks(module, watch):
        yield


@contextmanager
def _silent_hooks(module: torch.nn.Module, changed: dict[int, bool]) -> Iterator[None]:
    """Silence the hooks that only looked; those that changed a value must change it again."""

    def silence(hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook if changed.get(id(hook)) else _do_nothing

    with _replaced_hooks(module, silence):
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook that has fired already."""


@contextmanager
def _replaced_hooks(
    module: torch.nn.Module, replace: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for inner in module.modules():
            # The block's own hooks run around its forward, not inside it.
            for hooks in forward_hooks(inner) if inner is not module else ():
                for key, hook in list(hooks.items()):
                    hooks[key] = replace(hook)
                    stack.callback(_put_back, hooks, key, hook)
        yield


def _put_back(hooks: dict[int, Any], key: int, hook: Any) -> None:
    if key in hooks:
        hooks[key] = hook
