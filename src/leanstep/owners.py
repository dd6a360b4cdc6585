"""Find out who else already drops activations of a model, or compiles it.

Two owners of one model undo each other's work: what a checkpoint drops, a plan cannot count on, and
compiled code runs other ops than those that were recorded. So another owner is refused by name with
the call that switches it off, or, where the user allows it, is switched off until the plan is
removed. Switching off sets attributes of the modules that hold the switch; putting them back gives
the very same objects back.

A model that calls `torch.utils.checkpoint` in its own code has no switch; it is recorded as it
runs (`recorder/company.py`).
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from leanstep.errors import InputError
from leanstep.torch_private.modules import CHECKPOINT_WRAPPED, composable_checkpoint
from leanstep.torch_private.stance import is_compiler_on

_ABSENT = object()


@dataclass(frozen=True)
class Switch:
    """One entry of an object's attributes, and the value with which its owner is off."""

    names: dict[str, Any]
    name: str
    off: Any

    def turn_off(self) -> Callable[[], None]:
        """Set the entry; what comes back puts it as it was."""
        names, name = self.names, self.name
        old = names.get(name, _ABSENT)

        def put_back() -> None:
            if old is _ABSENT:
                names.pop(name, None)
            else:
                names[name] = old

        if self.off is _ABSENT:
            names.pop(name, None)
        else:
            names[name] = self.off
        return put_back


@dataclass(frozen=True)
class Owner:
    """Someone else who holds a module: who, how to switch them off by hand, and the switch."""

    name: str
    advice: str
    switch: Switch | None


@dataclass
class Taken:
    """What was switched off for a plan, until it is given back."""

    names: tuple[str, ...] = ()
    put_back: list[Callable[[], None]] = field(default_factory=list)

    def give_back(self) -> None:
        """Let the other owners have the model again, exactly as they had it."""
        while self.put_back:
            self.put_back.pop()()


def refuse_owners(model: nn.Module) -> None:
    """Say so when someone else already drops activations of the model, or compiles it."""
    found = find_owners(model)
    if found:
        path, owner = found[0]
        takeover = "" if any(o.switch is None for _, o in found) else _TAKEOVER
        raise InputError(f"{_who(found, owner, path)}: {owner.advice}{takeover}")


_TAKEOVER = ", or let leanstep.fit(..., takeover=True) switch it off until remove()"


@contextmanager
def taken_over(model: nn.Module, wanted: bool) -> Iterator[Taken]:
    """Switch off other owners where that is wanted; give the model back if the block fails."""
    taken = Taken()
    if wanted:
        _take(model, taken)
    try:
        yield taken
    except BaseException:
        taken.give_back()
        raise


def _take(model: nn.Module, taken: Taken) -> None:
    found = find_owners(model)
    for path, owner in found:
        if owner.switch is None:
            raise InputError(
                f"{_who(found, owner, path)}, and takeover=True cannot switch that off from "
                f"outside: {owner.advice}"
            )
    taken.names = tuple(dict.fromkeys(owner.name for _, owner in found))
    taken.put_back += [owner.switch.turn_off() for _, owner in found if owner.switch is not None]


def _who(found: list[tuple[str, Owner]], owner: Owner, path: str) -> str:
    more = sum(other.name == owner.name for _, other in found) - 1
    where = path or "the model itself"
    others = f" and {more} more module{'s' if more > 1 else ''}" if more else ""
    return f"this model is already under {owner.name} ({where}{others})"


def find_owners(model: nn.Module) -> list[tuple[str, Owner]]:
    """Every other owner in a model, each with the path of the module that it holds."""
    finders = (_flag, _wrapper, _composable, _own_forward, _compiled)
    return [
        (path, owner)
        for path, module in model.named_modules()
        for find in finders
        if (owner := find(model, path, module)) is not None
    ]


# Attributes that switch a model's own checkpointing on, whose they are, and the method to switch it
# off where the model has it.
_FLAGS = (
    (
        "gradient_checkpointing",
        "Hugging Face's gradient checkpointing",
        ("gradient_checkpointing_disable()", "disable_gradient_checkpointing()"),
    ),
    ("grad_checkpointing", "timm's gradient checkpointing", ("set_grad_checkpointing(False)",)),
    ("with_cp", "MMCV's checkpointing", ()),
)


def _flag(model: nn.Module, path: str, module: nn.Module) -> Owner | None:
    for flag, name, calls in _FLAGS:
        # Not getattr: a wrapper answers for what it wraps.
        if vars(module).get(flag, getattr(type(module), flag, False)) is True:
            advice = _call_that_unsets(model, calls) or f"set {_expression(path)}.{flag} = False"
            return Owner(name, f"{advice} first", Switch(vars(module), flag, False))
    return None


def _call_that_unsets(model: nn.Module, calls: tuple[str, ...]) -> str | None:
    """`call model.encoder.gradient_checkpointing_disable()`, for the outermost that has it."""
    for path, module in model.named_modules():
        for call in calls:
            if callable(getattr(module, call.partition("(")[0], None)):
                return f"call {_expression(path)}.{call}"
    return None


def _expression(path: str) -> str:
    """How a user writes a module: `model.layers[3].mlp`."""
    parts = (f"[{part}]" if part.isdigit() else f".{part}" for part in path.split(".") if part)
    return "model" + "".join(parts)


def _wrapper(_: nn.Module, path: str, module: nn.Module) -> Owner | None:
    """A module around another: torch's own, and others of the same name."""
    kind = type(module)
    name = f"{kind.__module__.partition('.')[0]}'s {kind.__name__}"
    if not _has(module, CHECKPOINT_WRAPPED):
        # What else such a wrapper does is not known, so what it wraps cannot run in its place.
        advice = f"put the module that {_expression(path)} wraps in its place"
        return Owner(name, advice, None) if kind.__name__.endswith("CheckpointWrapper") else None
    inner = module.get_submodule(CHECKPOINT_WRAPPED)
    if vars(module).get("forward") == inner.__call__:
        return None
    advice = (
        "leave out the call that wrapped it (checkpoint_wrapper, apply_activation_checkpointing)"
    )
    return Owner(name, advice, Switch(vars(module), "forward", inner.__call__))


def _has(module: nn.Module, child: str) -> bool:
    return any(name == child for name, _ in module.named_children())


def _composable(_: nn.Module, path: str, module: nn.Module) -> Owner | None:
    state = composable_checkpoint(module)
    if state is None or not state.enable_hook:
        return None
    name = "torch.distributed's composable checkpoint"
    advice = f"leave out the call checkpoint({_expression(path)}) that put it there"
    return Owner(name, advice, Switch(vars(state), "enable_hook", False))


def _own_forward(_: nn.Module, path: str, module: nn.Module) -> Owner | None:
    """A forward set on the module itself, that goes through somebody's checkpoint function."""
    forward = vars(module).get("forward")
    function = forward.func if isinstance(forward, functools.partial) else forward
    source = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if "checkpoint" not in source.rpartition(".")[2]:
        return None
    behind = forward.args[0] if isinstance(forward, functools.partial) and forward.args else None
    plain = getattr(behind, "__func__", behind) is type(module).forward
    return Owner(
        f"a forward that calls {source}",
        f"del {_expression(path)}.forward first",
        Switch(vars(module), "forward", _ABSENT) if plain else None,
    )


def _compiled(_: nn.Module, path: str, module: nn.Module) -> Owner | None:
    """What torch.compile made of a module, or `module.compile()` put into it."""
    name = "torch.compile"
    if not is_compiler_on():
        return None
    if type(module).__name__ == "OptimizedModule" and _has(module, "_orig_mod"):
        original = module.get_submodule("_orig_mod")
        if vars(module).get("forward") == original.__call__:
            return None
        plain = f"{_expression(path)}._orig_mod"
        advice = f"fit {plain} and compile after that" if not path else f"put {plain} in its place"
        return Owner(name, advice, Switch(vars(module), "forward", original.__call__))
    if vars(module).get("_compiled_call_impl") is None:
        return None
    advice = f"set {_expression(path)}._compiled_call_impl = None, and compile after fit"
    return Owner(name, advice, Switch(vars(module), "_compiled_call_impl", None))
