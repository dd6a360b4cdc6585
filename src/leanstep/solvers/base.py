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
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.int64]
Places = npt.NDArray[np.intp]

# Seconds are added up as whole picoseconds: sums of floats in another order differ in their last
# bits, and plans that are equal would not be seen to be.
PICOSECONDS = 1e12

# Up to this many choices the integer program is fast whatever their numbers, and up to this many
# places where calls may run as one all ways to join them can be tried.
SMALL_CHOICES = 400
SMALL_JOINTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One way to treat a block call: what it drops, what that costs, what it does to the levels.

    `deltas` are the bytes it adds to each stretch; a replay's top is the level of its stretch
    while it runs, with nothing else changed.

    Where a choice `drops_border`, the call's output is rebuilt in the backward pass of the next
    call, whose choice must be one that `takes_border`. It must not be one that
    `reads_border_early`: that needs its input before it is there.
    """

    dropped: frozenset[int]
    seconds: float
    deltas: Bytes = field(repr=False)
    replay_stretches: Places = field(repr=False)
    replay_tops: Bytes = field(repr=False)
    drops_border: bool = False
    takes_border: bool = False
    reads_border_early: bool = False

    @property
    def picoseconds(self) -> int:
        """The seconds as a whole number."""
        return round(self.seconds * PICOSECONDS)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One storage that a call may drop, as a greedy algorithm wants to know it.

    `ops` are what runs again to rebuild it from its `sources`, other candidates of the call, and
    from what is there anyway: each by a number, with its seconds. Candidates of a call that need
    the same op share it. It lies idle between the stretches `last_forward` and `first_backward`.
    """

    storage: int
    nbytes: int
    ops: Mapping[int, float]
    sources: frozenset[int]
    last_forward: int
    first_backward: int
    last_backward: int

    @property
    def seconds(self) -> float:
        """The time to rebuild it from its sources."""
        return sum(self.ops.values())


@dataclass(frozen=True, eq=False)
class Call:
    """One block call: the choices worth having, and the candidates they are made of.

    The first choice keeps all it may, the last one drops all it may. `start` and `stop` are the
    stretches of its forward pass, and `first` the one where backward first asks for something.
    `drop` simulates any set of candidates; it gives None where one of them cannot be rebuilt.
    `border_choices` are further ones that drop the call's output too, or keep everything but take
    a dropped input; a solver that does not know about borders leaves them alone. `span` are the
    calls of the step it stands for, more than one where they run as one.
    """

    name: str
    choices: tuple[Choice, ...]
    start: int
    stop: int
    first: int
    drop: Callable[[frozenset[int]], Choice | None] = field(repr=False)
    find_candidates: Callable[[], tuple[Candidate, ...]] = field(default=tuple, repr=False)
    border_choices: tuple[Choice, ...] = field(default=(), repr=False)
    span: tuple[int, int] = (0, 1)

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The storages that may be dropped one by one; none where the call runs as a whole."""
        return self.find_candidates()


@dataclass(frozen=True, eq=False)
class Problem:
    """Pick one choice for each call: least seconds, no level above the budget.

    `tops` is the highest level of the untouched step in each stretch. At a place in `joints`,
    number i, the calls i - 1 and i may run as one; `join` makes one call of the calls from one
    number up to another where all places between are joints.
    """

    tops: Bytes = field(repr=False)
    calls: tuple[Call, ...]
    joints: frozenset[int] = frozenset()
    join: Callable[[int, int], Call] | None = field(default=None, repr=False)

    def segment(self, start: int, stop: int) -> tuple[Call, ...]:
        """The fewest calls that run the calls from `start` up to `stop`."""
        borders = [start, *(i for i in range(start + 1, stop) if i not in self.joints), stop]
        return tuple(self._run(*pair) for pair in itertools.pairwise(borders))

    def _run(self, start: int, stop: int) -> Call:
        if stop - start == 1:
            return self.calls[start]
        assert self.join is not None, "joints come with a way to join"
        return self.join(start, stop)

    def arrangements(self) -> Iterator["Problem"]:
        """The problem itself, and with calls made one in every other way."""
        yield self
        joints = sorted(self.joints)
        for number in range(1, 1 << len(joints)):
            joined = {joint for bit, joint in enumerate(joints) if number >> bit & 1}
            borders = [i for i in range(len(self.calls) + 1) if i not in joined]
            yield self.with_calls(self._run(*pair) for pair in itertools.pairwise(borders))

    def with_calls(self, calls: Iterable[Call]) -> "Problem":
        """The same step with some runs of calls made one; to be given back with the picks."""
        return Problem(self.tops, tuple(calls))

    def is_possible(self, picks: Sequence[Choice]) -> bool:
        """Whether every dropped border is taken by the next call, and in time."""
        return not any(
            before.drops_border and (not after.takes_border or after.reads_border_early)
            for before, after in itertools.pairwise(picks)
        )

    def peak_bytes(self, picks: Iterable[Choice]) -> int:
        """The exact peak of the step with one choice for each call."""
        return int(self.levels(picks).max(initial=0))

    def picoseconds(self, picks: Iterable[Choice]) -> int:
        """The extra time as a whole number: what answers are compared by."""
        return sum(pick.picoseconds for pick in picks)

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
        return self.picoseconds(picks) / PICOSECONDS

    @property
    def kept(self) -> tuple[Choice, ...]:
        """Everything kept that may be kept."""
        return tuple(call.choices[0] for call in self.calls)

    @property
    def is_small(self) -> bool:
        """Whether everything about it can be enumerated or left to an integer program."""
        num_choices = sum(len(call.choices) for call in self.calls)
        return num_choices <= SMALL_CHOICES and len(self.joints) <= SMALL_JOINTS

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

    `problem` is set where the picks are for other calls than those of the problem asked about
    (`Problem.with_calls`). `bound_seconds` is a proved lower bound over the listed choices, 0 where
    the solver has none.
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
