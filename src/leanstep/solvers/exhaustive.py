"""Try everything: the oracle that others are tested against."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from leanstep.errors import InputError
from leanstep.solvers.answers import Answer, answers_to, fastest_of, lowest_of
from leanstep.solvers.base import Bytes, Call, Choice, Outcome, Problem, Solution

MOST_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Enumerate all sets of candidates of all calls, listed or not; exact peaks.

    For steps of at most 16 candidates: tests and teaching. A call that runs as a whole, and a run
    of calls made one, has just its listed choices; so has a border.
    """

    name: str = "exhaustive"

    def solve(self, problem: Problem, budget_bytes: int) -> Solution:
        """Take the least time, and of those the lowest peak."""
        answers = _answers(problem)
        found = fastest_of(answers, budget_bytes, found=Outcome.OPTIMAL, missing=Outcome.INFEASIBLE)
        bound = problem.seconds(found.picks)
        return Solution(found.outcome, found.picks, found.problem, bound_seconds=bound)

    def lowest(self, problem: Problem) -> Solution:
        """Take the lowest peak, and of those the least time."""
        return lowest_of(_answers(problem), Outcome.OPTIMAL)


def _answers(problem: Problem) -> tuple[Answer, ...]:
    return answers_to(problem, "exhaustive", lambda: _all_answers(problem))


def _all_answers(problem: Problem) -> Iterator[Answer]:
    count = sum(len(call.candidates) for call in problem.calls)
    if count > MOST_CANDIDATES:
        raise InputError(
            f"exhaustive tries all sets of at most {MOST_CANDIDATES} candidates and this step has "
            f"{count}: use 'optimal', or 'milp' as a reference"
        )
    for arranged in problem.arrangements():
        other = None if arranged is problem else arranged
        yield from (replace(answer, problem=other) for answer in _answers_for(arranged))


def _answers_for(problem: Problem) -> Iterator[Answer]:
    every = [_all_choices(call) for call in problem.calls]
    tables = [_Table(problem, choices) for choices in every]
    for places in itertools.product(*(range(len(choices)) for choices in every[:-1])):
        picks = [choices[place] for choices, place in zip(every[:-1], places, strict=True)]
        if not problem.is_possible(picks):
            continue
        pairs = zip(tables, places, strict=False)
        totals, tops = np.zeros_like(problem.tops), problem.tops
        for table, place in pairs:
            totals = totals + table.deltas[place]
            tops = np.maximum(tops, table.tops[place])
        if not tables:
            yield Answer(0, int(tops.max(initial=0)), ())
            return
        # All choices of the last call at once.
        levels = totals + tables[-1].deltas + np.maximum(tops, tables[-1].tops)
        picoseconds = problem.picoseconds(picks)
        for choice, peak in zip(every[-1], levels.max(axis=1), strict=True):
            if not problem.is_possible([*picks[-1:], choice]):
                continue
            yield Answer(picoseconds + choice.picoseconds, int(peak), (*picks, choice))


class _Table:
    """What each choice of a call adds to every stretch, and how high its replays come."""

    def __init__(self, problem: Problem, choices: list[Choice]) -> None:
        self.deltas: Bytes = np.stack([choice.deltas for choice in choices])
        self.tops: Bytes = np.tile(problem.tops, (len(choices), 1))
        for row, choice in zip(self.tops, choices, strict=True):
            np.maximum.at(row, choice.replay_stretches, choice.replay_tops)


def _all_choices(call: Call) -> list[Choice]:
    storages = [candidate.storage for candidate in call.candidates]
    if not storages or call.span[1] - call.span[0] > 1:
        return [*call.choices, *call.border_choices]
    found: dict[frozenset[int], Choice] = {}
    for mask in range(1 << len(storages)):
        wanted = frozenset(storage for bit, storage in enumerate(storages) if mask >> bit & 1)
        choice = call.drop(wanted)
        if choice is not None:
            # What must go is dropped with any set.
            found.setdefault(choice.dropped, choice)
    return [*found.values(), *call.border_choices]
