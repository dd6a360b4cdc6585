"""What a solver is given and what it gives back: numbers only, no graph.

The step is cut into *stretches*: runs of ops between which no decision changes the level of memory.
A choice for a block call adds bytes to (or takes them from) each stretch, and lifts some stretches
to the tops of its replays. So the exact peak of a step is a sum of rows and a maximum, and a solver
needs to know nothing else about a model.

A solver picks one choice for each call. It may take one of the listed `choices`, or ask a call for
any other set of its candidates with `drop`.
"""

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

# Seconds are added up as whole picoseconds: sums of floats in another order differ in their last
# bits, and plans that are equal would not be seen to be.
PICOSECONDS = 1e12


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One way to treat a block call: what it drops, what that costs, what it does to the levels.

    `deltas` are the bytes it adds to each stretch; a replay's top is the level of its stretch
    while it runs, with nothing else changed.
    """

    dropped: frozenset[int]
    seconds: float
    deltas: Bytes = field(repr=False)
    replay_stretches: Places = field(repr=False)
    replay_tops: Bytes = field(repr=False)

    @property
    def picoseconds(self) -> int:
        """The seconds as a whole number."""
        return round(self.seconds * PICOSECONDS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One storage that a call may drop, as a greedy algorithm wants to know it.

    `seconds` rebuild it from its `sources`, other candidates of the call, and from what is there
    anyway. It lies idle between the stretches `last_forward` and `first_backward`.
    """

    storage: int
    nbytes: int
    seconds: float
    sources: frozenset[int]
    last_forward: int
    first_backward: int
    last_backward: int


@dataclass(frozen=True, eq=False)
class Call:
    """One block call: the choices worth having, and the candidates they are made of.

    The first choice keeps all it may, the last one drops all it may. `start` and `stop` are the
    stretches of its forward pass, and `first` the one where backward first asks for something.
    `drop` simulates any set of candidates; it gives None where one of them cannot be rebuilt.
    """

    name: str
    choices: tuple[Choice, ...]
    start: int
    stop: int
    first: int
    drop: Callable[[frozenset[int]], Choice | None] = field(repr=False)
    find_candidates: Callable[[], tuple[Candidate, ...]] = field(default=tuple, repr=False)

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The storages that may be dropped one by one; none where the call runs as a whole."""
        return self.find_candidates()


@dataclass(frozen=True, eq=False)
class Problem:
    """Pick one choice for each call: least seconds, no level above the budget.

    `tops` is the highest level of the untouched step in each stretch. `merged` gives the same
    step with runs of calls made into one call each, where the runs can be executed so: the
    children of a Sequential. Asked for `groups`, lists of consecutive calls, it returns the problem
    with every run merged that can be, and the calls in place of each group.
    """

    tops: Bytes = field(repr=False)
    calls: tuple[Call, ...]
    merged: "Callable[[Sequence[Sequence[int]]], Problem] | None" = field(default=None, repr=False)

    def peak_bytes(self, picks: Iterable[Choice]) -> int:
        """The exact peak of the step with one choice for each call."""
        return int(self.levels(picks).max(initial=0))

    def levels(self, picks: Iterable[Choice]) -> Bytes:
        """The highest level in each stretch."""
        totals, tops = np.zeros_like(self.tops), self.tops.copy()
        for pick in picks:
            totals += pick.deltas
            np.maximum.at(tops, pick.replay_stretches, pick.replay_tops)
        added: Bytes = totals + tops
        return added

    def seconds(self, picks: Iterable[Choice]) -> float:
        """The extra time of one choice for each call."""
        return sum(pick.picoseconds for pick in picks) / PICOSECONDS

    @property
    def kept(self) -> tuple[Choice, ...]:
        """Everything kept that may be kept."""
        return tuple(call.choices[0] for call in self.calls)

    @functools.cached_property
    def notebook(self) -> dict[str, object]:
        """What a solver worked out about this problem and wants to find again."""
        return {}


class Outcome(enum.Enum):
    """How a solver ended."""

    OPTIMAL = "proved optimal"
    FEASIBLE = "fits the budget, not proved optimal"
    NOT_FOUND = "no plan found that fits the budget"
    INFEASIBLE = "proved that no plan fits the budget"


@dataclass(frozen=True, slots=True)
class Solution:
    """An outcome, and one choice for each call where there is one.

    `problem` is set where the picks are for the calls of a merged problem. `bound_seconds` is a
    proved lower bound over the listed choices, 0 where the solver has none.
    """

    outcome: Outcome
    picks: tuple[Choice, ...] = ()
    problem: Problem | None = None
    bound_seconds: float = 0.0

    @property
    def is_found(self) -> bool:
        """Whether there is a selection."""
        return self.outcome in (Outcome.OPTIMAL, Outcome.FEASIBLE)


class Solver(Protocol):
    """An algorithm. Its answers depend on the problem and the budget alone.

    More budget never makes its answer slower, and less never makes the peak higher: this is what
    keeps plans monotone in the budget. `leanstep.testing.check_solver` tells whether one is sound.
    """

    @property
    def name(self) -> str:
        """The name a user asks for it by."""

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Pick choices that fit the budget."""

    def lowest(self, problem: Problem) -> Solution:
        """Pick the choices with the lowest peak this solver can reach."""
