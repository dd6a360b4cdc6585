"""The greedy of µ-TWO (Purandare et al., MLSys 2023): drop what frees most for its recompute time.

All candidates of all calls are one pool. The one with the largest `nbytes / total recompute time`
goes first; the times of others change with it (algorithms B, E, F of the paper; line 17 of B sets
the wrong candidate in the recompute branch, a misprint, and r_cand is meant). Swapping is priced
infinite: there is no offload yet. Every prefix of the sequence is an answer; the budget decides
only which one. So budgets are monotone, and the sequence is worked out once.

`corrected` differs from the paper in four ways, each a known gap of it. A rebuilt value that
several users share is paid once. Just candidates that lie idle at the current peak are eligible,
and the peak is found anew after each pick, by the exact levels, so that what a recompute chain
holds while it runs counts. A pick that lowers nothing there, or raises the peak elsewhere, is put
back. And it ends where nothing at the peak can be dropped, such as at an optimizer's peak.

Without it the sequence is the paper's. Its own model of the peak (a recomputed value's size alone)
is not used to stop, since that would give plans over their budget: the exact peak is.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from leanstep.solvers.answers import Answer, answers_to, fastest_of, lowest_of
from leanstep.solvers.base import PICOSECONDS, Bytes, Candidate, Choice, Problem, Solution

# Candidates that were put back are tried again so often, after others have made room.
MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MuTwo:
    """Drop by bytes per second of recompute, one storage at a time.

    Takes one simulation of a call for each candidate. Near `optimal` at generous budgets, up to
    half as much again in extra time at tight ones.
    """

    corrected: bool = True
    name: str = "mu_two"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Take the fastest prefix of the sequence that fits."""
        return fastest_of(self.answers(problem), budget_bytes)

    def lowest(self, problem: Problem) -> Solution:
        """Take the prefix with the lowest peak."""
        return lowest_of(self.answers(problem))

    def answers(self, problem: Problem) -> tuple[Answer, ...]:
        """Every plan that the greedy algorithm passes on its way, but those that another beats."""
        walk = _corrected_prefixes if self.corrected else _printed_prefixes
        return answers_to(problem, f"mu_two, corrected: {self.corrected}", lambda: walk(problem))


@dataclass(slots=True)
class _Item:
    """A candidate with what the paper keeps of it: sources, times and the count of its users."""

    call: int
    candidate: Candidate
    sources: set[int] = field(init=False)
    recompute_seconds: float = field(init=False)
    total_seconds: float = field(init=False)
    num_recomputes: int = 1

    def __post_init__(self) -> None:
        self.sources = set(self.candidate.sources)
        self.recompute_seconds = self.total_seconds = self.candidate.seconds

    @property
    def storage(self) -> int:
        return self.candidate.storage

    def is_asked_while_active(self, other: "_Item") -> bool:
        """Whether backward first asks for it while another one is there for its own uses."""
        active = other.candidate.first_backward, other.candidate.last_backward
        return active[0] <= self.candidate.first_backward <= active[1]


def _items(problem: Problem) -> list[_Item]:
    return [
        _Item(index, candidate)
        for index, call in enumerate(problem.calls)
        for candidate in call.candidates
        if candidate.storage not in call.choices[0].dropped
    ]


def _ratio(nbytes: int, seconds: float) -> float:
    # What costs nothing to rebuild comes first, the largest of it at the very first.
    return nbytes / max(seconds, 1 / PICOSECONDS)


class _Selection:
    """One choice for each call, with the exact levels of the step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.picks = list(problem.kept)
        self.totals: Bytes = np.zeros_like(problem.tops)
        for pick in self.picks:
            self.totals = self.totals + pick.deltas
        self.levels = self._levels(self.totals)

    @property
    def peak_bytes(self) -> int:
        return int(self.levels.max(initial=0))

    def answer(self) -> Answer:
        picks = tuple(self.picks)
        return Answer(self.problem.picoseconds(picks), self.peak_bytes, picks)

    def drop(self, item: _Item) -> tuple[Choice, Bytes] | None:
        """The choice with one more candidate dropped and the levels it leads to, if any."""
        before = self.picks[item.call]
        choice = self.problem.calls[item.call].drop(before.dropped | {item.storage})
        if choice is None:
            return None
        self.picks[item.call] = choice
        levels = self._levels(self.totals - before.deltas + choice.deltas)
        self.picks[item.call] = before
        return choice, levels

    def take(self, item: _Item, choice: Choice, levels: Bytes) -> None:
        self.totals = self.totals - self.picks[item.call].deltas + choice.deltas
        self.picks[item.call], self.levels = choice, levels

    def _levels(self, totals: Bytes) -> Bytes:
        tops = self.problem.tops.copy()
        if self.picks:
            stretches = np.concatenate([pick.replay_stretches for pick in self.picks])
            np.maximum.at(tops, stretches, np.concatenate([p.replay_tops for p in self.picks]))
        levels: Bytes = totals + tops
        return levels


def _corrected_prefixes(problem: Problem) -> Iterator[Answer]:
    selection, pool = _Selection(problem), _Pool(_items(problem))
    yield selection.answer()
    for _ in range(MOST_ROUNDS):
        num_taken = 0
        while (place := pool.best_at(int(np.argmax(selection.levels)))) is not None:
            tried = selection.drop(pool.items[place])
            if tried is None or not _helps(selection.levels, tried[1]):
                pool.put_back(place)
                continue
            selection.take(pool.items[place], *tried)
            pool.take(place)
            num_taken += 1
            yield selection.answer()
        if not num_taken:
            return
        pool.retry()


def _helps(before: Bytes, after: Bytes) -> bool:
    """Whether the level falls where it was highest, and rises nowhere above that."""
    place = int(np.argmax(before))
    return bool(after[place] < before[place] and after.max() <= before[place])


class _Pool:
    """The candidates left, each with its ratio under what has been dropped so far."""

    def __init__(self, items: list[_Item]) -> None:
        self.items = items
        self.idle_after = np.array([i.candidate.last_forward for i in items], dtype=np.int64)
        self.idle_before = np.array([i.candidate.first_backward for i in items], dtype=np.int64)
        self.is_left = np.ones(len(items), dtype=bool)
        self.is_back = np.zeros(len(items), dtype=bool)
        self.paid: dict[int, set[int]] = {}
        self.ratios = np.zeros(len(items))
        self.of_call: dict[int, list[int]] = {}
        for place, item in enumerate(items):
            self.of_call.setdefault(item.call, []).append(place)
        for call in self.of_call:
            self._price(call)

    def best_at(self, stretch: int) -> int | None:
        """The candidate with the largest ratio of those idle in a stretch; of equals the first."""
        idle = (self.idle_after < stretch) & (stretch < self.idle_before)
        eligible = np.flatnonzero(idle & self.is_left & ~self.is_back)
        return int(eligible[np.argmax(self.ratios[eligible])]) if len(eligible) else None

    def put_back(self, place: int) -> None:
        self.is_back[place] = True

    def retry(self) -> None:
        self.is_back[:] = False

    def take(self, place: int) -> None:
        item = self.items[place]
        self.is_left[place] = False
        self.paid.setdefault(item.call, set()).update(item.candidate.ops)
        self._price(item.call)

    def _price(self, call: int) -> None:
        """Ops that run again anyway cost nothing more."""
        paid = self.paid.get(call, set())
        for place in self.of_call[call]:
            candidate = self.items[place].candidate
            seconds = sum(cost for op, cost in candidate.ops.items() if op not in paid)
            self.ratios[place] = _ratio(candidate.nbytes, seconds)


def _printed_prefixes(problem: Problem) -> Iterator[Answer]:
    selection, left = _Selection(problem), _items(problem)
    taken: list[_Item] = []
    yield selection.answer()
    while left:
        item = max(left, key=lambda one: _ratio(one.candidate.nbytes, one.total_seconds))
        left.remove(item)
        tried = selection.drop(item)
        if tried is None:
            continue
        selection.take(item, *tried)
        _update_taken(item, [other for other in taken if other.call == item.call])
        taken.append(item)
        _update_left(item, left, taken)
        yield selection.answer()


def _update_taken(item: _Item, taken: list[_Item]) -> None:
    """Algorithm E: what is rebuilt from the new one is rebuilt from its sources instead."""
    for other in taken:
        if item.storage in other.sources:
            other.sources = other.sources - {item.storage} | item.sources
            other.recompute_seconds += item.recompute_seconds
            item.num_recomputes += 1


def _update_left(item: _Item, left: list[_Item], taken: list[_Item]) -> None:
    """Algorithm F: the times of the candidates that the new one has to do with."""
    for other in left:
        if other.call != item.call:
            continue
        if item.storage in other.sources and not other.is_asked_while_active(item):
            other.sources = other.sources - {item.storage} | item.sources
            other.recompute_seconds += item.recompute_seconds
            users = (one for one in taken if one.call == item.call)
            num_users = sum(other.storage in one.sources for one in users)
            other.total_seconds = other.recompute_seconds * (1 + num_users)
        if other.storage in item.sources:
            other.total_seconds = item.num_recomputes * other.recompute_seconds
