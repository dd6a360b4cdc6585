"""Lazy mode: one line in any training loop, and the plan is in force from the second step on.

    leanstep.lean(model, optimizer, budget="16GiB")

`fit` runs a handful of steps of its own before training begins; for that it needs a batch and the
loss. Here neither is asked for: the first step of the user's own loop is recorded as it runs
(`firststep.py`), with every block recomputed so that it fits where the plan will; when its
optimizer has stepped, the plan is made and applied, and nothing watches any more.

What `fit` finds out by a dry run is found out in that first step too: every tensor that was dropped
is compared with a checksum when it comes back, and a loss that chunks are possible for is computed
in chunks as well. Not looked at is the untouched step's own peak; the plan's is that of the
recorder's account.
"""

import functools
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from leanstep import engines, planner
from leanstep.api import WAITING, refuse_owned
from leanstep.eager import never_compiled
from leanstep.engines import Applied
from leanstep.errors import InputError
from leanstep.ir import Plan, Profile
from leanstep.lazy.firststep import FirstStep
from leanstep.owners import Taken, taken_over
from leanstep.ranks.sharing import check_same, shared_plan, together
from leanstep.recorder.hooks import Hook
from leanstep.recorder.identity import identity_of
from leanstep.reporters.terminal import render
from leanstep.solvers.base import Solver
from leanstep.solvers.registry import find_solver
from leanstep.stages import stage
from leanstep.step.training import make_step
from leanstep.torch_private.autograd import in_backward, saving_hooks_are_set
from leanstep.torch_private.modules import MODULE_CALL_CODE
from leanstep.truth import return_cached
from leanstep.units import check_budget, parse_budget

# In place of a verdict.
_COMPARED = (
    "the first step compared every dropped tensor with what it was; leanstep.fit compares and "
    "measures the whole step"
)


class Lean:
    """A model that plans itself after its first step; `remove()` undoes it.

    `profile` and `plan` are None until then.
    """

    def __init__(
        self, model: torch.nn.Module, make_plan: Callable[[Profile], Plan], *, chunks: bool = True
    ) -> None:
        self.model = model
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self._make_plan = make_plan
        self._applied: Applied | None = None
        self._first: FirstStep | None = None
        # Whether a call of the model runs, as far as its hooks tell.
        self._is_running = self._has_begun = self._has_warned = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._handles: list[Any] = []
        self._optimizer_handles: list[Any] = []
        self._taken = Taken()
        self._takes_over, self._chunks, self._model_is_called = False, chunks, True

    def __str__(self) -> str:
        """The plan as a table, or that there is none yet."""
        if self.profile is None or self.plan is None:
            return "leanstep: waiting for the first training step"
        return render(self.profile, self.plan, None, unverified=_COMPARED)

    def __repr__(self) -> str:
        """The same table."""
        return str(self)

    def remove(self) -> None:
        """Give the model back exactly as it was, at any time between steps."""
        self._stop_watching()
        while self._optimizer_handles:
            self._optimizer_handles.pop().remove()
        FirstStep.tidy()
        if self._first is not None:
            self._first.abandon()
            self._first = None
        if self._applied is not None:
            self._applied.remove()
            self._applied = None
        self._taken.give_back()

    def watch(
        self,
        optimizer: torch.optim.Optimizer | None,
        *,
        takeover: bool = False,
        calls: bool = True,
    ) -> None:
        """Wait for the first step; again, with the optimizer once it is there.

        Without `calls` the model's own calls say nothing: a host that trains without calling it
        says when a step begins and when its forward ends.
        """
        if self.plan is not None:
            return
        self.remove()
        WAITING.add(self.model)
        self._optimizer = _innermost(optimizer)
        self._takes_over, self._model_is_called = takeover, calls
        if calls:
            self._watch_calls()
        if self._optimizer is not None:
            # They stay when the plan is made, and do nothing: an optimizer that runs its hooks
            # does not let go of one.
            self._optimizer_handles = [
                self._optimizer.register_step_pre_hook(self._before_update),
                self._optimizer.register_step_post_hook(self._after_update),
            ]

    def _watch_calls(self) -> None:
        tell = (never_compiled(Lean._before_call), never_compiled(Lean._after_call))
        before, after = (Hook(functools.partial(call, self)) for call in tell)
        self._handles = [
            self.model.register_forward_pre_hook(before, with_kwargs=True),
            self.model.register_forward_hook(after, always_call=True),
        ]

    def begin_step(self, batch: Any) -> None:
        """Note that a step begins; only the first matters."""
        if self.plan is not None or not torch.is_grad_enabled() or in_backward():
            return
        FirstStep.tidy()
        first = self._first
        if first is not None and not first.has_failed:
            if not first.has_seen_backward and (self._is_inside() or not first.is_forgotten):
                # The model is called several times in a step.
                return
            if first.has_seen_backward and self._optimizer is None:
                self._plan()
                return
        if first is not None:
            # Gradients are accumulated: the last batch before the update is the one to plan for.
            # Or backward has failed, and is tried again; or nobody wants what forward has made.
            first.abandon()
            self._first = None
        if FirstStep.is_one_open():
            # Another model's: it is this one's turn when that is over.
            return
        if saving_hooks_are_set():
            self._warn_of_hooks()
            return
        self._begin(batch)

    def end_forward(self) -> None:
        """Note that a step's forward has ended, where the model's calls do not tell."""
        if self._first is not None:
            self._first.end_forward()

    def _stop_watching(self) -> None:
        self._is_running = False
        WAITING.discard(self.model)
        while self._handles:
            self._handles.pop().remove()

    def _before_call(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._is_another(model):
            return
        if self._first is not None and self._is_running and not self._is_inside():
            # It was interrupted (by Ctrl-C in a notebook, say), and no hook is called then.
            self._first.fail()
        # Not where a compiler runs it.
        self._is_running = _num_calls(model) > 0
        self.begin_step(kwargs if not args else args if not kwargs else (args, kwargs))

    def _begin(self, batch: Any) -> None:
        step = make_step(self.model, batch, None, self._optimizer)
        first = FirstStep(step, model_is_called=self._model_is_called, chunks=self._chunks)
        if not first.takes_turn():
            return
        self._first = first
        try:
            if not self._has_begun:
                check_same(identity_of(self.model))
                self._has_begun = True
            if not self._taken.put_back:
                with taken_over(self.model, self._takes_over) as self._taken:
                    refuse_owned(self.model)
            first.begin()
        except BaseException:
            self.remove()
            raise

    def _after_call(self, model: torch.nn.Module, args: Any, result: Any) -> None:
        if self._is_another(model):
            return
        self._is_running = self._is_inside()
        has_raised = result is None and sys.exc_info()[0] is not None
        if has_raised and self._first is not None:
            # Whoever catches that may try again with a smaller batch.
            self._first.fail()

    def _is_another(self, model: torch.nn.Module) -> bool:
        """Whether it is another model's call, or on another thread than the first step."""
        is_elsewhere = self._first is not None and not self._first.is_here
        return is_elsewhere or model is not self.model

    def _is_inside(self) -> bool:
        """Whether the call of the model that begins or ends is one inside another."""
        return _num_calls(self.model) > 1

    def _warn_of_hooks(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "leanstep.lean waits for a step outside of saved-tensor hooks of yours "
                "(save_on_cpu, a checkpoint around the model): it cannot record what they keep. If "
                "every step has them, use leanstep.fit with a loss that has them too.",
                stacklevel=2,
            )

    def _before_update(self, *_: Any) -> None:
        if not self._is_complete:
            return
        assert self._first is not None
        if not self._first.is_here:
            self._first.fail()
            raise InputError(
                "optimizer.step() runs on another thread than the model's forward did, and "
                "leanstep.lean records one thread. Call remove(), and use leanstep.fit."
            )
        self._first.begin_optimizer()

    def _after_update(self, *_: Any) -> None:
        if self._is_complete:
            self._plan()

    @property
    def _is_complete(self) -> bool:
        first = self._first
        return first is not None and first.has_seen_backward and not first.has_failed

    def _plan(self) -> None:
        first, self._first = self._first, None
        assert first is not None
        self._stop_watching()
        try:
            with stage(f"fitting {type(self.model).__name__} from its first step"):
                profile = self.profile = together(first.finish)
                self.plan = shared_plan(lambda: self._make_plan(profile))
        except BaseException:
            first.abandon()
            self._taken.give_back()
            raise
        return_cached(next(self.model.parameters()).device)
        self._applied = engines.apply(self.model, self.plan)


_leans: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Lean]]"
_leans = weakref.WeakKeyDictionary()


def lean(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: str | int = "60%",
    solver: str | Solver = "auto",
    overrides: Mapping[str, str] | None = None,
    chunks: bool = True,
    takeover: bool = False,
) -> Lean:
    """Let a model plan itself from the first step of the loop it trains in, with the same numbers.

    Put this line before the loop; nothing else changes. The first step runs with every block
    recomputed and is recorded; from the second on the plan for the budget is in force. `remove()`
    of what comes back undoes it.

    Args:
        model: any `nn.Module`, on one device.
        optimizer: ends the first step, and is counted in the peak. Without one, the model's next
            call ends it.
        budget: as for `fit`; a share is of the unplanned peak.
        solver: as for `fit`.
        overrides: as for `fit`; so are marks.
        chunks: as for `fit`; the first step compares the loss in chunks with the whole. No later
            step is compared: logits that are written to between loss and backward, and were not in
            the first step, make backward raise, or (through `.data`) nobody sees it.
        takeover: switch off checkpointing that the model has when it is first called.

    Raises:
        BudgetError: from `optimizer.step()` of the first step, or inside it: no plan fits, or the
            device has no room for that step. It says what is there.
        InputError: an argument cannot be used.
    """
    check_budget(budget)
    find_solver(solver)
    make_step(model, (), None, _innermost(optimizer))
    # A loop that is begun anew has not told of the end of the old one, be it of the same model.
    before = _leans.get(model)
    if (earlier := before and before()) and earlier.plan is None:
        earlier.remove()
    FirstStep.fail_open_ones()
    if not takeover:
        refuse_owned(model)

    def make_plan(profile: Profile) -> Plan:
        return planner.plan(
            profile,
            _budget_bytes(budget, model, profile),
            solver=solver,
            # Only this engine was at work in the first step.
            engine="replay",
            overrides=overrides,
            offload=False,
            chunks=chunks,
        )

    lazy = Lean(model, make_plan, chunks=chunks)
    _leans[model] = weakref.ref(lazy)
    lazy.watch(optimizer, takeover=takeover)
    return lazy


def _num_calls(model: torch.nn.Module) -> int:
    """How many calls of a model run now on this thread."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    calls = (frame for frame in frames if frame.f_code is MODULE_CALL_CODE)
    return sum(frame.f_locals.get("self") is model for frame in calls)


def _budget_bytes(budget: str | int, model: torch.nn.Module, profile: Profile) -> int:
    device = next(model.parameters()).device
    free_bytes = None
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free_bytes = free + torch.cuda.memory_reserved(device)
    return parse_budget(budget, unplanned_peak_bytes=profile.peak_bytes, free_bytes=free_bytes)


def _innermost(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """The optimizer behind those that only wrap one, such as Accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer
