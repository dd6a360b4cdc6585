"""Hooks on modules that nobody takes along: not a deep copy of the module, and not a pickle."""

from collections.abc import Callable
from typing import Any

import torch

from leanstep.torch_private.modules import remove_forward_hooks


class Hook:
    """Tell of a module's calls; copies and pickles of the module have `silent` in its place."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *given: Any) -> None:
        """Tell of a call."""
        self._tell(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _get_silent, ()


def silent(module: torch.nn.Module, *_: Any) -> None:
    """Go: hooks keep some of torch's modules from a faster way, and it is a copy that has these."""
    for inner in module.modules():
        remove_forward_hooks(inner, silent)


def _get_silent() -> Callable[..., None]:
    return silent
