"""Whole modules through torch's own checkpointing: keeps inputs, runs the module again.

Used where a recording cannot be replayed. What torch leaves to its user is done here: buffers and
whatever else the block writes move once, user hooks inside the block fire once, and generators of
any kind that it draws from repeat. A second run that would start from something else is an error.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from leanstep.eager import never_compiled, uncompiled
from leanstep.engines.randomness import other_random_states, same_other_draws
from leanstep.engines.witness import Suspicion, Witness
from leanstep.errors import InputError
from leanstep.generators import HeldGenerators
from leanstep.recorder.company import full_name, is_torchs_own
from leanstep.recorder.values import has_storage
from leanstep.torch_private import forward_hooks, tree_leaves, version

_MODULE_OWN = frozenset(vars(torch.nn.Module()))


def check_own(path: str) -> None:
    """Say so when the function that this engine runs blocks through is no longer torch's."""
    if not is_torchs_own(checkpoint):
        raise InputError(
            f"torch.utils.checkpoint.checkpoint was replaced by {full_name(checkpoint)} before "
            f"leanstep was loaded, and the plan runs {path or 'the model'} through it: import "
            'leanstep.engines first, or fit with engine="replay"'
        )


def run_checkpointed(
    name: str,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rounds: Any,
) -> Any:
    """Run a module so that backward runs it again instead of holding what it saved."""
    call = _CheckpointedCall(name, module, forward, rounds)
    return checkpoint(never_compiled(_run), call, args, kwargs, use_reentrant=False)


def _run(call: "_CheckpointedCall", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with uncompiled():
        return call(args, kwargs)


class _CheckpointedCall:
    """The function that checkpointing calls twice: once in forward, once in backward."""

    def __init__(
        self, name: str, module: torch.nn.Module, forward: Callable[..., Any], rounds: Any
    ) -> None:
        self.name, self.module, self.forward, self.rounds = name, module, forward, rounds
        self.seen = None if rounds.observer is None else rounds.observer.first_run()
        self.fired: dict[int, bool] = {}
        self.start: _Start | None = None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.start is None:
            self.start = _Start(self.name, self.module, tree_leaves((args, kwargs)))
            seen = self.seen or nullcontext()
            with _watched_hooks(self.module, self.fired), self.start.witness, seen:
                out = self.forward(self.module, *args, **kwargs)
            self.start.check_parameters()
            return out
        self.rounds.saw_backward()
        active, self.rounds.active = self.rounds.active, True
        seen = nullcontext() if self.seen is None else self.seen.again(self.name)
        try:
            with _silent_hooks(self.module, self.fired), self.start.again(), seen:
                return self.forward(self.module, *args, **kwargs)
        finally:
            self.rounds.active = active


class _Start:
    """How things stood when forward began, as far as forward can change them."""

    def __init__(self, name: str, module: torch.nn.Module, arguments: list[Any]) -> None:
        self.name, self.module = name, module
        self.draws = other_random_states()
        self.held = HeldGenerators(list(module.modules()))
        self.held_states = self.held.states()
        self.attributes = _Attributes(module)
        tensors = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self.arguments = [(tensor, version(tensor)) for tensor in tensors]
        parameters = (p for p in module.parameters() if has_storage(p))
        self.witness = Witness(parameters)

    def check_parameters(self) -> None:
        """Refuse a call that writes a parameter: a copy of it is no bargain."""
        if self.witness.writes(list(self.module.parameters())):
            raise RuntimeError(
                "leanstep: a block that backward runs again writes a parameter in its forward (an "
                "Embedding with max_norm?), so a second run would differ. Keep the block."
            )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put everything back for a second run, and after it as forward has left it."""
        is_written = self.witness.writes([tensor for tensor, _ in self.arguments])
        if is_written or any(version(tensor) != old for tensor, old in self.arguments):
            raise RuntimeError(
                "leanstep: an argument of a block that backward runs again was changed in place "
                "since, by the block or after it. Change it out of place, or keep the block."
            )
        if self.witness.changed():
            raise RuntimeError(
                f"leanstep: a tensor that {self.name} reads was changed in place after its forward,"
                " and backward runs the block again. Change it out of place, or keep the block."
            )
        now, states = _Attributes(self.module), self.held.states()
        self.attributes.put_back()
        self.held.set_states(self.held_states)
        try:
            with (
                same_other_draws(self.draws),
                self.witness.as_before(),
                Suspicion(self.witness, self.name),
            ):
                yield
        finally:
            now.put_back()
            self.held.set_states(states)


class _Attributes:
    """The attributes of a block's modules, tensors included, and what their collections hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        # What torch.jit made keeps its attributes out of Python's sight.
        scripted = torch.jit.ScriptModule
        own = [vars(inner) for inner in module.modules() if not isinstance(inner, scripted)]
        self._noted = [(names, _own_items(names)) for names in own]
        # Parameters too: `functional_call` puts others in their place for the time of a call.
        for group in ("_buffers", "_parameters"):
            self._noted += [(names[group], dict(names[group])) for names in own]
        self._collections = [
            (value, type(value)(value))
            for _, items in self._noted
            for value in items.values()
            if type(value) in (list, dict, set)
        ]

    def put_back(self) -> None:
        """Undo what was set, added or taken away since."""
        for names, items in self._noted:
            for added in _own_items(names).keys() - items.keys():
                del names[added]
            names.update(items)
        for collection, copy in self._collections:
            collection.clear()
            add = collection.extend if isinstance(collection, list) else collection.update
            add(copy)


def _own_items(names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in _MODULE_OWN}


@contextmanager
def _watched_hooks(module: torch.nn.Module, changed: dict[int, bool]) -> Iterator[None]:
    """Note which hooks inside the block change what passes through them, or their module.

    The second kind computes a weight, as `torch.nn.utils.weight_norm` does.
    """

    def watch(hook: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = dict(vars(module))
            result = hook(module, *args, **kwargs)
            sets = any(before.get(name) is not value for name, value in vars(module).items())
            changed[id(hook)] = changed.get(id(hook), False) or sets or result is not None
            return result

        return watched

    with _replaced_hooks(module, watch):
        yield


@contextmanager
def _silent_hooks(module: torch.nn.Module, changed: dict[int, bool]) -> Iterator[None]:
    """Silence the hooks that only looked; those that changed a value must change it again."""

    def silence(hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook if changed.get(id(hook)) else _do_nothing

    with _replaced_hooks(module, silence):
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook that has fired already."""


@contextmanager
def _replaced_hooks(
    module: torch.nn.Module, replace: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for inner in module.modules():
            # The block's own hooks run around its forward, not inside it.
            for hooks in forward_hooks(inner) if inner is not module else ():
                for key, hook in list(hooks.items()):
                    hooks[key] = replace(hook)
                    stack.callback(_put_back, hooks, key, hook)
        yield


def _put_back(hooks: dict[int, Any], key: int, hook: Any) -> None:
    if key in hooks:
        hooks[key] = hook
