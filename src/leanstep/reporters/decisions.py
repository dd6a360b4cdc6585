"""The decisions of a plan as a tree of modules, each with the sums of what is below it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from leanstep.ir import Decision, OpRow, Plan

KEPT, RECOMPUTED, MOVED = "keep", "recompute", "offload"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `depth` says how far it is indented below the line it belongs to.

    `kind` is module, block or op. `freed_bytes` is how much less is live where the untouched step
    has its peak.
    """

    depth: int
    kind: str
    name: str
    path: str
    actions: tuple[str, ...]
    kept_bytes: int
    dropped_bytes: int
    moved_bytes: int
    seconds: float
    freed_bytes: int
    source: str = ""
    why: str = ""


def rows_of(plan: Plan) -> tuple[Row, ...]:
    """The table of a plan: modules, the block calls in them, and the ops of these."""
    members = [(_parts(decision), decision) for decision in plan.decisions]
    return tuple(_rows(members, depth=0, above=""))


def _parts(decision: Decision) -> tuple[str, ...]:
    """The modules that a block call lies in, from the outside; the last part is the call."""
    *outer, _ = decision.path.split(".")
    last = decision.name.removeprefix(".".join([*outer, ""])) if outer else decision.name
    return (*outer, last)


Members = Sequence[tuple[tuple[str, ...], Decision]]


def _rows(members: Members, *, depth: int, above: str) -> Iterator[Row]:
    for first, found in groupby(members, key=lambda member: member[0][0]):
        inside = list(found)
        name, path = first, f"{above}{first}"
        # A module with a single child shares its line.
        while len(inside) > 1 and len({parts[:2] for parts, _ in inside}) == 1:
            inside = [(parts[1:], decision) for parts, decision in inside]
            name, path = f"{name}.{inside[0][0][0]}", f"{path}.{inside[0][0][0]}"
        if len(inside) == 1:
            parts, decision = inside[0]
            yield from _block_rows(decision, ".".join([name, *parts[1:]]), depth)
            continue
        yield _module_row([decision for _, decision in inside], name, path, depth)
        below = [(parts[1:], decision) for parts, decision in inside]
        yield from _rows(below, depth=depth + 1, above=f"{path}.")


def _module_row(decisions: Sequence[Decision], name: str, path: str, depth: int) -> Row:
    return Row(
        depth=depth,
        kind="module",
        name=name,
        path=path,
        actions=_actions(decisions),
        kept_bytes=sum(decision.resident_bytes for decision in decisions),
        dropped_bytes=sum(decision.dropped_bytes for decision in decisions),
        moved_bytes=sum(decision.host_bytes for decision in decisions),
        seconds=sum(decision.extra_seconds for decision in decisions),
        freed_bytes=sum(decision.unplanned_peak_freed_bytes for decision in decisions),
    )


def _block_rows(decision: Decision, name: str, depth: int) -> Iterator[Row]:
    yield Row(
        depth=depth,
        kind="block",
        name=name,
        path=decision.name,
        actions=_actions([decision]),
        kept_bytes=decision.resident_bytes,
        dropped_bytes=decision.dropped_bytes,
        moved_bytes=decision.host_bytes,
        seconds=decision.extra_seconds,
        freed_bytes=decision.unplanned_peak_freed_bytes,
        why=f"{decision.engine.value}: {decision.why}",
    )
    parked = decision.host_bytes_by_op
    ops = [_op_row(row, decision.name, depth + 1, parked.get(row.name, 0)) for row in decision.rows]
    yield from ops
    if decision.dropped_bytes or decision.offload:
        yield _rest_row(decision, ops, depth + 1)


def _rest_row(decision: Decision, ops: Sequence[Row], depth: int) -> Row:
    """What belongs to a call and to none of its ops: with it the lines add up."""
    moved_bytes = decision.host_bytes - sum(row.moved_bytes for row in ops)
    return Row(
        depth=depth,
        kind="op",
        name="around its ops",
        path=f"{decision.name} around its ops",
        actions=(MOVED if moved_bytes else KEPT,),
        kept_bytes=decision.resident_bytes - sum(row.kept_bytes for row in ops),
        dropped_bytes=decision.dropped_bytes - sum(row.dropped_bytes for row in ops),
        moved_bytes=moved_bytes,
        seconds=decision.extra_seconds - sum(row.seconds for row in ops),
        freed_bytes=decision.unplanned_peak_freed_bytes - sum(row.freed_bytes for row in ops),
        why="its input, random state that is kept for it, and the time of its hooks",
    )


def _op_row(row: OpRow, block: str, depth: int, moved_bytes: int) -> Row:
    action = RECOMPUTED if row.dropped_bytes or row.seconds else KEPT
    return Row(
        depth=depth,
        kind="op",
        name=row.name.removesuffix("#0").replace(".default", ""),
        path=f"{block} {row.name}",
        actions=(MOVED if moved_bytes else action,),
        kept_bytes=row.kept_bytes - moved_bytes,
        dropped_bytes=row.dropped_bytes,
        moved_bytes=moved_bytes,
        seconds=row.seconds,
        freed_bytes=row.unplanned_peak_freed_bytes,
        source=row.source,
    )


def _actions(decisions: Sequence[Decision]) -> tuple[str, ...]:
    found = []
    if any(decision.dropped_bytes for decision in decisions):
        found.append(RECOMPUTED)
    if any(decision.offload for decision in decisions):
        found.append(MOVED)
    return tuple(found) or (KEPT,)
