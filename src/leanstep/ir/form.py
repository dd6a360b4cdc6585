"""The ways to compile a kind of block: what each keeps for backward, and what it was seen to cost.

Blocks are of one *kind* where the compiler makes the same program of them: same class, same shapes
of arguments and parameters, same modes. A *form* is one way to split that program into forward and
backward: it names the values that forward hands over, everything else is computed again.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """One way to compile a kind of block; its figures were measured on the device, alone and warm.

    `kept` are nodes of the joint graph of forward and backward, by the names that the compiler
    gives them in every run. `kept_bytes` are those of the storages held for backward that are
    neither arguments, parameters nor outputs; whether those are held too is said apart. The rises
    are how far the allocator's level rises above that at the start of the block's forward or
    backward, outputs and gradients included. `exact`: outputs and gradients had the bits of the
    kind's first form. `saves` are the bytes of each tensor that is saved, in their order; 0 for one
    that is not among the kept bytes.

    With `whole`, forward and backward are programs that hand over these names, those of the
    unplanned form, and what of it is not kept is dropped after forward: a program of its own
    rebuilds it before backward runs.
    """

    name: str
    kept: tuple[str, ...]
    kept_bytes: int
    forward_rise_bytes: int
    backward_rise_bytes: int
    forward_seconds: float
    backward_seconds: float
    holds_arguments: bool = True
    holds_outputs: bool = False
    exact: bool = True
    saves: tuple[int, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_seconds + self.backward_seconds

    def is_beaten_by(self, other: "Form") -> bool:
        """Whether another form is as good in everything, and better in something."""
        mine, others = self._figures, other._figures
        is_as_good = all(a <= b for a, b in zip(others, mine, strict=True))
        return is_as_good and others != mine and other.exact >= self.exact

    @property
    def _figures(self) -> tuple[float, ...]:
        # The level of forward's top, and of backward's above what is there without the block.
        top = self.kept_bytes + self.backward_rise_bytes
        return (self.kept_bytes, self.forward_rise_bytes, top, self.seconds)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of block and the forms worth having, the compiler's own choice first.

    `precise`: compiled so that fused kernels round as separate ones do. `joins_kernels`: those that
    do not wait for each other are launched as one, where the CPU was seen to be late with that.
    `num_inexact` forms were compiled and left out because they gave other bits.
    """

    name: str
    forms: tuple[Form, ...]
    precise: bool = True
    joins_kernels: bool = False
    num_inexact: int = 0

    @property
    def unplanned(self) -> Form:
        """What the compiler does if nobody plans."""
        return self.forms[0]

    def form(self, name: str) -> Form | None:
        """The form of a name."""
        return next((form for form in self.forms if form.name == name), None)


def save_key(number: int) -> str:
    """The name of what a compiled call saves as so manieth."""
    return f"save#{number}"


def without_beaten(forms: Iterable[Form]) -> tuple[Form, ...]:
    """The forms that no other beats; the first one stays in any case."""
    first, *others = forms
    rivals = [first, *others]
    kept = [form for form in others if not any(form.is_beaten_by(other) for other in rivals)]
    return (first, *sorted(kept, key=lambda form: (-form.kept_bytes, form.seconds)))
