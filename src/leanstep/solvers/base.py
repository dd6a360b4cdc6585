"""What a solver is given and what it gives back: numbers only, no graph.

The step is a chain of block calls. While a call is *open*, between the end of its forward pass and
the beginning of its backward pass, its choice lowers the level by `freed_bytes`. Backward runs in
the opposite order, so the open calls at any point are the first few of the chain. Every point of
the step is then either inside one call (`inside_bytes`: the highest level there with nothing else
freed; the calls before it are open) or between calls (`gap_bytes[i]`: the highest level while
just the first i calls are open).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to treat a block call; `freed_bytes` may be negative."""

    seconds: float
    freed_bytes: int
    inside_bytes: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Pick one choice for each call: least seconds, no level above the budget.

    The first choice of a call keeps everything, the last one drops all it can. `gap_bytes` has
    one entry more than `calls`.
    """

    budget_bytes: int
    calls: tuple[tuple[Choice, ...], ...]
    gap_bytes: tuple[int, ...]

    def picked(self, selection: Sequence[int]) -> list[Choice]:
        """The choices at the given places."""
        return [choices[place] for choices, place in zip(self.calls, selection, strict=True)]

    def seconds(self, selection: Sequence[int]) -> float:
        """The extra time of a selection."""
        return sum(choice.seconds for choice in self.picked(selection))

    def peak_bytes(self, selection: Sequence[int]) -> int:
        """The highest level of the step under a selection."""
        freed, peak = 0, self.gap_bytes[0]
        for choice, gap in zip(self.picked(selection), self.gap_bytes[1:], strict=True):
            peak = max(peak, choice.inside_bytes - freed)
            freed += choice.freed_bytes
            peak = max(peak, gap - freed)
        return peak


class Outcome(enum.Enum):
    """How a solver ended."""

    OPTIMAL = "proved optimal"
    FEASIBLE = "fits the budget, not proved optimal"
    NOT_FOUND = "no plan found that fits the budget"
    INFEASIBLE = "proved that no plan fits the budget"


@dataclass(frozen=True, slots=True)
class Solution:
    """An outcome, and the place of the choice for each call where there is one."""

    outcome: Outcome
    selection: tuple[int, ...] = ()

    @property
    def is_found(self) -> bool:
        """Whether there is a selection."""
        return self.outcome in (Outcome.OPTIMAL, Outcome.FEASIBLE)


class Solver(Protocol):
    """An algorithm. Its answers depend on the problem alone.

    Among equally fast selections it returns the one with the lowest peak it knows, and more budget
    never makes its answer slower: this is what keeps plans monotone in the budget.
    """

    @property
    def name(self) -> str:
        """The name a user asks for it by."""

    def solve(self, problem: Problem) -> Solution:
        """Pick choices that fit the budget."""

    def lowest(self, problem: Problem) -> Solution:
        """Pick the choices with the lowest peak this solver can reach, whatever the budget."""
