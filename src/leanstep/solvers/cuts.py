"""Cut the chain of calls into segments that are recomputed whole: what uniform and Chen share.

Of a recomputed segment just the input stays. Where its calls cannot run as one, each of the largest
runs that can is recomputed on its own, and the inputs of all of these stay.
"""

from collections.abc import Iterable, Iterator

from leanstep.solvers.answers import Answer, answer_of
from leanstep.solvers.base import Call, Choice, Problem

Segment = tuple[int, int]


def answer_to_cut(problem: Problem, recomputed: Iterable[Segment]) -> Answer:
    """Recompute some segments, given in order, and keep all other calls."""
    picks: list[tuple[Call, Choice]] = []
    place = 0
    for start, stop in recomputed:
        picks.extend(_kept(problem, place, start))
        picks.extend(_recomputed(problem, start, stop))
        place = stop
    picks.extend(_kept(problem, place, len(problem.calls)))
    return answer_of(problem, picks)


def _kept(problem: Problem, start: int, stop: int) -> Iterator[tuple[Call, Choice]]:
    yield from ((call, call.choices[0]) for call in problem.calls[start:stop])


def _recomputed(problem: Problem, start: int, stop: int) -> Iterator[tuple[Call, Choice]]:
    for run in problem.segment(start, stop):
        # A run that can drop nothing as a whole may still have members that can.
        calls = [run] if len(run.choices) > 1 else problem.calls[slice(*run.span)]
        yield from ((call, call.choices[-1]) for call in calls)
