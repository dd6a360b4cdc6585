"""Let ops on fake CPU tensors take the form that they would have on a CUDA device.

Most operators are the same on every device. Those that are not are changed where Python calls
them, by a function mode (`forms.py`). Autocast casts as on CUDA (`autocast.py`), and `"cuda"` as a
device means here.

A function of torch that is written in Python is entered with the mode on, past its own check for
modes: otherwise everything inside `multi_head_attention_forward`, or in the recomputation that
`Tensor.backward` may cause, would be out of sight.
"""

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from leanstep.imagine.autocast import call_with_casts
from leanstep.imagine.forms import FORMS
from leanstep.imagine.tensors import StandIns
from leanstep.torch_private.fake import is_fake
from leanstep.torch_private.tensors import wraps_others

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
# Not all of Tensor's methods: some call the method in C++ that they stand in front of.
_COMPOSED = ("torch.nn.functional", "torch.functional", "torch.autograd")
_HERE = torch.device("cpu")


class Target(TorchFunctionMode):
    """The function mode; `numbers_known` lets an optimizer read its step count."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._numbers_known = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one function as the target would."""
        if func.__name__ == "__get__":
            # The recorder reads many properties of every tensor of backward.
            return func(*args)
        inside = past_its_check(func)
        if inside is not None:
            with self:
                return inside(*args, **(kwargs or {}))
        name = plain_name(func)
        args = [self._stand_in(arg) for arg in args]
        kwargs = {key: self._stand_in(arg) for key, arg in (kwargs or {}).items()}
        if name == "cuda":
            return args[0]
        if self._numbers_known and func.__name__ in ("item", "__float__", "__int__"):
            return 1.0 if args[0].is_floating_point() else 1
        if name == "to":
            args = [_here(arg) for arg in args]
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        form = FORMS.get(name)
        if form is not None:
            func = functools.partial(form, func)
        if torch.is_autocast_enabled("cpu"):
            return call_with_casts(name, func, args, kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def numbers_known(self) -> Iterator[None]:
        """Answer 1 to every request for a number."""
        self._numbers_known = True
        try:
            yield
        finally:
            self._numbers_known = False

    def _stand_in(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            # One that is spread over ranks is made of stand-ins.
            is_made = is_fake(argument) or wraps_others(type(argument))
            return argument if is_made else self._stand_ins.tensor(argument)
        if isinstance(argument, (list, tuple)) and type(argument) in (list, tuple):
            return type(argument)(map(self._stand_in, argument))
        return argument


def plain_name(func: Any) -> str:
    """A function's name without the underscores of operators: `__matmul__` is `matmul`."""
    name: str = getattr(func, "__name__", "")
    return name.strip("_") if name.startswith("__") else name


def past_its_check(func: Any) -> Callable[..., Any] | None:
    """A Python function of torch that does not ask for modes first; None for one in C++."""
    is_composed = isinstance(func, types.FunctionType) and func.__module__ in _COMPOSED
    return _past_its_check(func) if is_composed or func is torch.Tensor.backward else None


@functools.cache
def _past_its_check(func: types.FunctionType) -> Callable[..., Any] | None:
    if not any(name in func.__globals__ for name in _CHECKS if name in func.__code__.co_names):
        return None
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    copy = types.FunctionType(
        func.__code__, names, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _here(device: Any) -> Any:
    """The CPU for a CUDA device; anything else as it is."""
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    named_cuda = isinstance(device, str) and device.startswith("cuda")
    return _HERE if is_cuda or named_cuda else device
