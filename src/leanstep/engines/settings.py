"""Settings of torch that an op's numbers depend on, beside its arguments.

They may hold around forward alone, as in `with torch.backends.cudnn.flags(enabled=False):`, while
backward runs its ops again: each with the settings that it had.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.backends import cudnn, mkldnn

from leanstep.torch_private.precision import float32_precisions, set_float32_precisions

Settings = tuple[Any, ...]

# How each is read, and how it is set.
_ALL: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    # oneDNN's LSTM looks at it.
    (torch.is_grad_enabled, torch.set_grad_enabled),
    # What integers become that meet a fraction.
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (partial(getattr, mkldnn, "enabled"), partial(setattr, mkldnn, "enabled")),
    (partial(getattr, cudnn, "enabled"), partial(setattr, cudnn, "enabled")),
    (partial(getattr, cudnn, "deterministic"), partial(setattr, cudnn, "deterministic")),
    (float32_precisions, set_float32_precisions),
)


def settings_now() -> Settings:
    """How all of them stand."""
    return tuple([read() for read, _ in _ALL])


class Switch:
    """The settings during a replay, switched where they change: mostly once, or never."""

    __slots__ = ("_before", "_now")

    def __enter__(self) -> "Switch":
        self._now = self._before = settings_now()
        return self

    def __exit__(self, *_: object) -> None:
        self.to(self._before)

    def to(self, settings: Settings) -> None:
        """Let what follows run with these."""
        if settings != self._now:
            for (_, put), before, after in zip(_ALL, self._now, settings, strict=True):
                if after != before:
                    put(after)
            self._now = settings
