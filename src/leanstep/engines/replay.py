"""The replay engine: choose for each call between recording it and running it by a recording.

A call is recorded the first times, whenever it looks different from what is known, and always
where the block reads values on the host or draws Python's random numbers. That is right for any
code. Where recordings agree, the next calls run by them at no cost but the hooks.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.engines.cached import CachedCall, Template, make_template
from leanstep.engines.context import Context
from leanstep.engines.guard import Guard
from leanstep.engines.live import LiveCall
from leanstep.engines.looks import UncacheableError
from leanstep.engines.randomness import CudaDraw, cuda_state, other_random_states
from leanstep.engines.reach import Executed, Watched
from leanstep.engines.rewind import Rewind
from leanstep.engines.scope import Scope
from leanstep.engines.validity import Watch, call_key, same
from leanstep.errors import PlanError
from leanstep.torch_private.modules import forward_hooks

# Recordings that must agree before the first call runs by one.
_AGREEING = 2

# Kinds of calls remembered for a block: batch sizes, training and evaluation.
_REMEMBERED = 16


@dataclass
class _Entry:
    """What is known about calls that look alike."""

    state: list[Any]
    template: Template
    agreed: int = 1
    uses: int = 0
    guard: Guard | None = None

    def look(self, watch: Watch) -> list[Any]:
        """The watch's state: the entry's own, where a guard knows that it is still the same."""
        guard = self.guard
        if guard is not None and guard.watch is watch and guard.holds():
            return self.state
        state = watch.state()
        self.guard = Guard(watch) if same(self.state, state) else None
        return state

    def fits(self, state: list[Any], modules: list[torch.nn.Module]) -> bool:
        """Whether the block's modules are as they were."""
        return same(self.state, state) and self.template.fits(modules)

    def is_usable(self) -> bool:
        """Whether the next call may run by the template; at powers of two it is audited."""
        self.uses += 1
        is_audit = self.uses & (self.uses - 1) == 0
        return self.agreed >= _AGREEING and not is_audit


class Replayer:
    """Run the calls of one block that follow one decision."""

    def __init__(
        self,
        name: str,
        drop: frozenset[str],
        scope: Scope,
        recipes: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.drop, self.scope, self.recipes = name, drop, scope, recipes
        self._is_checked = scope.is_checked
        self.always_record = False
        self.recorded = 0
        self.reused = 0
        self._entries: dict[Any, _Entry] = {}
        self._executed = Executed()
        self._kinds: set[type] = set()
        self._watch: Watch | None = None

    def run(
        self,
        context: Context,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call, by a recording where that is known to be right."""
        if self.always_record:
            return self._record(context, forward, (module, *args), kwargs, _learn_nothing)
        if self._watch is None:
            modules = list(module.modules())
            if any(isinstance(inner, torch.jit.ScriptModule) for inner in modules):
                # Its attributes are out of sight, and torch.jit changes its ops from run to run.
                self.always_record = True
                return self._record(context, forward, (module, *args), kwargs, _learn_nothing)
            self._watch = Watch(modules, self._executed, self._kinds)
        try:
            key, arguments = call_key(args, kwargs, self._kinds)
            entry = self._entries.get(key)
            state = self._watch.state() if entry is None else entry.look(self._watch)
        except UncacheableError:
            return self._record(context, forward, (module, *args), kwargs, _learn_nothing)
        if entry is not None and entry.fits(state, self._watch.modules) and entry.is_usable():
            self.reused += 1
            del self._entries[key]
            rewind = Rewind(self._watch, state, arguments)
            call = CachedCall(entry.template, context)
            try:
                out = call.run(forward, (module, *args), kwargs, arguments, self._watch.modules)
                self._entries[key] = entry
                return out
            except BaseException:
                self.always_record |= bool(call.surprise)
                is_same = _has_key(key, args, kwargs)
                if not call.surprise or not is_same or not rewind.go_back(arguments):
                    raise
            # Out of the handler: it holds the frames of the first run, and what they made.
            return self._record(context.anew(), forward, (module, *args), kwargs, _learn_nothing)
        start = _cuda_start(arguments)
        watched = Watched(self._executed, module, forward)
        learn = self._learner(key, state, arguments, watched, start)
        return self._record(context, watched, (module, *args), kwargs, learn)

    def _record(
        self,
        context: Context,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        learn: Callable[[LiveCall], None],
    ) -> Any:
        self.recorded += 1
        if not self._is_checked and self.scope.is_planned_mode(args[0]):
            learn = self._checking(learn, args[0])
        call = LiveCall(context, self.drop, self.scope, self.recipes)
        return call.run(forward, args, kwargs, learn)

    def _checking(
        self, learn: Callable[[LiveCall], None], module: torch.nn.Module
    ) -> Callable[[LiveCall], None]:
        """Look first whether the call makes all that the plan drops of it."""
        before = other_random_states()
        # Hooks of the block's own were part of the recorded call, and run outside its forward.
        has_hooks = any(forward_hooks(module))

        def check(call: LiveCall) -> None:
            missing = sorted(self.drop.difference(call.recorder.keys.values()))
            if has_hooks:
                missing = [key for key in missing if "::" in key]
            # Where a block takes the path that its data say, a value may be missing by right.
            varies = self._depends_on_data(call) or other_random_states() != before
            if missing and not varies:
                raise PlanError(
                    f"the plan drops {missing[0]} of {self.name}, and this call makes no such "
                    "value: the plan is for another model, batch, autocast setting or version of "
                    "torch. Nothing was computed wrongly; call remove() and plan anew."
                )
            self._is_checked = True
            learn(call)

        return check

    def _learner(
        self,
        key: Any,
        state: list[Any],
        arguments: list[torch.Tensor],
        forward: Watched,
        start: CudaDraw | None,
    ) -> Callable[[LiveCall], None]:
        before = other_random_states()

        def learn(call: LiveCall) -> None:
            if other_random_states() != before or self._depends_on_data(call):
                self.always_record = True
                return
            # The call may have made modules or attributes that were not there before.
            watch = self._watch = Watch(list(forward.module.modules()), self._executed, self._kinds)
            self.always_record = bool(watch.missing)
            template = make_template(call, arguments, watch.modules, start)
            if template is None or self.always_record or not forward.is_seen:
                self._entries.pop(key, None)
                return
            self._remember(key, state, template)

        return learn

    def _depends_on_data(self, call: LiveCall) -> bool:
        """Whether values that the call has read may have become part of its ops."""
        return call.recorder.depends_on_data or self._executed.reads_values

    def _remember(self, key: Any, state: list[Any], template: Template) -> None:
        entry = self._entries.get(key)
        watch = self._watch
        if entry is None or watch is None or not entry.fits(state, watch.modules):
            while len(self._entries) >= _REMEMBERED:
                self._entries.pop(next(iter(self._entries)))
            self._entries[key] = _Entry(state, template)
        elif entry.template.same_as(template):
            entry.agreed += 1
        else:
            self._disagree(entry)

    def _disagree(self, entry: _Entry) -> None:
        """Record from now on: something that cannot be seen from outside changes the ops."""
        self.always_record = True
        self._entries.clear()
        if entry.agreed >= _AGREEING:
            warnings.warn(
                f"leanstep: {self.name} runs other ops than recorded although its arguments and "
                "attributes are the same (a global that changes?). Since the last audit, dropped "
                "activations were rebuilt with the old ops. From now on every call is recorded.",
                RuntimeWarning,
                stacklevel=2,
            )


def _has_key(key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call's arguments still look the same: it may have changed an object."""
    try:
        return bool(call_key(args, kwargs, set())[0] == key)
    except UncacheableError:
        return False


def _learn_nothing(call: LiveCall) -> None:
    """Take nothing from a recorded call."""


def _cuda_start(arguments: list[torch.Tensor]) -> CudaDraw | None:
    for argument in arguments:
        if argument.device.type == "cuda":
            return cuda_state(argument.device.index)
    return None
