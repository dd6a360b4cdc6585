"""Apply a plan to a model, and undo it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from leanstep.engines.attach import Runner, attach, can_attach, detach, is_attached
from leanstep.engines.loss import Window
from leanstep.engines.module import check_own
from leanstep.engines.observer import Observer
from leanstep.engines.parking import Lot
from leanstep.engines.runtime import BlockRuntime, Round, SizeWatch
from leanstep.engines.scope import ModulePaths, Scope
from leanstep.errors import InputError, PlanError
from leanstep.ir import Decision, Engine, Plan


@dataclass(frozen=True, slots=True)
class _Placed:
    """A module, what runs its calls, and what does where nothing is planned."""

    module: torch.nn.Module
    runner: Runner
    unplanned: Runner | None

    def put(self) -> None:
        attach(self.module, self.runner)

    def pause(self) -> None:
        if self.unplanned is None:
            detach(self.module)
        else:
            attach(self.module, self.unplanned)


class Applied:
    """A plan in force; `remove()` ends it."""

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.rounds = Round(Lot(plan))
        self._placed: list[_Placed] = []

    def put(
        self,
        module: torch.nn.Module,
        runner: Runner,
        unplanned: Runner | None = None,
    ) -> None:
        """Let a module's calls go through a runner; and through another where nothing is planned.

        A compiled block without a plan is still a compiled one.
        """
        placed = _Placed(module, runner, unplanned)
        placed.put()
        self._placed.append(placed)

    @property
    def has_met_loss(self) -> bool:
        """Whether the loss was computed in chunks, where it should be."""
        window = self.rounds.window
        return window is None or window.runs > 0

    def remove(self) -> None:
        """Give the model back exactly as it was."""
        while self._placed:
            detach(self._placed.pop().module)

    def pause(self) -> None:
        """Let the model run unplanned until `resume`."""
        for placed in self._placed:
            placed.pause()

    def set_aside(self) -> None:
        """Leave the model to another plan until `resume`."""
        for placed in self._placed:
            detach(placed.module)

    def resume(self) -> None:
        """Put a paused plan back in force, with all it has recorded."""
        for placed in self._placed:
            placed.put()

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Let a observer watch the blocks for a while."""
        self.rounds.observer = observer
        try:
            yield
        finally:
            self.rounds.observer = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the untouched model for a while."""
        self.pause()
        try:
            yield
        finally:
            self.resume()


def apply(model: torch.nn.Module, plan: Plan, *, refuse_at_first_call: bool = False) -> Applied:
    """Let a model's blocks run as a plan says.

    With `refuse_at_first_call`, for a plan that was not yet compared with a step of this model, a
    block whose first call does not make what the plan drops raises PlanError.
    """
    modules = dict(model.named_modules())
    applied = Applied(model, plan)
    numbers = {decision.place: number for number, decision in enumerate(plan.decisions)}
    lot = applied.rounds.lot
    touched = {
        decision.path
        for decision in plan.decisions
        if decision.engine is not Engine.UNTOUCHED or lot.needs(numbers[decision.place])
    }
    by_path = {path: decisions for path, decisions in _by_path(plan).items() if path in touched}
    for path, decisions in by_path.items():
        _check_block(path, modules, is_stretch=bool(decisions[0].children))
        if any(decision.engine is Engine.MODULE for decision in decisions):
            check_own(path)
    if plan.loss is not None:
        _check_free(plan.loss.path, modules)
        applied.rounds.window = Window(plan.loss)
    paths = ModulePaths(model, plan.model.evaluating)
    watch = SizeWatch(plan.peak_bytes, plan.movable_bytes, plan.budget_bytes)
    givers = {decision for decision, after in plan.pairs if after and after.takes_border}
    for path, decisions in by_path.items():
        scope = Scope(paths, path, is_checked=not refuse_at_first_call)
        make = partial(
            BlockRuntime,
            rounds=applied.rounds,
            watch=watch,
            numbers=numbers,
            givers=givers,
            kinds=plan.kinds,
        )
        unplanned = _unplanned(plan, decisions)
        applied.put(
            modules[path],
            _runner(scope, decisions, make),
            _runner(scope, unplanned, make) if unplanned else None,
        )
    if applied.rounds.window is not None and plan.loss is not None:
        applied.put(modules[plan.loss.path], applied.rounds.window)
    return applied


def _unplanned(plan: Plan, decisions: list[Decision]) -> list[Decision]:
    """The same compiled blocks in the compiler's own forms, with all that they keep in place."""
    kinds = [(decision, plan.kind_of(decision)) for decision in decisions]
    return [
        replace(decision, form=kind.unplanned.name, offload=())
        for decision, kind in kinds
        if kind is not None
    ]


def _by_path(plan: Plan) -> dict[str, list[Decision]]:
    by_path: dict[str, list[Decision]] = {}
    for decision in plan.decisions:
        by_path.setdefault(decision.path, []).append(decision)
    return by_path


def _check_free(path: str, modules: dict[str, torch.nn.Module]) -> None:
    if path not in modules:
        raise PlanError(f"the plan is for another model: this one has no module {path!r}")
    if is_attached(modules[path]):
        raise InputError(f"{path or 'the model'} is already fitted: call remove() first")


def _check_block(path: str, modules: dict[str, torch.nn.Module], *, is_stretch: bool) -> None:
    _check_free(path, modules)
    if not can_attach(modules[path]):
        raise PlanError(f"{path or 'the model'} has a forward of its own that cannot be wrapped")
    if is_stretch and type(modules[path]).forward is not torch.nn.Sequential.forward:
        raise PlanError(f"{path or 'the model'} does not call its children as a Sequential does")


def _runner(
    scope: Scope, decisions: list[Decision], make: Callable[..., BlockRuntime]
) -> Callable[..., Any]:
    if not decisions[0].children:
        return make(scope, decisions)
    stretches: dict[tuple[str, ...], list[Decision]] = {}
    for decision in decisions:
        stretches.setdefault(decision.children, []).append(decision)
    return SequentialRuntime(
        {
            children: make(replace(scope, children=children), own)
            for children, own in stretches.items()
        }
    )


class SequentialRuntime:
    """Run a Sequential whose children form blocks of their own."""

    def __init__(self, stretches: Mapping[tuple[str, ...], Runner]) -> None:
        self.starts = {children[0]: (children, run) for children, run in stretches.items()}
        self._holders: dict[tuple[str, ...], torch.nn.Module] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the children in turn, each stretch as one block."""
        (hidden,) = (*args, *kwargs.values())
        # All of them: named_children() leaves out a layer that stands there twice.
        names = list(vars(module)["_modules"])
        place = 0
        while place < len(names):
            children, runtime = self.starts.get(names[place], ((names[place],), None))
            if tuple(names[place : place + len(children)]) != children:
                # Some were taken away since.
                children, runtime = (names[place],), None
            stretch = [module.get_submodule(name) for name in children]
            if runtime is None:
                hidden = stretch[0](hidden)
            else:
                holder = self._holder(module, children, stretch)
                hidden = runtime(holder, _run_stretch(stretch), (hidden,), {})
            place += len(children)
        return hidden

    def _holder(
        self,
        module: torch.nn.Module,
        children: tuple[str, ...],
        stretch: list[torch.nn.Module],
    ) -> torch.nn.Module:
        """The children of a stretch as a module: what others do to the rest is none of its own.

        By their names: compiled code looks for them by these.
        """
        holder = self._holders.get(children)
        held = () if holder is None else vars(holder)["_modules"].values()
        if holder is None or any(a is not b for a, b in zip(held, stretch, strict=True)):
            holder = self._holders[children] = torch.nn.Module()
            for name, child in zip(children, stretch, strict=True):
                holder.add_module(name, child)
        holder.training = module.training
        return holder


def _run_stretch(stretch: list[torch.nn.Module]) -> Callable[..., Any]:
    def forward(_: torch.nn.Module, hidden: Any) -> Any:
        for child in stretch:
            hidden = child(hidden)
        return hidden

    return forward
