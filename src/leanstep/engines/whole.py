"""Whole modules: run again in backward where a second run is sure to be like the first.

A second run of the user's code repeats what that code does to the world: it counts again, reads an
iterator further, fires hooks. So a call goes through checkpointing only if calls that look like it
were seen to read nothing but what is watched, and to change none of it. All others are recorded,
and everything that can be is dropped; so are the first calls, from which this is learnt.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from leanstep.engines.context import Context
from leanstep.engines.live import LiveCall
from leanstep.engines.looks import UncacheableError
from leanstep.engines.module import run_checkpointed
from leanstep.engines.reach import Executed, Watched
from leanstep.engines.scope import Scope
from leanstep.engines.validity import Watch, call_key, same
from leanstep.torch_private import global_forward_hooks, version

# Kinds of calls remembered for a block.
_REMEMBERED = 16


class WholeModule:
    """Run the calls of one block that follow one decision."""

    def __init__(self, scope: Scope, rounds: Any) -> None:
        self._scope, self._rounds = scope, rounds
        self._executed = Executed()
        self._watch: Watch | None = None
        self._repeatable: dict[Any, list[Any]] = {}

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
        fires_hooks = watch.fires_hooks or any(global_forward_hooks())
        if same(self._repeatable.get(key, []), state) and not fires_hooks:
            check = _Unchanged(watch, state)
            return run_checkpointed(module, forward, args, kwargs, self._rounds, check)
        seen, tensors = len(self._executed.codes), [*module.parameters(), *arguments]
        versions = [version(tensor) for tensor in tensors]
        watched = Watched(self._executed, module, forward)
        out = self._record(context, watched, (module, *args), kwargs)
        is_known = watched.is_seen and seen == len(self._executed.codes)
        is_written = versions != [version(tensor) for tensor in tensors]
        if is_known and not is_written and _is(watch, state):
            while len(self._repeatable) >= _REMEMBERED:
                self._repeatable.pop(next(iter(self._repeatable)))
            self._repeatable[key] = state
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
    ) -> Any:
        return LiveCall(context, _Everything(), self._scope).run(forward, args, kwargs)


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
