"""Put a runtime in front of a module's forward, and take it away again.

The module gets a subclass of its own class; nothing is stored in the module. So its parameters,
buffers, hooks and `state_dict` are what they were, a deep copy or a pickle is of the original
class and knows nothing of leanstep, and undoing is setting the class back.
"""

import copyreg
import weakref
from collections.abc import Callable
from typing import Any

import torch

from leanstep.eager import never_compiled

Runner = Callable[[torch.nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_runners: "weakref.WeakKeyDictionary[torch.nn.Module, Runner]" = weakref.WeakKeyDictionary()
_subclasses: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
_originals: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}


def attach(module: torch.nn.Module, runner: Runner) -> None:
    """Let every call of the module's forward go through the runner."""
    if _is_carried(module):
        _runners[module] = runner
        return
    original = original_class(module)
    if original not in _subclasses:
        subclass = _make_subclass(original)
        _subclasses[original], _originals[subclass] = subclass, original
    _runners[module] = runner
    module.__class__ = _subclasses[original]


def detach(module: torch.nn.Module) -> None:
    """Give a module its own class back."""
    module.__class__ = original_class(module)
    _runners.pop(module, None)


def is_attached(module: torch.nn.Module) -> bool:
    """Whether a runner stands in front of the module."""
    return module in _runners or type(module) in _originals


def _is_carried(module: torch.nn.Module) -> bool:
    """Whether somebody has put a class of theirs on top of ours, as `fully_shard` does.

    Ours stays below it, and asks for a runner at every call.
    """
    kind, *above = type(module).__mro__
    return kind not in _originals and any(base in _originals for base in above)


def original_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class the user gave the module."""
    return _originals.get(type(module), type(module))


def can_attach(module: torch.nn.Module) -> bool:
    """Whether the module's forward is found on its class, where we can stand in front of it."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return not scripted and "forward" not in vars(module) and "__call__" not in vars(module)


def _make_subclass(original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = _runners.get(self)
        if runner is None:
            return original.forward(self, *args, **kwargs)
        return runner(self, original.forward, args, kwargs)

    def reduce(self: torch.nn.Module, protocol: Any) -> Any:
        # What is copied or saved is a module of the user's class, loadable without leanstep.
        reduced: Any = original.__reduce_ex__(self, protocol)
        if reduced[0] not in (copyreg.__newobj__, copyreg._reconstructor):  # type: ignore[attr-defined]
            # The user says how to rebuild it, and knows nothing of our class.
            return reduced
        return (copyreg._reconstructor, (original, object, None), *reduced[2:])  # type: ignore[attr-defined]

    return type(
        original.__name__,
        (original,),
        {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "forward": never_compiled(forward),
            "__reduce_ex__": reduce,
        },
    )
