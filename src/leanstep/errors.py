"""The errors that leanstep raises.

::

    LeanstepError            1   anything below; catch this one
    ├── InputError           2   an argument cannot be used (also a ValueError)
    │   └── UnitError        2   a budget cannot be read
    ├── BudgetError          3   no plan fits the budget; names the least that would
    ├── PlanError            4   a plan does not belong to this model
    ├── GraphError           5   a recorded graph breaks a rule of the IR
    ├── MeasureError         6   a reading of memory cannot be trusted
    └── VerifyError          7   the planned step has other numbers; it was taken back

The number is the class's ``exit_code``, with which the command line leaves. A message says what
failed, the numbers, where in the user's source, and what to do about it, in this order. The facts
are attributes too, so that a program need not read the text; they are set once and not meant to
change.
"""

import difflib
import functools
from collections import abc
from typing import ClassVar, Final


class LeanstepError(Exception):
    """Base of every error that leanstep raises on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(LeanstepError, ValueError):
    """An argument cannot be used as it was given; nothing was changed."""

    exit_code: ClassVar[int] = 2


def unknown_name(kind: str, name: object, known: abc.Iterable[str]) -> InputError:
    """The error for a name that nothing has, with the nearest of those that are known."""
    names = list(known)
    by_lower = {one.lower(): one for one in names}
    nearest = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[nearest[0]]!r}? " if nearest else ""
    return InputError(f"no {kind} is called {name!r}: {hint}known are {', '.join(names)}")


class UnitError(InputError):
    """A budget cannot be read: unknown unit, not a size, or not a positive number of bytes."""


class BudgetError(LeanstepError):
    """No plan fits the budget.

    Asking for exactly ``floor_bytes`` succeeds.

    Attributes:
        budget_bytes: the budget that was asked for.
        floor_bytes: the least peak that any plan reaches.
        op: the operation at which that peak stands, as ``aten.addmm``.
        module: the path of the module that runs it, as ``layers.3.mlp``.
        source: the line of the user's code that calls it, as ``model.py:88``.
        overrides: the user's own rules without which the budget could be met.
        left_out: a sentence for each block that did not repeat itself in a dry run.
        breakdown: the bytes of each category at that peak, the largest first.
        is_least: the floor is exact; else the step ended there, and needs more than that.
        with_host: activations may wait in host memory: the floor is then the least peak found, by
            trying.
    """

    exit_code: ClassVar[int] = 3

    budget_bytes: Final[int]
    floor_bytes: Final[int]
    op: Final[str | None]
    module: Final[str | None]
    source: Final[str | None]
    overrides: Final[tuple[str, ...]]
    left_out: Final[tuple[str, ...]]
    breakdown: Final[tuple[tuple[str, int], ...]]
    is_least: Final[bool]
    with_host: Final[bool]

    def __init__(
        self,
        budget_bytes: int,
        floor_bytes: int,
        *,
        op: str | None = None,
        module: str | None = None,
        source: str | None = None,
        overrides: tuple[str, ...] = (),
        left_out: tuple[str, ...] = (),
        breakdown: tuple[tuple[str, int], ...] = (),
        is_least: bool = True,
        with_host: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.op = op
        self.module = module
        self.source = source
        self.overrides = overrides
        self.left_out = left_out
        self.breakdown = tuple(sorted(breakdown, key=lambda part: -part[1]))
        self.is_least = is_least
        self.with_host = with_host
        super().__init__(self._sentence())

    def __reduce__(self) -> tuple[object, ...]:
        # The default hands the message to __init__, so a copy or a pickle between ranks would fail.
        names = ("op", "module", "source", "overrides", "left_out", "breakdown")
        facts = {name: getattr(self, name) for name in (*names, "is_least", "with_host")}
        given = self.budget_bytes, self.floor_bytes
        return functools.partial(BudgetError, **facts), given, self.__dict__

    def _sentence(self) -> str:
        # Imported late: units raises errors of this module.
        from leanstep.units import format_budget_up, format_bytes, format_bytes_apart

        budget, floor = format_bytes_apart(self.budget_bytes, self.floor_bytes)
        held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in self.breakdown)
        there = f" There: {held}." if held else ""
        if not self.is_least:
            return (
                f"the step does not fit {budget} with every block recomputed: at {floor} it ran "
                f"out of memory{self._place()}.{there} Make the batch smaller, or shard the model."
            )
        least = "least peak found with host memory" if self.with_host else "least reachable peak"
        return (
            f"no plan fits {budget}{self._blame()}: the {least} is "
            f"{floor}{self._place()}.{there} Raise the budget to "
            f"{format_budget_up(self.floor_bytes)}, or "
            f"{'take the override back' if self.overrides else 'make the batch smaller'}."
            f"{''.join(f' Blocks {line}.' for line in self.left_out)}"
        )

    def _blame(self) -> str:
        """The user's rules that stand in the way."""
        return f" with the override {', '.join(self.overrides)}" if self.overrides else ""

    def _place(self) -> str:
        parts = [self.op and f"at {self.op}", self.module and f"in {self.module}"]
        place = " ".join(part for part in parts if part)
        if place and self.source:
            place = f"{place} ({self.source})"
        elif self.source:
            place = f"at {self.source}"
        return f", {place}" if place else ""


class PlanError(LeanstepError):
    """A plan does not belong to this model, batch or version of leanstep."""

    exit_code: ClassVar[int] = 4


class GraphError(LeanstepError):
    """A recorded graph breaks a rule of the IR; the fault is leanstep's, or the file was edited."""

    exit_code: ClassVar[int] = 5


class MeasureError(LeanstepError):
    """A reading of memory or time cannot be trusted, so none is given."""

    exit_code: ClassVar[int] = 6


class VerifyError(LeanstepError):
    """The planned step does not have the numbers of the untouched one; the plan was taken back.

    Attributes:
        different: what differs, by name.
    """

    exit_code: ClassVar[int] = 7

    different: Final[tuple[str, ...]]

    def __init__(self, different: tuple[str, ...]) -> None:
        self.different = different
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        super().__init__(
            f"the planned step is not bit-equal to the untouched one: {different[0]}{more} differ. "
            "The model is as it was, and the untouched step repeats itself there, so this is a bug "
            'of leanstep\'s: until it is mended, try the other engine ("replay" or "module"), or '
            "keep the blocks in question with overrides."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return VerifyError, (self.different,)
