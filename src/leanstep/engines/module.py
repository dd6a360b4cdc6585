"""Whole modules through torch's own checkpointing: keeps inputs, runs the module again.

What torch leaves to its user is done here: buffers move once, and Python's own random numbers
repeat. Which calls may run this way is said in `whole.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from leanstep.engines.randomness import other_random_states, same_other_draws
from leanstep.torch_private import forward_hooks, tree_flatten, tree_unflatten, version

_MODULE_OWN = frozenset(vars(torch.nn.Module()))


def run_checkpointed(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rounds: Any,
    check: Callable[[], None],
) -> Any:
    """Run a module so that backward runs it again instead of holding what it saved.

    `check` is called before the second run, and raises if that would not be like the first.
    """
    leaves, structure = tree_flatten((args, kwargs))
    call = _CheckpointedCall(module, forward, rounds, check, structure)
    call.first = (args, kwargs)
    return checkpoint(call, *leaves, use_reentrant=False)


class _CheckpointedCall:
    """The function that checkpointing calls twice: once in forward, once in backward."""

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        rounds: Any,
        check: Callable[[], None],
        structure: Any,
    ) -> None:
        self.module, self.forward, self.rounds, self.check = module, forward, rounds, check
        self.structure = structure
        self.first: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.start: _Start | None = None

    def __call__(self, *leaves: Any) -> Any:
        if self.start is None:
            assert self.first is not None
            # The very collections that the user passed; the second run has others, as they were.
            (args, kwargs), self.first = self.first, None
            self.start = _Start(self.module, list(leaves))
            out = self.forward(self.module, *args, **kwargs)
            self.start.keep_what_changed()
            return out
        self.rounds.saw_backward()
        self.check()
        args, kwargs = tree_unflatten(leaves, self.structure)
        active, self.rounds.active = self.rounds.active, True
        try:
            with _silent_hooks(self.module), self.start.again():
                return self.forward(self.module, *args, **kwargs)
        finally:
            self.rounds.active = active


class _Start:
    """How things stood when forward began, as far as forward can change them."""

    def __init__(self, module: torch.nn.Module, arguments: list[Any]) -> None:
        self.module = module
        self.draws = other_random_states()
        self.attributes = _Attributes(module)
        tensors = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self.arguments = [(tensor, version(tensor)) for tensor in tensors]
        self.parameters = [(p, version(p)) for p in module.parameters()]
        self.buffers = [(buffer, version(buffer), _copy(buffer)) for buffer in module.buffers()]

    def keep_what_changed(self) -> None:
        """Let go of the copies of buffers that forward did not write.

        Batch norm writes its statistics without saying so; they do not change its output.
        """
        self.buffers = [entry for entry in self.buffers if version(entry[0]) != entry[1]]
        if any(version(parameter) != old for parameter, old in self.parameters):
            raise RuntimeError(
                "leanstep: a block that backward runs again writes a parameter in its forward (an "
                "Embedding with max_norm?), so a second run would differ. Keep the block."
            )
        self.parameters.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put everything back for a second run, and after it as forward has left it."""
        if any(version(tensor) != old for tensor, old in self.arguments):
            raise RuntimeError(
                "leanstep: an argument of a block that backward runs again was changed in place "
                "since, by the block or after it. Change it out of place, or keep the block."
            )
        now, copies = _Attributes(self.module), [(b, _copy(b)) for b in self.module.buffers()]
        self.attributes.put_back()
        for buffer, _, copy in self.buffers:
            buffer.data.copy_(copy)
        try:
            with same_other_draws(self.draws):
                yield
        finally:
            now.put_back()
            for buffer, copy in copies:
                # Through `data`: autograd shall not take this for a change.
                buffer.data.copy_(copy)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


class _Attributes:
    """The attributes of a block's modules, tensors included, and what their collections hold."""

    def __init__(self, module: torch.nn.Module) -> None:
        own = [vars(inner) for inner in module.modules()]
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
