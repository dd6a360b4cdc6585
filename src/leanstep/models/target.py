"""What a command line names: a built-in model, or a factory in a module of the user's."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from leanstep.devices import known_devices
from leanstep.errors import InputError, unknown_name
from leanstep.models.build import build, check_known, names
from leanstep.stages import stage

# Where a step can run; other devices are estimated.
_HERE = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Target:
    """Makes model, batch, loss and optimizer when it is called, for a batch size or its own.

    It holds text and numbers only, so that another process can be told to make the same.
    """

    text: str
    options: tuple[tuple[str, object], ...] = ()

    def __call__(self, batch: int | None = None, mesh: Any = None) -> Any:
        """Make what a training step needs; a factory that shards its model is given the mesh."""
        if batch is not None:
            sized = {**dict(self.options), "batch": batch}
            return _checked(replace(self, options=tuple(sized.items())))(mesh=mesh)
        options = dict(self.options)
        if _takes_mesh(self.function):
            if mesh is None:
                raise InputError(f"{self.text} shards its model over a mesh: say how many --ranks")
            options["mesh"] = mesh
        with stage(f"making {self.text}"):
            made = self.function(**options)
        if not isinstance(made, tuple | list) or len(made) < 2:
            raise InputError(
                f"{self.text} returns {type(made).__name__}: a factory returns a tuple of model, "
                "batch, loss and optimizer; the last two may be left out"
            )
        return made

    @property
    def is_built_in(self) -> bool:
        """Whether it is a model of leanstep's own."""
        return ":" not in self.text

    @property
    def function(self) -> Callable[..., Any]:
        """The function that makes it."""
        if self.is_built_in:
            return lambda **options: build(self.text, **options)
        return _found(self.text)

    def on(self, device: str | None) -> Target:
        """The same on a device that is there; by default a built-in model goes to the GPU."""
        if device is None and not self.is_built_in:
            return self
        if device is not None and device.partition(":")[0] not in _HERE:
            if device.lower() not in known_devices():
                raise unknown_name("device", device, (*_HERE, *known_devices()))
            raise InputError(
                f"{device} is not here: type leanstep plan {self.text} --device {device} for an "
                "estimate"
            )
        if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError(
                f"{device} is not here: torch finds no GPU; leave the device out, or name one that "
                "figures are estimated for, such as h200"
            )
        place = device or ("cuda" if torch.cuda.is_available() else "cpu")
        return _checked(replace(self, options=(*self.options, ("device", place))))


def find_target(text: str, **options: object) -> Target:
    """Return what `resnet152` or `package.module:factory` names; options that are None are not set.

    Raises:
        InputError: there is none of that name, or it does not take these options.
    """
    given = tuple((name, value) for name, value in options.items() if value is not None)
    return _checked(Target(text, given))


def _checked(target: Target) -> Target:
    if target.is_built_in:
        _check_name(target.text)
        return target
    function, options = target.function, dict(target.options)
    given_later = {"mesh": None} if _takes_mesh(function) else {}
    try:
        inspect.signature(function).bind(**options, **given_later)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise InputError(
            f"{target.text} cannot be called with ({given}): {error}; a factory takes the options "
            "of the command line by name, such as batch"
        ) from error
    return target


def _takes_mesh(function: Callable[..., Any]) -> bool:
    return "mesh" in inspect.signature(function).parameters


def _check_name(text: str) -> None:
    name = text.removesuffix(".py")
    if Path(f"{name}.py").is_file() and name not in names():
        raise InputError(f"{name}.py is a file: name the function in it too, as {name}:make")
    try:
        check_known(text, names(), "model")
    except InputError as error:
        raise InputError(
            f"{error}; a function of yours is written package.module:factory"
        ) from None


def _found(text: str) -> Callable[..., Any]:
    place, _, name = text.partition(":")
    if not place:
        raise InputError(f"{text} names no module: write package.module:factory")
    module = _module(place)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]  # whatever the user's module has there
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    nearest = difflib.get_close_matches(name, functions, n=1)
    hint = (
        f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(functions) or 'none'}"
    )
    raise InputError(f"{place} has no function {name!r}: {hint}")


def _module(place: str) -> ModuleType:
    """Import by name, or by path where it is that of a file."""
    if place.endswith(".py"):
        return _from_file(Path(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # One that the user's module misses is for the user to see as it is.
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise
        raise InputError(f"no module is called {place!r}, here or among those installed") from error


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(f"{path} is not a file of Python's")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
