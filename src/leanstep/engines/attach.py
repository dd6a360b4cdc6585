"""Put a runtime in front of a module's forward or of its whole call, and take it away again.

The module gets a subclass of its own class, and of its own: that holds the runner, which holds the
modules it runs, so that a model goes with all of this when its user lets go of it. Nothing is
stored in the module. So its parameters, buffers, hooks and `state_dict` are what they were, a deep
copy or a pickle is of the original class and knows nothing of leanstep, and undoing is setting the
class back.
"""

import copyreg
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from leanstep.eager import never_compiled

Runner = Callable[[torch.nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# By the class that the user gave the module, and the method of it that we stand in front of.
_subclasses: dict[tuple[type[torch.nn.Module], str], type[torch.nn.Module]] = {}
_originals: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
# The class that a module has while it is planned.
_classes: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[type[torch.nn.Module]]]"
_classes = weakref.WeakKeyDictionary()
_PLACE = "_leanstep_place"


class _Place:
    """Whose class it is, and what runs its calls: others may be made of the same class."""

    __slots__ = ("module", "runner")

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = weakref.ref(module)
        self.runner: Runner | None = None


def runner_of(module: torch.nn.Module) -> Runner | None:
    """What stands in front of a module."""
    place = _place_of(module)
    return None if place is None else place.runner


def _place_of(module: torch.nn.Module) -> _Place | None:
    place: _Place | None = getattr(type(module), _PLACE, None)
    return place if place is not None and place.module() is module else None


def attach(module: torch.nn.Module, runner: Runner) -> None:
    """Let every call of the module's forward go through the runner.

    A module with a forward of its own, as Accelerate gives it one for mixed precision, does not ask
    its class for that: there its whole call does, with hooks, and who calls that forward himself
    passes the runner by.
    """
    place = _place_of(module)
    # Where somebody has put a class of theirs on top of ours, as `fully_shard` does, ours stays
    # below it, and asks for a runner at every call.
    if place is None or is_planned_class(type(module)):
        original = original_class(module)
        kind = original, "__call__" if "forward" in vars(module) else "forward"
        if kind not in _subclasses:
            _subclasses[kind] = subclass = _make_subclass(*kind)
            _originals[subclass] = original
        _change_class(module, _class_of_its_own(module, _subclasses[kind]))
        place = _place_of(module)
    assert place is not None, "the class was made for this module"
    place.runner = runner


def _class_of_its_own(
    module: torch.nn.Module, base: type[torch.nn.Module]
) -> type[torch.nn.Module]:
    """The same one as before, where it is still there: recordings are of modules of a class."""
    before = _classes.get(module)
    kind = None if before is None else before()
    if kind is None or kind.__mro__[1] is not base:
        kind = _derived(base, {_PLACE: _Place(module)})
        _classes[module] = weakref.ref(kind)
    return kind


def detach(module: torch.nn.Module) -> None:
    """Give a module its own class back."""
    place = _place_of(module)
    _change_class(module, original_class(module))
    if place is not None:
        place.runner = None


def _change_class(module: torch.nn.Module, kind: type[torch.nn.Module]) -> None:
    module.__class__ = kind
    # Code that torch 2.11 has compiled of a model takes a module for what it was as long as nobody
    # has written to its attributes: it would go on without the plan.
    own, name = vars(module), "_leanstep_was_here"
    own[name] = None
    del own[name]


def is_attached(module: torch.nn.Module) -> bool:
    """Whether a runner stands in front of the module."""
    return runner_of(module) is not None


def is_planned_class(kind: type) -> bool:
    """Whether a class is ours, made for one module: what it holds is no code of the user's."""
    return _PLACE in vars(kind)


def original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class the user gave the module."""
    kind = type(module)
    return _originals[kind.__mro__[1]] if is_planned_class(kind) else kind


def as_given(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the class that the user gave this one, with the same attributes.

    Code that is compiled for a block holds for its class, and serves equal blocks.
    """
    kind = original_class(module)
    if kind is type(module) or any(vars(parent).get("__slots__") for parent in kind.__mro__):
        return module
    given: torch.nn.Module = object.__new__(kind)
    object.__setattr__(given, "__dict__", vars(module))
    return given


def can_attach(module: torch.nn.Module) -> bool:
    """Whether the module's forward is found on its class, where we can stand in front of it."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return not scripted and "forward" not in vars(module) and "__call__" not in vars(module)


def _make_subclass(original: type[torch.nn.Module], name: str) -> type[torch.nn.Module]:
    def through_runner(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not before: somebody may have put another one there since.
        run = getattr(original, name)
        runner = runner_of(self)
        if runner is None:
            return run(self, *args, **kwargs)
        return runner(self, run, args, kwargs)

    through_runner.__name__ = name
    with suppress(TypeError, ValueError):
        # Others ask it which arguments the model takes: Transformers' Trainer drops the rest.
        signature = inspect.signature(getattr(original, name))
        through_runner.__signature__ = signature  # type: ignore[attr-defined]

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        # What is copied or saved is a module of the user's class, loadable without leanstep.
        reduced: Any = original.__reduce_ex__(self, protocol)
        if reduced[0] not in (copyreg.__newobj__, copyreg._reconstructor):  # type: ignore[attr-defined]
            # The user says how to rebuild it, and knows nothing of our class.
            return reduced
        return (copyreg._reconstructor, (original, object, None), *reduced[2:])  # type: ignore[attr-defined]

    return _derived(original, {name: never_compiled(through_runner), "__reduce_ex__": reduce})


def _derived(base: type[torch.nn.Module], names: Mapping[str, Any]) -> type[torch.nn.Module]:
    """A class that goes by the name of its base."""
    known = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    names = {**known, **names}
    if not any("__init_subclass__" in vars(parent) for parent in base.__mro__[:-1]):
        return type(base.__name__, (base,), names)
    # The user's code that is told of every subclass, and may keep it, hears nothing of ours.
    kind = type.__new__(type(base), base.__name__, (torch.nn.Module,), names)
    kind.__bases__ = (base,)
    return kind
