"""The stated space of a large step: which choices its solvers are given.

A small step has all its sets listed. On a large one the lists get the sets that a greedy algorithm
comes to, since they may need less memory at a time than any set that was ranked by bytes and
seconds alone; and they lose the choices about borders that do not fit the picture of a chain, so
that what is listed can be proved over.
"""

from dataclasses import replace

from leanstep.solvers.base import Call, Choice, Problem
from leanstep.solvers.chain import chain_of
from leanstep.solvers.mu_two import MuTwo

# Answers of the greedy algorithm whose sets are listed: it takes about a second for fifty calls.
MOST_ANSWERS = 8
MOST_CALLS = 64


def listed(problem: Problem) -> Problem:
    """The problem with the lists that solvers get."""
    if problem.is_small:
        return problem
    if len(problem.calls) <= MOST_CALLS:
        problem = _with_greedy_sets(problem)
    return _orderly(problem)


def _with_greedy_sets(problem: Problem) -> Problem:
    answers = [one for one in MuTwo().answers(problem) if one.problem is None]
    few = answers[:: -(-len(answers) // MOST_ANSWERS)] + answers[-1:]
    calls = []
    for place, call in enumerate(problem.calls):
        known = {choice.dropped for choice in call.choices}
        found: dict[frozenset[int], Choice] = {}
        for answer in few:
            choice = answer.picks[place]
            if choice.dropped not in known:
                found[choice.dropped] = choice
        # What drops all it may stays the last one.
        choices = (*call.choices[:-1], *found.values(), call.choices[-1])
        calls.append(replace(call, choices=choices) if found else call)
    return replace(problem, calls=tuple(calls))


def _orderly(problem: Problem) -> Problem:
    chain = chain_of(problem)
    left_out = {id(choice) for choice in chain.left_out}
    if not left_out:
        return problem

    def orderly(call: Call) -> Call:
        kept = tuple(choice for choice in call.border_choices if id(choice) not in left_out)
        return replace(call, border_choices=kept)

    reduced = replace(problem, calls=tuple(orderly(call) for call in problem.calls))
    # The chain has just what is left: it need not be worked out again.
    reduced.notebook["chain"] = replace(chain, left_out=())
    return reduced
