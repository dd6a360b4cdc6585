"""What a profile or plan was made for: which model, and which batch it was called with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TensorLook(NamedTuple):
    """A tensor by name, and what it looks like: `1024×768 float32`."""

    name: str
    look: str


@dataclass(frozen=True, slots=True)
class Identity:
    """The model by class and parameters, the batch by its tensors, the mode by its exceptions.

    `evaluating` are the modules that were in evaluation mode. A plan may be applied before the
    model is put into the mode it trains in, so `differences` leaves it out.
    """

    model: str
    num_elements: int = 0
    parameters: tuple[TensorLook, ...] = ()
    batch: tuple[TensorLook, ...] = ()
    evaluating: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The model in a few words."""
        return f"{self.model}, {len(self.parameters)} tensors, {self.num_elements} parameters"

    @property
    def batch_size(self) -> int:
        """The rows of the batch, where all its tensors have as many; else 0."""
        sizes = {look.partition(" ")[0].partition("×")[0] for _, look in self.batch}
        size = sizes.pop() if len(sizes) == 1 else ""
        return int(size) if size.isdigit() else 0

    def differences(self, other: "Identity") -> list[str]:
        """What is not the same in another model and its batch, in words; self is the plan's."""
        return [*self.model_differences(other), *self.batch_differences(other)]

    def model_differences(self, other: "Identity") -> list[str]:
        """What is not the same in another model."""
        found = []
        if self.model != other.model:
            found.append(f"the model is a {self.model} in the plan and a {other.model} here")
        return found + list(_differences("parameter ", self.parameters, other.parameters))

    def batch_differences(self, other: "Identity") -> list[str]:
        """What is not the same in another batch; one that was not given differs in nothing."""
        if not self.batch or not other.batch:
            return []
        return list(_differences("the batch's ", self.batch, other.batch))

    def mode_difference(self, other: "Identity") -> str | None:
        """Which module trains in one and evaluates in the other."""
        changed = set(self.evaluating) ^ set(other.evaluating)
        if not changed:
            return None
        path = min(changed)
        modes = ("evaluates", "trains") if path in self.evaluating else ("trains", "evaluates")
        return f"{path or 'the model'} {modes[0]} in the plan and {modes[1]} here"


def _differences(
    kind: str, planned: Sequence[TensorLook], found: Sequence[TensorLook]
) -> Iterator[str]:
    here = dict(found)
    for name, look in planned:
        subject = f"{kind}{name}" if name else kind.removesuffix("'s ")
        if name not in here:
            yield f"{subject} is {look} in the plan and missing here"
        elif here[name] != look:
            yield f"{subject} is {look} in the plan and {here[name]} here"
    known = {name for name, _ in planned}
    for name, look in found:
        if name not in known:
            subject = f"{kind}{name}" if name else kind.removesuffix("'s ")
            yield f"{subject} is {look} here and missing in the plan"
