"""Answer torch's cross entropy while a module runs, on its thread, and leave all else alone.

A function mode would see every function of torch's. Some compute another way as soon as one is on,
and a function that the user has wrapped would be called twice. So while a module runs whose loss is
to be answered, the code of torch's own function is another, which asks for the answer first. It
stays the same object under every name that somebody has for it; wrappers and modes of the user's
stand in front of it as ever; calls of other threads, and of compilers, go on to what it was.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.overrides import has_torch_function

from leanstep.torch_private.loss import CROSS_ENTROPY, CROSS_ENTROPY_CODE
from leanstep.torch_private.modes import is_traced

# What a cross entropy was given, by name, in; the loss out, or None to leave it to torch.
Answer = Callable[[Mapping[str, Any]], torch.Tensor | None]

_here = threading.local()
_lock = threading.Lock()
_places: "weakref.WeakSet[_Place]" = weakref.WeakSet()


def _other_code(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: Any = -100,
    reduce: Any = None,
    reduction: Any = "mean",
    label_smoothing: Any = 0.0,
) -> Any:
    # It runs as torch's function, which knows no name of this file.
    from leanstep.engines.stand_in import answered

    return answered(
        input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
    )


def _names_of(code: CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount]


_NAMES = _names_of(_other_code.__code__)


def _copied() -> FunctionType | None:
    """Torch's own, whatever code it has later; None where it does not take what ours takes."""
    code = CROSS_ENTROPY_CODE
    if CROSS_ENTROPY is None or code is None or _names_of(code) != _NAMES or code.co_freevars:
        return None
    return FunctionType(code, CROSS_ENTROPY.__globals__, CROSS_ENTROPY.__name__)


_as_it_is: Any = _copied()


def answered(*given: Any) -> Any:
    """What torch's function returns while somebody stands in for it."""
    # Asked first, and alone: a compiler goes no further into this.
    found = None if torch.compiler.is_compiling() else _answer(given)
    return _as_it_is(*given) if found is None else found


def _answer(given: tuple[Any, ...]) -> torch.Tensor | None:
    places = [place for known in _known_here() if (place := known())]
    # Modes and tensors of others' come first: they call it again.
    if not places or is_traced() or has_torch_function(given[:3]):
        return None
    return places[-1].answer(dict(zip(_NAMES, given, strict=True)))


class _Place:
    """Somebody who stands in, for as long as the call lasts that does: be it interrupted."""

    __slots__ = ("__weakref__", "answer")

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


def _known_here() -> "list[weakref.ref[_Place]]":
    """Those of this thread, the innermost last."""
    known: list[weakref.ref[_Place]] = vars(_here).setdefault("known", [])
    return known


@contextmanager
def standing_in(answer: Answer) -> Iterator[None]:
    """Ask for an answer first wherever this thread calls torch's cross entropy."""
    place, known = _Place(answer), _known_here()
    try:
        known.append(weakref.ref(place))
        _places.add(place)
        _set_code()
        yield
    finally:
        _places.discard(place)
        known[:] = [other for other in known if other() not in (None, place)]
        _set_code()


def _set_code() -> None:
    """Give torch's function our code or its own back; what others have made of it stays."""
    if CROSS_ENTROPY is None or _as_it_is is None:
        return
    with _lock:
        now, ours = CROSS_ENTROPY.__code__, _other_code.__code__
        if len(_places) and now is _as_it_is.__code__:
            CROSS_ENTROPY.__code__ = ours
        elif not len(_places) and now is ours:
            CROSS_ENTROPY.__code__ = _as_it_is.__code__
