"""Whose error it is: what a factory of the user's raises is shown from the user's frames on."""

import traceback
from itertools import dropwhile
from pathlib import Path
from types import TracebackType

_PACKAGE = Path(__file__).parents[1]
# It imports the user's module and calls the factory in it.
_CALLER = _PACKAGE / "models" / "target.py"


def users_error(error: Exception) -> str | None:
    """The text of an error from the user's own frames on; None where it came from elsewhere."""
    frames = _frames(error.__traceback__)
    places = [Path(frame.tb_frame.f_code.co_filename) for frame in frames]
    if _CALLER not in places:
        return None
    called_at = max(at for at, place in enumerate(places) if place == _CALLER)
    below = list(dropwhile(_is_importing, frames[called_at + 1 :]))
    # Below the call of a built-in model there is leanstep again.
    if below and _PACKAGE in Path(below[0].tb_frame.f_code.co_filename).parents:
        return None
    found = below[0] if below else None
    return "".join(traceback.format_exception(type(error), error, found))


def _frames(found: TracebackType | None) -> list[TracebackType]:
    frames = []
    while found is not None:
        frames.append(found)
        found = found.tb_next
    return frames


def _is_importing(frame: TracebackType) -> bool:
    module = str(frame.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] == "importlib"
