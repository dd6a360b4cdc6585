"""What is going on, on one line of the terminal, while a verb takes its time.

`stage` names what a block of code does, and stages nest: the line shows them from the outermost in.
It is drawn on standard error, where that is a terminal that somebody may look at; in a pipe, a
notebook or CI nothing is. No thread draws it, only the code that has something to say: steps are
being timed meanwhile. With the outermost stage the line goes, be it by an error or Ctrl-C.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")

_REDRAW_SECONDS = 0.2
_USUAL_COLUMNS = 80
_TO_THE_END_OF_LINE = "\x1b[K"

_open: ContextVar[tuple[str, ...]] = ContextVar("open stages of leanstep", default=())


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Say what is going on for as long as a block of code runs."""
    token = _open.set((*_open.get(), text))
    try:
        _draw(_open.get())
        yield
    finally:
        _open.reset(token)
        _draw(_open.get())


def each(items: Sequence[Item], text: str) -> Iterator[Item]:
    """The items, with how far it is in the stage that is open; without one nothing is said."""
    around, drawn_at = _open.get(), 0.0
    for count, item in enumerate(items, 1):
        now = time.monotonic()
        if around and now - drawn_at >= _REDRAW_SECONDS:
            drawn_at = now
            _draw((*around, f"{text} ({count:,} of {len(items):,})"))
        yield item
    if drawn_at:
        _draw(around)


def _draw(texts: Sequence[str]) -> None:
    """Draw the line anew; without a text it is gone."""
    if not _is_watched():
        return
    line = f"leanstep: {' · '.join(texts)}" if texts else ""
    room = _columns() - 1
    # What is new stands at the end.
    shown = line if len(line) <= room else f"…{line[len(line) - room + 1 :]}"
    sys.stderr.write(f"\r{shown}{_TO_THE_END_OF_LINE}")
    sys.stderr.flush()


def _is_watched() -> bool:
    # CI services give some of their jobs a terminal, and set this in all of them.
    is_usable = os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
    return is_usable and sys.stderr is not None and sys.stderr.isatty()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_COLUMNS
    except (OSError, ValueError):
        return _USUAL_COLUMNS
