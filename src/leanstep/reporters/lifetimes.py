"""When each activation is made, last used in forward, first and last used in backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leanstep.ir import Category, Decision, Engine, Graph, Phase, Plan, Profile
from leanstep.ir.blocks import find_block
from leanstep.ir.decision import INPUT
from leanstep.rebuild.block import BlockGraph, views_of

# As many as a picture shows, and those that matter: the rest is counted.
MOST_LINES = 2500
LEAST_SHARE = 1e-4

FATES = KEPT, RECOMPUTED, MOVED = "kept", "recomputed", "offloaded"


class Life(NamedTuple):
    """The uses of one activation, as ops; `fate` is what a plan does with it."""

    storage: int
    nbytes: int
    made: int
    last_forward: int
    first_backward: int
    last_backward: int
    fate: str


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The activations that weigh most, bytes times idle ops, in the order they are made."""

    lives: tuple[Life, ...]
    num_left_out: int
    left_out_bytes: int


def lifetimes_of(profile: Profile, plan: Plan | None) -> Lifetimes:
    """Find the activations that wait from forward to backward."""
    fates = {} if plan is None else _fates(profile, plan)
    lives = [
        Life(number, profile.graph.storages[number].nbytes, *uses, fates.get(number, KEPT))
        for number, uses in _uses(profile.graph)
    ]
    least_bytes = LEAST_SHARE * sum(life.nbytes for life in lives)
    large = [life for life in lives if life.nbytes >= least_bytes]
    shown = set(sorted(large, key=_weight, reverse=True)[:MOST_LINES])
    rest = [life for life in lives if life not in shown]
    return Lifetimes(
        lives=tuple(sorted(shown, key=lambda life: (life.made, life.storage))),
        num_left_out=len(rest),
        left_out_bytes=sum(life.nbytes for life in rest),
    )


def _weight(life: Life) -> int:
    return life.nbytes * (life.first_backward - life.last_forward)


def _uses(graph: Graph) -> list[tuple[int, tuple[int, int, int, int]]]:
    """For each activation that backward reads: made, last forward, first and last backward use."""
    forward: dict[int, int] = {}
    backward: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in (*op.reads, *op.writes):
            if op.phase is Phase.FORWARD:
                forward[value.storage] = index
            elif op.phase is Phase.BACKWARD:
                backward.setdefault(value.storage, []).append(index)
    # Compiled code and views ask for what autograd saved without an op that reads it.
    for save, position in graph.unpacks:
        if position < len(graph.ops) and graph.ops[position].phase is Phase.BACKWARD:
            backward.setdefault(graph.saves[save].value.storage, []).append(position)
    found = []
    for number, storage in enumerate(graph.storages):
        is_made = storage.category is Category.ACTIVATION and storage.birth >= 0
        if is_made and number in forward and number in backward:
            uses = backward[number]
            found.append((number, (storage.birth, forward[number], min(uses), max(uses))))
    return found


def _fates(profile: Profile, plan: Plan) -> dict[int, str]:
    blocks = [find_block(profile.graph, profile.blocks, decision) for decision in plan.decisions]
    fates: dict[int, str] = {}
    for view, decision in zip(views_of(profile.graph, blocks), plan.decisions, strict=True):
        fates.update(dict.fromkeys(_dropped(view, decision), RECOMPUTED))
        fates.update(dict.fromkeys(_moved(view, decision), MOVED))
    return fates


def _dropped(view: BlockGraph, decision: Decision) -> frozenset[int]:
    # A compiled call has one storage for all that it keeps: part of it is rebuilt.
    is_leaner = decision.engine is Engine.INDUCTOR and decision.dropped_bytes > 0
    if decision.engine is Engine.MODULE or is_leaner:
        return frozenset(view.own_storages)
    return view.storages_named(decision.drop)


def _moved(view: BlockGraph, decision: Decision) -> Sequence[int]:
    keys = {view.storage_key(number): number for number in view.own_storages}
    if view.input is not None:
        keys[INPUT] = view.input
    # What compiled code keeps has a name of the compiler's, and no storage of its own.
    return [keys[entry.key] for entry in decision.offload if entry.key in keys]
