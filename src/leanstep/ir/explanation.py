"""A plan in words and tables: what each op keeps, drops and costs, and why the peak is there."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from leanstep.ir.codec import Saved
from leanstep.ir.decision import Decision, Engine, OpRow
from leanstep.ir.peak import Holder, Peak
from leanstep.ir.text import names_in_a_row, table
from leanstep.units import format_bytes, format_change, format_seconds

WIDTH = 100

# More than these are summed up in one line.
_MOST_OPS = 16
_MOST_HOLDERS = 2

_HEADINGS = (
    *("", "source", "kept", "dropped", "to host", "time"),
    *("freed at the peak", "at the unplanned peak"),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Block calls whose decisions are equal; bytes and seconds are sums over all of them."""

    names: tuple[str, ...]
    engine: Engine
    why: str
    kept_bytes: int
    dropped_bytes: int
    seconds: float
    peak_freed_bytes: int
    unplanned_peak_freed_bytes: int
    rows: tuple[OpRow, ...]
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Explanation(Saved):
    """What a plan does, and where and why its step has its peak; print it, or read the parts."""

    model: str
    solver: str
    budget_bytes: int
    step_seconds: float
    extra_seconds: float
    planned: Peak | None
    unplanned: Peak | None
    groups: tuple[Group, ...] = field(repr=False)

    def __str__(self) -> str:
        """The tables a person reads."""
        lines = [self.title, "", *self.summary()]
        if self.planned is not None:
            lines += ["", *_peak_lines("the planned peak", self.planned, "untouched")]
        if self.peak_moved and self.unplanned is not None:
            lines += ["", *_peak_lines("the unplanned peak", self.unplanned, "planned")]
        return "\n".join([*lines, "", *self._blocks()])

    def brief(self) -> str:
        """The same without the ops: a row for block calls in a row that got the same decision."""
        rows = table(self.brief_rows(), left=(0, 1, 4))
        return "\n".join([self.title, "", *self.summary(), "", *rows])

    def brief_rows(self) -> list[tuple[str, ...]]:
        """The rows of the short table, headings first."""
        rows: list[tuple[str, ...]] = [("block", "engine", "dropped", "extra time", "why")]
        order = [name for member in self.groups for name in member.names]
        for member in self.groups:
            cells = ("–", "–")
            if member.engine is not Engine.UNTOUCHED:
                cells = (format_bytes(member.dropped_bytes), format_seconds(member.seconds))
            name = names_in_a_row(member.names, order)
            rows.append((name, member.engine.value, *cells, member.why))
        return rows

    @property
    def title(self) -> str:
        """What it is about."""
        return f"{self.model} · solver {self.solver} · budget {format_bytes(self.budget_bytes)}"

    @property
    def peak_moved(self) -> bool:
        """Whether the planned step has its peak elsewhere than the untouched one."""
        old, new = self.unplanned, self.planned
        if old is None or new is None:
            return False
        return old.place != new.place or old.live_bytes != new.other_live_bytes

    def summary(self) -> Iterator[str]:
        """Peak and time before and after, a line each."""
        if self.planned is not None and self.unplanned is not None:
            old, new = self.unplanned.peak_bytes, self.planned.peak_bytes
            change = format_change(new / old - 1)
            yield f"peak  {format_bytes(old)} → {format_bytes(new)} ({change})"
        old_seconds, new_seconds = self.step_seconds, self.step_seconds + self.extra_seconds
        change = f" ({format_change(new_seconds / old_seconds - 1)})" if old_seconds else ""
        yield f"step  {format_seconds(old_seconds)} → {format_seconds(new_seconds)}{change}"

    def _blocks(self) -> list[str]:
        """Equal block calls in one row, their ops below it."""
        order = [name for member in self.groups for name in member.names]
        rows: list[tuple[str, ...]] = [_HEADINGS]
        for member in self.groups:
            name = f"{names_in_a_row(member.names, order)}: {member.engine.value}"
            rows.append(_cells(name, "", member))
            rows += [_cells(f"  {_short(row.name)}", row.source, row) for row in _shown(member)]
        hidden = set() if any(member.host_bytes for member in self.groups) else {"to host"}
        if not self.peak_moved:
            hidden.add(_HEADINGS[-1])
        shown = [place for place, heading in enumerate(_HEADINGS) if heading not in hidden]
        return table([[row[place] for place in shown] for row in rows], left=(0, 1))


def group(decisions: Sequence[Decision]) -> tuple[Group, ...]:
    """Put equal decisions together, in the order of their first calls."""
    alike: dict[object, list[Decision]] = {}
    for decision in decisions:
        ops = tuple(row[:1] + row[2:4] + row[-1:] for row in _rows(decision))
        alike.setdefault((decision.engine, decision.why, ops), []).append(decision)
    return tuple(_group(members) for members in alike.values())


def _group(members: Sequence[Decision]) -> Group:
    rows = zip(*(_rows(decision) for decision in members), strict=True)
    return Group(
        names=tuple(decision.name for decision in members),
        engine=members[0].engine,
        why=members[0].why,
        kept_bytes=sum(d.kept_bytes - d.own_host_bytes for d in members),
        dropped_bytes=sum(d.dropped_bytes for d in members),
        seconds=sum(d.extra_seconds for d in members),
        peak_freed_bytes=sum(d.peak_freed_bytes for d in members),
        unplanned_peak_freed_bytes=sum(d.unplanned_peak_freed_bytes for d in members),
        rows=tuple(_sum(twins[0].name, twins[0].source, twins) for twins in rows),
        host_bytes=sum(d.host_bytes for d in members),
    )


def _rows(decision: Decision) -> list[OpRow]:
    """The ops of a call, with what of each waits in host memory and is not kept on the device."""
    moved = decision.host_bytes_by_op
    return [
        row._replace(
            kept_bytes=row.kept_bytes - moved.get(row.name, 0), host_bytes=moved.get(row.name, 0)
        )
        for row in decision.rows
    ]


def _sum(name: str, source: str, rows: Sequence[OpRow]) -> OpRow:
    return OpRow(
        name,
        source,
        sum(row.kept_bytes for row in rows),
        sum(row.dropped_bytes for row in rows),
        sum(row.seconds for row in rows),
        sum(row.peak_freed_bytes for row in rows),
        sum(row.unplanned_peak_freed_bytes for row in rows),
        sum(row.host_bytes for row in rows),
    )


def _peak_lines(title: str, peak: Peak, other: str) -> Iterator[str]:
    rise = format_bytes(peak.peak_bytes - peak.live_bytes)
    yield f"{title}: {format_bytes(peak.peak_bytes)} at {peak.place}"
    yield (
        f"  {format_bytes(peak.live_bytes)} is live when it starts ({other}: "
        f"{format_bytes(peak.other_live_bytes)}), {rise} comes on top while it runs"
    )
    yield from (f"    {line}" for line in table(_holder_rows(peak), left=(0, 2)))
    if peak.advice:
        yield from textwrap.wrap(
            f"to lower it: {peak.advice}", WIDTH, initial_indent="  ", subsequent_indent="  "
        )


def _holder_rows(peak: Peak) -> list[tuple[str, str, str]]:
    """Each category, and who holds most of it."""
    rows = []
    order = list(dict.fromkeys(holder.owner for holder in peak.holders if holder.owner))
    for category, nbytes in peak.by_category.items():
        if not nbytes:
            continue
        own = [h for h in peak.holders if h.category is category and h.nbytes]
        rows.append((category.value, format_bytes(nbytes), _held_by(own, order)))
    return rows


def _held_by(holders: Sequence[Holder], order: Sequence[str]) -> str:
    alike: dict[int, list[str]] = {}
    for holder in holders:
        if holder.owner:
            alike.setdefault(holder.nbytes, []).append(holder.owner)
    shares = sorted(alike.items(), key=lambda item: -abs(item[0]) * len(item[1]))
    parts = [
        f"{names_in_a_row(owners, order, 2)} {format_bytes(nbytes * len(owners))}"
        for nbytes, owners in shares[:_MOST_HOLDERS]
    ]
    return "; ".join([*parts, "…"] if len(shares) > _MOST_HOLDERS else parts)


def _shown(member: Group) -> Iterator[OpRow]:
    """The ops in their order; where there are many, the small ones in one row."""
    if member.engine is Engine.UNTOUCHED:
        return
    nbytes = max(1, member.kept_bytes + member.dropped_bytes + member.host_bytes)
    seconds = max(1e-12, member.seconds)

    def weight(row: OpRow) -> float:
        held_bytes = row.kept_bytes + row.dropped_bytes + row.host_bytes
        return held_bytes / nbytes + row.seconds / seconds

    chosen = set(sorted(member.rows, key=weight, reverse=True)[:_MOST_OPS])
    small = [row for row in member.rows if row not in chosen]
    yield from (row for row in member.rows if row in chosen)
    if small:
        yield _sum(f"{len(small)} more ops", "", small)


def _short(name: str) -> str:
    """A name without what goes without saying: the default overload, the first of its kind."""
    return name.removesuffix("#0").replace(".default", "")


def _cells(name: str, source: str, row: Group | OpRow) -> tuple[str, ...]:
    return (
        name,
        source,
        _size(row.kept_bytes),
        _size(row.dropped_bytes),
        _size(row.host_bytes),
        format_seconds(row.seconds) if row.seconds else "–",
        _size(row.peak_freed_bytes),
        _size(row.unplanned_peak_freed_bytes),
    )


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "–"
