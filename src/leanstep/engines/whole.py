"""Whole modules: run again in backward where a second run is sure to be like the first.

A second run of the user's code repeats what that code does to the world: it counts again, reads an
iterator further, fires hooks. So a call goes through checkpointing only if calls that look like it
were seen to read nothing but what is watched, and to change none of it. All others are recorded,
and everything that can be is dropped; so are the first calls, from which this is learnt.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.engines.cached import can_locate
from leanstep.engines.context import Context
from leanstep.engines.live import LiveCall
from leanstep.engines.looks import UncacheableError
from leanstep.engines.module import Again, run_checkpointed
from leanstep.engines.reach import Executed, Watched
from leanstep.engines.scope import Scope
from leanstep.engines.validity import Watch, call_key, same
from leanstep.recorder.values import has_storage
from leanstep.torch_private.modules import global_forward_hooks
from leanstep.torch_private.tensors import storage_address, tree_leaves

# Kinds of calls remembered for a block.
_REMEMBERED = 16


class WholeModule:
    """Run the calls of one block that follow one decision."""

    def __init__(self, scope: Scope, rounds: Any) -> None:
        self._scope, self._rounds = scope, rounds
        self._executed = Executed()
        self._watch: Watch | None = None
        self._repeatable: dict[Any, _Seen] = {}

    def run(
        self,
        context: Context,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call, by checkpointing where that is known to be right."""
        if self._watch is None:
            self._watch = Watch(list(module.modules()), self._executed)
        watch = self._watch
        try:
            key, arguments = call_key(args, kwargs)
            state = watch.state()
        except UncacheableError:
            return self._record(context, forward, (module, *args), kwargs)
        seen = self._repeatable.get(key)
        fires_hooks = watch.fires_hooks or any(global_forward_hooks())
        if seen is not None and same(seen.state, state) and not fires_hooks:
            again = Again(_Unchanged(watch, state), seen.buffers(watch.modules))
            name = context.block_name
            return run_checkpointed(name, module, forward, args, kwargs, self._rounds, again)
        num_codes = len(self._executed.codes)
        watched = Watched(self._executed, module, forward)
        look = _Look(arguments, watch.modules, self._executed)
        out = self._record(context, watched, (module, *args), kwargs, look)
        is_known = watched.is_seen and num_codes == len(self._executed.codes)
        if is_known and look.is_repeatable and _is(watch, state):
            while len(self._repeatable) >= _REMEMBERED:
                self._repeatable.pop(next(iter(self._repeatable)))
            self._repeatable[key] = _Seen(state, look.written)
        self._watch = Watch(list(module.modules()), self._executed)
        if self._watch.missing:
            self._repeatable.clear()
        return out

    def _record(
        self,
        context: Context,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        look: Callable[[LiveCall], None] = lambda call: None,
    ) -> Any:
        module, *others = args
        leaves = (leaf for leaf in tree_leaves((others, kwargs)) if isinstance(leaf, torch.Tensor))
        safe = {storage_address(t) for t in (*module.parameters(), *leaves) if has_storage(t)}

        def is_safe(tensor: torch.Tensor) -> bool:
            # Anything else may be written by the next call: nobody has asked the planner.
            return storage_address(tensor) in safe

        call = LiveCall(context, EVERYTHING, self._scope, is_safe=is_safe)
        return call.run(forward, args, kwargs, look)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A kind of call that may run again, and the buffers that it writes.

    Each by the number of its module, its name, and whether a second run needs it as it was.
    """

    state: list[Any]
    written: list[tuple[int, str, bool]]

    def buffers(self, modules: list[torch.nn.Module]) -> list[tuple[torch.Tensor, bool]]:
        """The buffers that the call writes, each with whether a second run needs it as it was."""
        return [(modules[number].get_buffer(name), needed) for number, name, needed in self.written]


class _Look:
    """See whether a recorded call reads nothing but arguments and attributes of its modules.

    And writes nothing but buffers of theirs, and draws from the usual generators alone.
    """

    def __init__(
        self,
        arguments: list[torch.Tensor],
        modules: list[torch.nn.Module],
        executed: Executed,
    ) -> None:
        self._arguments, self._modules, self._executed = arguments, modules, executed
        self._buffers = _buffers(modules)
        self.is_repeatable = False
        self.written: list[tuple[int, str, bool]] = []

    def __call__(self, call: LiveCall) -> None:
        recorder, written = call.recorder, call.recorder.written
        found = [can_locate(t, self._arguments, self._modules) for t in recorder.outside.values()]
        addresses = set[int]()
        for number, module in enumerate(self._modules):
            for name, buffer in module.named_buffers(recurse=False):
                address = storage_address(buffer)
                if address in written:
                    addresses.add(address)
                # Where data say the path, another call may write or read what this one has not.
                varies = recorder.depends_on_data or self._executed.reads_values
                if address in written or varies:
                    self.written.append((number, name, varies or written[address]))
        is_exchanged = _buffers(self._modules) != self._buffers
        self.is_repeatable = (
            all(found)
            and addresses == written.keys()
            and not is_exchanged
            and not recorder.draws_apart
        )


def _buffers(modules: list[torch.nn.Module]) -> list[int]:
    return [id(buffer) for module in modules for buffer in module.buffers(recurse=False)]


def _is(watch: Watch, state: list[Any]) -> bool:
    try:
        return same(state, watch.state())
    except UncacheableError:
        return False


class _Unchanged:
    """Raise unless all that a call reads is as it was."""

    def __init__(self, watch: Watch, state: list[Any]) -> None:
        self._watch, self._state = watch, state

    def __call__(self) -> None:
        if not _is(self._watch, self._state):
            raise RuntimeError(
                "leanstep: something that a block reads (a global, an attribute, a hook) was "
                "changed between its forward and its backward, which runs the block again. Change "
                'it after backward, or fit with engine="replay".'
            )


class _Everything(Collection[str]):
    """All values of a call."""

    def __contains__(self, key: object) -> bool:
        return key is not None

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


# All that a call makes and that can be rebuilt.
EVERYTHING = _Everything()
