"""What stands in front of a block's forward while a plan is applied."""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from leanstep.eager import CompilerWatch, uncompiled
from leanstep.engines.border import Borders, Gate
from leanstep.engines.context import Context
from leanstep.engines.inductor import CompiledBlock
from leanstep.engines.loss import Window
from leanstep.engines.observer import Observer, observed
from leanstep.engines.parking import Lot, Spaces
from leanstep.engines.replay import Replayer
from leanstep.engines.scope import Scope
from leanstep.engines.validity import flat_call
from leanstep.engines.whole import WholeModule
from leanstep.ir import Decision, Engine, Kind
from leanstep.ir.decision import Place
from leanstep.torch_private.autograd import in_backward, saving_hooks_are_set, saving_hooks_work
from leanstep.torch_private.modes import is_traced
from leanstep.units import format_bytes


@dataclass
class Round:
    """The calls between two backward passes: occurrences are counted from its start.

    In a rehearsal there is a observer. The `lot` holds what waits on the host. `num_recorded` is
    how many calls were recorded, in all rounds: such a one takes many times as long. The `window`
    is there where the loss is computed in chunks.
    """

    lot: Lot
    number: int = 0
    num_recorded: int = 0
    backward_seen: bool = False
    active: bool = False
    borders: Borders = field(default_factory=Borders)
    observer: Observer | None = None
    compiler: CompilerWatch = field(default_factory=CompilerWatch)
    window: Window | None = None

    def begin_call(self) -> int:
        """The number of the round that a call belongs to."""
        if self.backward_seen:
            self.number, self.backward_seen = self.number + 1, False
        return self.number

    def saw_backward(self) -> None:
        """Note that backward runs: the next call begins a new round."""
        self.backward_seen = True


@dataclass
class SizeWatch:
    """Warn once, of each reason that a step may need more memory than planned.

    A budget of 0 says that nobody asked for one: blocks were chosen by hand.
    """

    peak_bytes: int
    movable_bytes: int
    budget_bytes: int
    planned: dict[str, int] = field(default_factory=dict)
    warned: bool = False
    yielded: bool = False
    fallen_back: bool = False
    trained: bool = False

    def falls_back(self, name: str, reason: str) -> None:
        """Note that a block could not run as compiled code."""
        if not self.fallen_back:
            self.fallen_back = True
            warnings.warn(
                f"leanstep runs {name} uncompiled, and again in backward: {reason}. It keeps its "
                "memory low and takes longer.",
                stacklevel=2,
            )

    def yields(self, name: str) -> None:
        """Note that a block leaves what autograd saves to hooks of the user's."""
        if not self.yielded:
            self.yielded = True
            warnings.warn(
                f"leanstep leaves {name} as it is inside saved-tensor hooks of yours (save_on_cpu, "
                "a checkpoint): they decide what is kept. If every step has them, let the loss "
                "given to leanstep.fit have them too.",
                stacklevel=2,
            )

    def trains(self, name: str) -> None:
        """Note that a block trains that was in evaluation mode when the plan was made."""
        if not self.trained and self.budget_bytes:
            self.trained = True
            warnings.warn(
                f"leanstep planned {name} in eval mode, and it is in train mode now: dropout and "
                f"batch norm may need more than the budget of {format_bytes(self.budget_bytes)}. "
                "Call remove() on what fit returned, model.train(), and leanstep.fit again.",
                stacklevel=2,
            )

    def see(self, name: str, nbytes: int) -> None:
        """Compare a block's arguments with those of its first call, which was the planned one."""
        planned = self.planned.setdefault(name, nbytes)
        if nbytes <= planned or self.warned or not planned or not self.budget_bytes:
            return
        self.warned = True
        grown = int(self.movable_bytes * (nbytes / planned - 1))
        warnings.warn(
            f"this batch is {nbytes / planned:.2f} times the one leanstep planned for: predicted "
            f"peak {format_bytes(self.peak_bytes + grown)}, budget "
            f"{format_bytes(self.budget_bytes)}. Run leanstep.fit again with the larger batch.",
            stacklevel=2,
        )


class BlockRuntime:
    """Run the calls of one block as its decisions say.

    `givers` are the decisions whose next call takes dropped outputs, `kinds` the kinds of compiled
    blocks; `numbers` says which of the plan's decisions each is.
    """

    def __init__(
        self,
        scope: Scope,
        decisions: Collection[Decision],
        rounds: Round,
        watch: SizeWatch,
        numbers: Mapping[Place, int],
        givers: Collection[Decision] = (),
        kinds: Collection[Kind] = (),
    ) -> None:
        self.name = name = scope.name
        self.decisions = sorted(decisions, key=lambda decision: decision.occurrence)
        self.replays = [
            Replayer(name, frozenset(d.drop), scope, frozenset(d.recipes)) for d in self.decisions
        ]
        self.whole = [WholeModule(scope, rounds) for _ in self.decisions]
        self.compiled = [CompiledBlock.of(scope, d.form, kinds) for d in self.decisions]
        self.gives = [decision in givers for decision in self.decisions]
        self.numbers = [numbers[decision.place] for decision in self.decisions]
        self.offloads = [{entry.key: entry for entry in d.offload} for d in self.decisions]
        self.rounds, self.watch = rounds, watch
        self._was_evaluating = scope.was_evaluating
        self._round = -1
        self._calls = 0

    def __call__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call: untouched without gradients or inside another block, else as planned."""
        is_passive = not torch.is_grad_enabled() or self.rounds.active
        if is_passive or is_traced():
            return forward(module, *args, **kwargs)
        if in_backward():
            # A checkpoint of the user's runs it again, and counts what is saved.
            return self._again(module, forward, args, kwargs)
        if not saving_hooks_work():
            return forward(module, *args, **kwargs)
        place = self._place()
        if self._was_evaluating and module.training:
            self.watch.trains(self.name)
        self.watch.see(f"{self.name}, call {place}", _tensor_bytes(args, kwargs))
        out = self._run(place, module, forward, args, kwargs)
        self.rounds.lot.call_ended(self.numbers[place], out, self.rounds.saw_backward)
        return out

    def _run(
        self,
        place: int,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        decision = self.decisions[place]
        changes = decision.drop or decision.border_in or decision.offload
        if decision.engine is Engine.UNTOUCHED or (
            decision.engine is Engine.REPLAY and not changes
        ):
            return forward(module, *args, **kwargs)
        if decision.engine is Engine.INDUCTOR:
            # What compiled code saves goes through hooks of the user's like everything else.
            return self._compiled(place, module, forward, args, kwargs)
        if saving_hooks_are_set():
            # Ours would take what the user's mean to drop or to move.
            self.watch.yields(self.name)
            return forward(module, *args, **kwargs)
        self.rounds.compiler.see(self.name)
        self.rounds.active = True
        try:
            if self.rounds.observer is None:
                return self._planned(place, module, forward, args, kwargs)
            with observed(self.rounds.observer, self.name):
                return self._planned(place, module, forward, args, kwargs)
        finally:
            self.rounds.active = False

    def _again(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call that backward repeats: it saved what plain code saves, or compiled code."""
        block = self.compiled[0]
        out, reason = (None, "") if block is None else block.run(module, args, kwargs)
        return out if reason is None else forward(module, *args, **kwargs)

    def _compiled(
        self,
        place: int,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call as compiled code, or where there is none, as a whole that runs twice."""
        block = self.compiled[place]
        assert block is not None, "a compiled block has a form"
        # Ours would stand before hooks of the user's, who mean to drop or to move what is saved.
        spaces = None if saving_hooks_are_set() else self._spaces(place, args, kwargs)
        out, reason = block.run(module, args, kwargs, spaces)
        if spaces is not None:
            spaces.close()
        if reason is None:
            if len(self.decisions) > 1:
                # Which call of a step this is, is counted from the last backward.
                block.tell_backward(out, self.rounds.saw_backward)
            return out
        self.watch.falls_back(self.name, reason)
        if saving_hooks_are_set():
            return forward(module, *args, **kwargs)
        self.rounds.active = True
        try:
            context = Context(self.name, self.rounds.saw_backward)
            with uncompiled():
                return self.whole[place].run(context, module, forward, args, kwargs)
        finally:
            self.rounds.active = False

    def _planned(
        self,
        place: int,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        decision, rounds = self.decisions[place], self.rounds
        if decision.engine is Engine.MODULE:
            context = Context(self.name, rounds.saw_backward, observer=rounds.observer)
            with uncompiled():
                return self.whole[place].run(context, module, forward, args, kwargs)
        leaves = flat_call(args, kwargs)[0] if decision.border_in else ()
        gate = Gate(rounds.borders, leaves) if decision.border_in else None
        gives = rounds.borders if self.gives[place] else None
        spaces = self._spaces(place, args, kwargs)
        context = Context(self.name, rounds.saw_backward, gate, gives, rounds.observer, spaces)
        replay = self.replays[place]
        num_recorded = replay.recorded
        with uncompiled():
            out = replay.run(context, module, forward, args, kwargs)
        rounds.num_recorded += replay.recorded - num_recorded
        return out

    def _spaces(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spaces | None:
        """Where a call parks what goes to the host."""
        offloads = self.offloads[place]
        if not offloads:
            return None
        return Spaces(self.rounds.lot, self.numbers[place], offloads, flat_call(args, kwargs)[0])

    def _place(self) -> int:
        """Which of the decisions this call follows: the last whose turn has come."""
        current = self.rounds.begin_call()
        if current != self._round:
            self._round, self._calls = current, 0
        self._calls += 1
        if len(self.decisions) == 1:
            return 0
        turns = [decision.occurrence < self._calls for decision in self.decisions]
        return max(sum(turns), 1) - 1


def _tensor_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    leaves, _ = flat_call(args, kwargs)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
