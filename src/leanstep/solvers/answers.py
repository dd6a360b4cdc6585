"""A solver that works out its answers beforehand: a list of selections, whatever the budget.

The answer to a budget is the fastest of the list that fits, of equally fast ones the lowest, of
equal ones the first. So more budget is never slower and less budget never higher, and the lowest
of the list can be asked for exactly.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from leanstep.solvers.base import Call, Choice, Outcome, Problem, Solution


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A selection with its exact time and peak; `problem` where it is for other calls."""

    picoseconds: int
    peak_bytes: int
    picks: tuple[Choice, ...]
    problem: Problem | None = None


def answer_of(problem: Problem, picks: Sequence[tuple[Call, Choice]]) -> Answer:
    """Price a selection for some calls."""
    calls, choices = tuple(call for call, _ in picks), tuple(choice for _, choice in picks)
    other = None if calls == problem.calls else problem.with_calls(calls)
    return Answer(problem.picoseconds(choices), problem.peak_bytes(choices), choices, other)


def undominated(answers: Iterable[Answer]) -> tuple[Answer, ...]:
    """Those that can be the answer to some budget, from fast and high to slow and low."""
    best: list[Answer] = []
    for answer in sorted(answers, key=lambda one: (one.picoseconds, one.peak_bytes)):
        if not best or answer.peak_bytes < best[-1].peak_bytes:
            best.append(answer)
    return tuple(best)


def answers_to(
    problem: Problem, name: str, find: Callable[[], Iterable[Answer]]
) -> tuple[Answer, ...]:
    """The undominated answers of a solver to a problem; worked out once."""
    found = problem.notebook.get(name)
    if not isinstance(found, tuple):
        found = problem.notebook[name] = undominated(find())
    return found


def fastest_of(
    answers: Sequence[Answer],
    budget_bytes: int,
    *,
    found: Outcome = Outcome.FEASIBLE,
    missing: Outcome = Outcome.NOT_FOUND,
) -> Solution:
    """The answer to a budget; the outcomes say what the solver can claim."""
    for answer in answers:
        if answer.peak_bytes <= budget_bytes:
            return Solution(found, answer.picks, answer.problem)
    return Solution(missing)


def lowest_of(answers: Sequence[Answer], outcome: Outcome = Outcome.FEASIBLE) -> Solution:
    """The answer with the lowest peak."""
    return Solution(outcome, answers[-1].picks, answers[-1].problem)
