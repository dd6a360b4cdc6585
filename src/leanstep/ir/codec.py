"""JSON for the nouns, driven by their type annotations.

A dataclass becomes an object, a NamedTuple or tuple a list, an Enum its value. Every file says
what it holds and in which version of the format.
"""

import dataclasses
import enum
import functools
import json
import types
import typing
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

from leanstep.errors import InputError

FORMAT_VERSION = 2

# What to type for a file of the kind that was missed.
_MADE_BY = {
    "Profile": "leanstep profile TARGET -o run.json",
    "Plan": "leanstep plan run.json --budget 16GiB -o plan.json",
}

Noun = TypeVar("Noun")


class Saved:
    """What every noun can do: become JSON, and come back from it."""

    __slots__ = ()

    def to_json(self) -> str:
        """The text of the file that `save` writes."""
        return to_json(self)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        noun = load(cls, Path(path))
        noun.check()
        return noun

    def check(self) -> None:
        """Raise unless what was read obeys the rules of its kind; most have none."""


def to_json(noun: object) -> str:
    """A noun as JSON, with what it is and in which version of the format."""
    document = {
        "leanstep": type(noun).__name__,
        "format": FORMAT_VERSION,
        "content": to_plain(noun),
    }
    return json.dumps(document, separators=(",", ":"))


def save(noun: object, path: Path) -> None:
    """Write a noun to a file as JSON."""
    path.write_text(to_json(noun) + "\n")


def kind_in(path: Path) -> str:
    """The name of the noun that a file holds."""
    return _document(path)[0]


def _document(path: Path) -> tuple[str, int, Any]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path} is not a file that leanstep wrote: {error}") from error
    try:
        return document["leanstep"], document["format"], document.get("content")
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a file that leanstep wrote: it does not say what it holds"
        ) from error


def load(kind: type[Noun], path: Path) -> Noun:
    """Read a noun of the given kind from a file."""
    found, version, content = _document(path)
    if found != kind.__name__:
        hint = f": {_MADE_BY[kind.__name__]} makes one" if kind.__name__ in _MADE_BY else ""
        raise InputError(f"{path} holds a {found}, not a {kind.__name__}{hint}")
    if version != FORMAT_VERSION:
        raise InputError(
            f"{path} has format {version}, this leanstep reads {FORMAT_VERSION}: make it anew"
        )
    try:
        return typing.cast(Noun, from_plain(kind, content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} holds a {found} that is damaged: {error}") from error


def check_kind(given: object, kind: type[Saved]) -> None:
    """Raise InputError unless an argument is of a kind; many give what it is made of, or a path."""
    if not isinstance(given, kind):
        word = kind.__name__
        raise InputError(
            f"{word.lower()} is {type(given).__name__}, not a leanstep.{word}: "
            f"leanstep.{word.lower()} makes one, leanstep.{word}.load(path) reads one"
        )


def to_plain(value: Any) -> Any:
    """Turn a noun into lists, dicts, strings and numbers."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: Any, plain: Any) -> Any:
    """Turn what `to_plain` made back into a value of the given kind."""
    return _reader(kind)(plain)


@functools.cache
def _reader(kind: Any) -> Any:
    """Make the function that reads one kind; cached, since a graph has many thousand values."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        readers = [(f.name, _reader(hints[f.name])) for f in dataclasses.fields(kind)]
        # A field that came later has a default; without one, the file is damaged.
        return lambda plain: kind(**{k: read(plain[k]) for k, read in readers if k in plain})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind
    if isinstance(kind, type) and issubclass(kind, tuple):
        return _named_tuple_reader(kind)
    if get_origin(kind) is tuple:
        return _tuple_reader(get_args(kind))
    if get_origin(kind) is types.UnionType:
        (inner,) = [_reader(k) for k in get_args(kind) if k is not types.NoneType]
        return lambda plain: None if plain is None else inner(plain)
    return lambda plain: plain


def _named_tuple_reader(kind: Any) -> Any:
    hints = typing.get_type_hints(kind)
    readers = [_reader(hints[name]) for name in kind._fields]
    if not any(isinstance(hint, type) and issubclass(hint, enum.Enum) for hint in hints.values()):
        # Values are such, and a graph has many thousand of them.
        return lambda plain: kind(*plain)
    return lambda plain: kind(*(r(item) for r, item in zip(readers, plain, strict=True)))


def _tuple_reader(kinds: tuple[Any, ...]) -> Any:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        read = _reader(kinds[0])
        return lambda plain: tuple(read(item) for item in plain)
    readers = [_reader(kind) for kind in kinds]
    return lambda plain: tuple(read(item) for read, item in zip(readers, plain, strict=True))
