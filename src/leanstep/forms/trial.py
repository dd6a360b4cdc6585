"""Run a compiled block alone: what it keeps, how far memory rises, how long it takes, which bits.

With the arguments of a real call and made-up gradients. Every form runs from the same random state,
and its outputs and gradients are compared with those of the first form, bit for bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.engines.attach import attach, detach
from leanstep.engines.inductor import CompiledForm
from leanstep.engines.parking import Keep, Kept, kept
from leanstep.errors import MeasureError
from leanstep.forms.kinds import Example
from leanstep.recorder.values import has_storage
from leanstep.step.outcome import same
from leanstep.step.seconds import step_time
from leanstep.torch_private.tensors import storage_address, tree_leaves
from leanstep.truth import OpMeter, allocated_bytes, stopwatch

_ROUNDS = 4
_REPEATS = 3
_SEED = 2026


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of a form."""

    saves: tuple[int, ...]
    forward_rise_bytes: int
    backward_rise_bytes: int
    holds_arguments: bool
    holds_outputs: bool
    exact: bool


class Trial:
    """The trials of one kind of block, form after form."""

    def __init__(self, example: Example, device: torch.device) -> None:
        self.example, self.device = example, device
        leaves = example.arguments()
        self._inputs = [leaf for leaf in leaves if leaf.requires_grad]
        self._inputs += example.parameters()
        self._gradients: list[torch.Tensor] = []
        self._expected: list[torch.Tensor | None] = []
        self._is_stable: list[bool] = []

    def measure(self, form: CompiledForm) -> Figures:
        """Measure a form; raises what the compiler raises where it cannot be compiled."""
        with self._in_place():
            saves, holds_arguments, holds_outputs = self._saves(form)
            rises = self._rises(form)
            return Figures(saves, *rises, holds_arguments, holds_outputs, self._is_exact(form))

    def race(self, forms: Sequence[CompiledForm]) -> list[tuple[float, float]]:
        """The median seconds of forward and backward of each form, in turns: machines are moody."""
        laps: list[list[tuple[float, float]]] = [[] for _ in forms]
        with self._in_place():
            for _ in range(_ROUNDS):
                for form, own in zip(forms, laps, strict=True):
                    own.extend(self._laps(form))
        return [(_median(lap[0] for lap in own), _median(lap[1] for lap in own)) for own in laps]

    def is_issued_late(self, form: CompiledForm) -> bool:
        """Whether the device could run forward, or backward, sooner than the CPU issues it."""
        if self.device.type != "cuda":
            return False
        with self._in_place():
            laps = self._laps(form)
            issued = [self._issue_seconds(form) for _ in range(_REPEATS)]
        return any(
            _median(one[part] for one in issued) > _median(lap[part] for lap in laps)
            for part in range(2)
        )

    def _issue_seconds(self, form: CompiledForm) -> tuple[float, float]:
        """What the CPU takes to issue forward and backward; the device is idle before."""
        outputs: list[torch.Tensor] = []
        forward = step_time(lambda: outputs.extend(self._forward(form)), self.device)
        backward = step_time(lambda: self._backward(outputs), self.device)
        return forward.issue_seconds, backward.issue_seconds

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the module be what it will be when it runs: its class is what Dynamo checks."""
        module = self.example.module
        attach(module, _straight)
        try:
            yield
        finally:
            detach(module)

    def _is_exact(self, form: CompiledForm) -> bool:
        """Whether outputs and gradients have the bits of the form that was asked about first."""
        found = self._numbers(form)
        if not self._expected:
            again = self._numbers(form)
            self._expected = found
            # Kernels that sum in the order they finish differ from run to run.
            self._is_stable = [same(a, b) for a, b in zip(found, again, strict=True)]
            return True
        triples = zip(self._expected, found, self._is_stable, strict=True)
        return all(same(a, b) for a, b, is_stable in triples if is_stable)

    def _forward(self, form: CompiledForm, keep: Keep | None = None) -> list[torch.Tensor]:
        before = form.runs
        subject, _ = self.example.subject
        with self.example.modes(), torch.enable_grad():
            out = form(subject, self.example.args, self.example.kwargs, keep)
        if form.runs != before + 1:
            raise MeasureError("a compiled block ran as plain code: is torch.compile switched off?")
        leaves = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return [leaf for leaf in leaves if leaf.requires_grad]

    def _backward(self, outputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        if not self._gradients:
            self._gradients = [torch.randn_like(output) for output in outputs]
        return torch.autograd.grad(outputs, self._inputs, self._gradients, allow_unused=True)

    def _seeded(self) -> None:
        torch.manual_seed(_SEED)

    def _numbers(self, form: CompiledForm) -> list[torch.Tensor | None]:
        self._seeded()
        outputs = self._forward(form)
        numbers = [output.detach() for output in outputs]
        return [*numbers, *self._backward(outputs)]

    def _saves(self, form: CompiledForm) -> tuple[tuple[int, ...], bool, bool]:
        """The bytes of each save, and whether arguments and outputs are among what is held."""
        held: dict[int, tuple[int, int]] = {}

        def keep(tensor: torch.Tensor, number: int) -> Kept:
            held[number] = storage_address(tensor), allocated_bytes(tensor, self.device)
            return kept(tensor, number)

        self._backward(self._forward(form))
        outputs = self._forward(form, keep)
        own, arguments, results = (
            {storage_address(t) for t in tensors if has_storage(t)}
            for tensors in (self._own_tensors(), self.example.arguments(), outputs)
        )
        seen = {*own, *arguments, *results}
        saves = [0] * (max(held, default=-1) + 1)
        for number, (address, nbytes) in held.items():
            saves[number] = 0 if address in seen else nbytes
            seen.add(address)
        addresses = {address for address, _ in held.values()}
        holds = (not arguments.isdisjoint(addresses), not results.isdisjoint(addresses))
        return tuple(saves), *holds

    def _own_tensors(self) -> list[torch.Tensor]:
        """What the modules hold: parameters, buffers, and tensors that are plain attributes."""
        every = (inner for module in self.example.modules for inner in module.modules())
        leaves = tree_leaves([vars(module) for module in every])
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _rises(self, form: CompiledForm) -> tuple[int, int]:
        """How far the level rises in forward and in backward; in the second of two rounds."""
        meter = OpMeter(self.device)
        with meter:
            for _ in range(2):
                with meter.op():
                    outputs = self._forward(form)
                with meter.op():
                    gradients = self._backward(outputs)
                del outputs, gradients
        forward, backward = meter.rises()[-2:]
        return forward, backward

    def _laps(self, form: CompiledForm) -> list[tuple[float, float]]:
        """The times of forward and backward, some times in a row after a warm run."""
        self._backward(self._forward(form))
        watch = stopwatch(self.device)
        for _ in range(_REPEATS):
            watch.lap()
            outputs = self._forward(form)
            watch.lap()
            gradients = self._backward(outputs)
            watch.lap()
            del outputs, gradients
        laps = watch.seconds()
        return list(zip(laps[0::3], laps[1::3], strict=True))


def _straight(module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
    """Run a forward as it is; nobody calls it, compiled code calls the class's own."""
    return forward(module, *args, **kwargs)


def _median(numbers: Iterable[float]) -> float:
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
