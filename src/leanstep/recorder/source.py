"""The line of the user's code that an op comes from."""

import functools
import os
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

# With a separator at the end: torchvision is no part of torch.
_SKIPPED = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent.parent}{os.sep}")
_OURS_FOR_USERS = str(Path(__file__).parent.parent / "models")


def user_source() -> str:
    """The innermost line that belongs neither to torch nor to leanstep, as `model.py:88`."""
    return source_of(sys._getframe(1))


def source_of(frame: FrameType | None) -> str:
    """The innermost such line from a frame on."""
    while frame is not None:
        if not _is_skipped(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_torchs(filename: str) -> bool:
    """Whether a file is part of torch."""
    return filename.startswith(_SKIPPED[0])


def error_source(error: BaseException) -> str:
    """The innermost line of the user's code that an error passed through."""
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not _is_skipped(frame.f_code.co_filename)
    ]
    return places[-1] if places else ""


@functools.cache
def _is_skipped(filename: str) -> bool:
    """Whether a file is machinery rather than the user's model."""
    if filename.startswith(_OURS_FOR_USERS):
        return False
    return filename.startswith((*_SKIPPED, "<"))
