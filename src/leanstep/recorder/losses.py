"""What a cross entropy was given, while the last of its ops runs."""

import sys
from types import FrameType

import torch
from torch.nn import functional

from leanstep.torch_loss import is_plain


def given_logits() -> torch.Tensor | None:
    """The logits of the `torch.nn.functional.cross_entropy` that runs now, if it is one for rows.

    Autocast may have cast them since, and the op sees no more than the cast.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not functional.cross_entropy.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    logits: torch.Tensor = frame.f_locals["input"]
    return logits if is_plain(frame.f_locals) else None
