"""The table that `print(fitted)` shows."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table

from leanstep.ir import Block, Decision, Engine, Plan, Profile, Verdict
from leanstep.units import format_bytes, format_change, format_percent, format_seconds

_WIDTH = 100


def render(profile: Profile, plan: Plan, verdict: Verdict | None) -> str:
    """The summary of a fit as text of a fixed width."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(f"leanstep · {profile.model} · {profile.device} · solver {plan.solver}")
    console.print(_summary(plan, verdict))
    console.print(_blocks(profile, plan))
    for line in _closing(plan, verdict):
        console.print(line, highlight=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _summary(plan: Plan, verdict: Verdict | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "before", "budget", "predicted", "measured", "change"):
        table.add_column(heading, justify="left" if not heading else "right")
    if verdict is None:
        table.add_row(
            "peak memory",
            format_bytes(plan.unplanned_peak_bytes),
            format_bytes(plan.budget_bytes),
            format_bytes(plan.peak_bytes),
            "not measured",
            _change(plan.unplanned_peak_bytes, plan.peak_bytes),
        )
        planned = plan.step_seconds + plan.extra_seconds
        table.add_row(
            "step time",
            format_seconds(plan.step_seconds),
            "",
            format_seconds(planned),
            "not measured",
            _change(plan.step_seconds, planned),
        )
        return table
    table.add_row(
        "peak memory",
        format_bytes(verdict.baseline_peak_bytes),
        format_bytes(verdict.budget_bytes),
        format_bytes(verdict.predicted_peak_bytes),
        format_bytes(verdict.measured_peak_bytes),
        _change(verdict.baseline_peak_bytes, verdict.measured_peak_bytes),
    )
    table.add_row(
        "step time",
        format_seconds(verdict.baseline_seconds),
        "",
        format_seconds(verdict.predicted_seconds),
        format_seconds(verdict.measured_seconds),
        _change(verdict.baseline_seconds, verdict.measured_seconds),
    )
    return table


def _change(before: float, after: float) -> str:
    return format_change(after / before - 1) if before else "–"


@dataclass(frozen=True, slots=True)
class _Row:
    """Consecutive block calls that got the same decision."""

    first: Block
    last: Block
    count: int
    decision: Decision
    dropped_bytes: int
    extra_seconds: float

    @property
    def name(self) -> str:
        """One name, or the first and the last."""
        return self.first.name if self.count == 1 else f"{self.first.name} … {self.last.name}"


def _blocks(profile: Profile, plan: Plan) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("block")
    table.add_column("calls", justify="right")
    table.add_column("engine")
    table.add_column("dropped", justify="right")
    table.add_column("extra time", justify="right")
    table.add_column("why", overflow="fold")
    for row in _rows(profile, plan):
        changed = row.decision.engine is not Engine.UNTOUCHED
        table.add_row(
            row.name,
            str(row.count),
            row.decision.engine.value,
            format_bytes(row.dropped_bytes) if changed else "–",
            format_seconds(row.extra_seconds) if changed else "–",
            row.decision.why,
        )
    return table


def _rows(profile: Profile, plan: Plan) -> Iterator[_Row]:
    pairs = zip(profile.blocks, plan.decisions, strict=True)
    for _, group in groupby(pairs, key=lambda pair: (pair[0].class_name, _alike(pair[1]))):
        members = list(group)
        decisions = [decision for _, decision in members]
        yield _Row(
            first=members[0][0],
            last=members[-1][0],
            count=len(members),
            decision=decisions[0],
            dropped_bytes=sum(d.dropped_bytes for d in decisions),
            extra_seconds=sum(d.extra_seconds for d in decisions),
        )


def _alike(decision: Decision) -> tuple[object, ...]:
    return decision.engine, decision.drop, decision.why


def _closing(plan: Plan, verdict: Verdict | None) -> Iterator[str]:
    yield (
        f"at most {format_percent(plan.gap)} from the least extra time of any such plan "
        f"(proved bound {format_seconds(plan.bound_seconds)})"
    )
    if verdict is None:
        yield "not verified: fit(..., verify=True) runs both versions and compares every number"
    elif verdict.exact:
        yield "loss, gradients, buffers and random state: bit-equal to the untouched model"
    elif not verdict.different:
        yield (
            f"{len(verdict.within_spread)} tensors differ from run to run in the untouched model "
            "too: equal within its own spread, everything else bit-equal"
        )
    else:
        shown = ", ".join(verdict.different[:5])
        yield f"NOT bit-equal to the untouched model: {shown} ({len(verdict.different)} in all)"
    if verdict is not None and not verdict.within_budget:
        yield "OVER BUDGET: the measured peak is above what was asked for"
    yield from plan.notes
    if verdict is not None:
        yield f"measured: {'; '.join(verdict.assumptions)}"
