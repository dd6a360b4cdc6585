"""What the user has decided: marks on modules, and patterns given to `plan`.

A pattern names modules, or ops in modules: `"encoder.*.attention"`, `"*::aten.mm"`. Stars match any
part of a path. A module's pattern holds for everything inside it. Where several match, the last
one in the dict wins, and any of them wins over a mark.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from leanstep.errors import InputError
from leanstep.ir import Graph, Op, Profile
from leanstep.rebuild.block import BlockGraph


class Action(StrEnum):
    """What a user may ask for."""

    KEEP = "keep"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern and what to do with what it matches."""

    modules: str
    ops: str
    action: Action

    def __str__(self) -> str:
        """The rule as its user wrote it."""
        pattern = f"{self.modules}::{self.ops}" if self.ops else self.modules
        return f"{pattern!r}: {self.action.value!r}"

    def matches(self, graph: Graph, op: Op) -> bool:
        """Whether an op is meant."""
        if self.ops and not any(fnmatchcase(name, self.ops) for name in _names(op)):
            return False
        return any(fnmatchcase(path, self.modules) for path in _paths(graph.path(op)))


def _names(op: Op) -> tuple[str, str]:
    """The operator with and without its overload."""
    return op.name, op.name.rpartition(".")[0]


def _paths(path: str) -> Iterator[str]:
    """A path and those of all modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


@dataclass(frozen=True, slots=True)
class Wishes:
    """The storages of one call that must stay, and those that must go."""

    keep: frozenset[int] = frozenset()
    recompute: frozenset[int] = frozenset()


def parse_rules(profile: Profile, overrides: Mapping[str, str] | None) -> tuple[Rule, ...]:
    """The profile's marks and the given patterns as rules; the last that matches wins."""
    if overrides is not None and not isinstance(overrides, Mapping):
        raise InputError(
            f"overrides is {type(overrides).__name__}, not a dict: "
            'write it as in {"layers.*.mlp": "recompute"}'
        )
    marks = tuple(Rule(path, "", Action(action)) for path, action in profile.marks)
    given = tuple(_rule(profile, *pair) for pair in (overrides or {}).items())
    return (*marks, *given)


def _rule(profile: Profile, pattern: str, action: str) -> Rule:
    if action not in tuple(Action):
        raise InputError(
            f"overrides[{pattern!r}] is {action!r}: use {Action.KEEP.value!r} or "
            f"{Action.RECOMPUTE.value!r}"
        )
    modules, _, ops = pattern.partition("::")
    rule = Rule(modules, ops, Action(action))
    # Ops of backward count too: a pattern for many models is right where only they have it.
    if not any(rule.matches(profile.graph, op) for op in profile.graph.ops):
        raise InputError(_no_match(profile, modules, ops, pattern))
    return rule


def _no_match(profile: Profile, modules: str, ops: str, pattern: str) -> str:
    paths = {call.path for call in profile.graph.calls}
    if ops and any(fnmatchcase(path, modules) for path in paths):
        known, wanted = {op.name.rpartition(".")[0] for op in profile.graph.ops}, ops
    else:
        known, wanted = paths, modules
    nearest = difflib.get_close_matches(wanted, sorted(known), n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"the override {pattern!r} matches nothing in this model{hint}"


def wishes(view: BlockGraph, rules: Sequence[Rule]) -> Wishes:
    """What the rules say about the storages of one call."""
    if not rules:
        return Wishes()
    keep, recompute = set[int](), set[int]()
    for number in {*view.saved, *view.borders}:
        op = view.graph.ops[view.graph.storages[number].birth]
        action = next((r.action for r in reversed(rules) if r.matches(view.graph, op)), None)
        if action is Action.KEEP:
            keep.add(number)
        elif action is Action.RECOMPUTE:
            recompute.add(number)
    return Wishes(frozenset(keep), frozenset(recompute))


def unmet(
    views: Sequence[BlockGraph], droppable: Sequence[frozenset[int]], rules: Sequence[Rule]
) -> Iterator[str]:
    """A sentence for each wish to recompute that nothing can be done about."""
    for rule in rules:
        if rule.action is Action.RECOMPUTE and not any(
            rule.matches(view.graph, view.graph.ops[view.graph.storages[number].birth])
            for view, numbers in zip(views, droppable, strict=True)
            for number in numbers
        ):
            yield (
                f"the override {rule} changes nothing: what it matches lies outside every block, "
                "or nothing of it can be dropped"
            )
