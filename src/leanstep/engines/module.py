"""Whole modules through torch's own checkpointing: keeps inputs, runs the module again.

What torch leaves to its user is done here: buffers move once, and Python's own random numbers
repeat. Which calls may run this way is said in `whole.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from leanstep.eager import never_compiled, uncompiled
from leanstep.engines.randomness import other_random_states, same_other_draws
from leanstep.engines.settings import Switch, settings_now
from leanstep.errors import InputError
from leanstep.recorder.company import full_name, is_torchs_own
from leanstep.torch_private.modules import forward_hooks
from leanstep.torch_private.tensors import (
    same_versions_after,
    tree_flatten,
    tree_unflatten,
    version,
)

_MODULE_OWN = frozenset(vars(torch.nn.Module()))


def check_own(path: str) -> None:
    """Say so when the function that this engine runs blocks through is no longer torch's."""
    if not is_torchs_own(checkpoint):
        raise InputError(
            f"torch.utils.checkpoint.checkpoint was replaced by {full_name(checkpoint)} before "
            f"leanstep was loaded, and the plan runs {path or 'the model'} through it: import "
            'leanstep.engines first, or fit with engine="replay"'
        )


@dataclass(frozen=True, slots=True)
class Again:
    """What a second run needs.

    `check` is called before it, and raises if it would not be like the first; `written` are the
    buffers that a run writes, each with whether the second needs it as it was.
    """

    check: Callable[[], None]
    written: list[tuple[torch.Tensor, bool]]


def run_checkpointed(
    name: str,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rounds: Any,
    again: Again,
) -> Any:
    """Run a module so that backward runs it again instead of holding what it saved."""
    leaves, structure = tree_flatten((args, kwargs))
    call = _CheckpointedCall(name, module, forward, rounds, again, structure)
    call.first = (args, kwargs)
    return checkpoint(never_compiled(_run), call, *leaves, use_reentrant=False)


def _run(call: "_CheckpointedCall", *leaves: Any) -> Any:
    with uncompiled():
        return call(*leaves)


class _CheckpointedCall:
    """The function that checkpointing calls twice: once in forward, once in backward."""

    def __init__(
        self,
        name: str,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        rounds: Any,
        again: Again,
        structure: Any,
    ) -> None:
        self.name, self.module, self.forward = name, module, forward
        self.rounds, self.structure = rounds, structure
        self.check, self.written = again.check, again.written
        self.first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.seen = None if rounds.observer is None else rounds.observer.first_run()
        self.start: _Start | None = None

    def __call__(self, *leaves: Any) -> Any:
        if self.start is None:
            assert self.first is not None
            # The very collections that the user passed; the second run has others, as they were.
            (args, kwargs), self.first = self.first, None
            self.start = _Start(self.module, list(leaves), self.written)
            with self.seen or nullcontext():
                out = self.forward(self.module, *args, **kwargs)
            self.start.ended()
            return out
        self.rounds.saw_backward()
        self.check()
        args, kwargs = tree_unflatten(leaves, self.structure)
        active, self.rounds.active = self.rounds.active, True
        seen = nullcontext() if self.seen is None else self.seen.again(self.name)
        try:
            with _silent_hooks(self.module), self.start.again(), seen:
                return self.forward(self.module, *args, **kwargs)
        finally:
            self.rounds.active = active


class _Start:
    """How things stood when forward began, as far as forward can change them.

    `written` are the buffers that it writes, each with whether a second run needs it as it was:
    what batch norm puts out in training does not depend on its statistics.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        arguments: list[Any],
        written: list[tuple[torch.Tensor, bool]],
    ) -> None:
        self.module = module
        self.draws, self.settings = other_random_states(), settings_now()
        self.attributes = _Attributes(module)
        arguments = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        # Of what the block writes there are copies: it may be written again.
        own = {id(buffer) for buffer, _ in written}
        buffers = (buffer for buffer in module.buffers() if id(buffer) not in own)
        self._read = [*arguments, *module.parameters(), *buffers]
        self._versions: list[int] = []
        self.written = [buffer for buffer, _ in written]
        self.copies = [(buffer, _copy(buffer)) for buffer, needed in written if needed]

    def ended(self) -> None:
        """Note that forward has ended; what is written from now on would change a second run."""
        self._versions = [version(tensor) for tensor in self._read]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put everything back for a second run, and after it as forward has left it."""
        if self._versions != [version(tensor) for tensor in self._read]:
            raise RuntimeError(
                "leanstep: an argument, weight or buffer of a block that backward runs again was "
                "changed in place after its forward. Change it after backward, or keep the block."
            )
        now, copies = _Attributes(self.module), [(b, _copy(b)) for b in self.written]
        self.attributes.put_back()
        with same_versions_after(self.written):
            try:
                _fill(self.copies)
                with same_other_draws(self.draws), Switch() as switch:
                    switch.to(self.settings)
                    yield
            finally:
                now.put_back()
                _fill(copies)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _fill(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for buffer, copy in copies:
            buffer.copy_(copy)


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
def _silent_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Silence hooks inside the block: in forward there were none."""
    with ExitStack() as stack:
        # The block's own hooks run around its forward, not inside it.
        for inner in list(module.modules())[1:]:
            for hooks in forward_hooks(inner):
                for key, hook in list(hooks.items()):
                    hooks[key] = _do_nothing
                    stack.callback(hooks.__setitem__, key, hook)
        yield


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook."""
