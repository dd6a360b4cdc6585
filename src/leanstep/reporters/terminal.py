"""The table that `print(fitted)` shows."""

import io
import random
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from leanstep.ir import Block, Decision, Engine, Plan, Profile, Verdict
from leanstep.ir.blocks import find_block
from leanstep.ir.notebook import html_card, html_lines, html_table
from leanstep.units import format_bytes, format_change, format_percent, format_seconds

_WIDTH = 100
_SUMMARY_HEADINGS = ("", "before", "budget", "predicted", "measured", "change")
_BLOCK_HEADINGS = ("block", "calls", "engine", "dropped", "extra time", "why")


_UNVERIFIED = "not verified: fit(..., verify=True) runs both versions and compares every number"


def render(
    profile: Profile, plan: Plan, verdict: Verdict | None, *, unverified: str = _UNVERIFIED
) -> str:
    """The summary of a fit as text of a fixed width; `unverified` stands where no verdict does."""
    lines = [_title(profile, plan)]
    lines += _table(_SUMMARY_HEADINGS, _summary(plan, verdict))
    lines += _table(_BLOCK_HEADINGS, _blocks(profile, plan))
    closing = _closing(plan, verdict, unverified)
    lines += [part for line in closing for part in textwrap.wrap(line, _WIDTH)]
    return "\n".join(line.rstrip() for line in lines)


def render_html(profile: Profile, plan: Plan, verdict: Verdict | None) -> str:
    """The same summary for a notebook."""
    return html_card(
        _title(profile, plan),
        html_table([_SUMMARY_HEADINGS, *_summary(plan, verdict)]),
        html_table([_BLOCK_HEADINGS, *_blocks(profile, plan)], left=(0, 2, 5)),
        html_lines(_closing(plan, verdict)),
    )


def _title(profile: Profile, plan: Plan) -> str:
    device = f"{profile.device} (estimated)" if profile.estimated else profile.device
    return f"leanstep · {profile.model} · {device} · solver {plan.solver}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of text; numbers to the right, names and reasons to the left."""
    # Loaded late, and with care: rich draws from Python's generator as it is imported.
    state = random.getstate()
    from rich import box
    from rich.console import Console
    from rich.table import Table

    random.setstate(state)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        is_text = heading in ("", "block", "engine", "why")
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(table)
    return [*file.getvalue().rstrip().splitlines(), ""]


def _summary(plan: Plan, verdict: Verdict | None) -> list[tuple[str, ...]]:
    unplanned, peak = plan.unplanned_peak_bytes, plan.peak_bytes
    seconds, planned = plan.step_seconds, plan.step_seconds + plan.extra_seconds
    peak_measured = seconds_measured = "not measured"
    new_peak, new_seconds = float(peak), planned
    if verdict is not None:
        unplanned, new_peak = verdict.baseline_peak_bytes, verdict.measured_peak_bytes
        seconds, planned = verdict.baseline_seconds, verdict.predicted_seconds
        new_seconds = verdict.measured_seconds
        peak_measured = format_bytes(verdict.measured_peak_bytes)
        seconds_measured = format_seconds(verdict.measured_seconds)
    budget = format_bytes(plan.budget_bytes)
    guess = "" if verdict is None or verdict.baseline_fits else " (predicted)"
    return [
        (
            "peak memory",
            *(f"{format_bytes(unplanned)}{guess}", budget, format_bytes(peak), peak_measured),
            _change(unplanned, new_peak),
        ),
        *_reserved(verdict),
        (
            "step time",
            *(f"{format_seconds(seconds)}{guess}", "", format_seconds(planned), seconds_measured),
            _change(seconds, new_seconds),
        ),
    ]


def _reserved(verdict: Verdict | None) -> Iterator[tuple[str, ...]]:
    """What the allocator took from the device, where it keeps a pool."""
    if verdict is None or not verdict.measured_reserved_bytes:
        return
    before, after = verdict.baseline_reserved_bytes, verdict.measured_reserved_bytes
    known = format_bytes(before) if before else "–"
    yield ("reserved for it", known, "", "", format_bytes(after), _change(before, after))


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
    def is_changed(self) -> bool:
        """Whether the plan does something here."""
        return self.decision.engine is not Engine.UNTOUCHED

    @property
    def name(self) -> str:
        """One name, or the first and the last."""
        return self.first.name if self.count == 1 else f"{self.first.name} … {self.last.name}"


def _blocks(profile: Profile, plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            row.name,
            str(row.count),
            row.decision.engine.value,
            format_bytes(row.dropped_bytes) if row.is_changed else "–",
            format_seconds(row.extra_seconds) if row.is_changed else "–",
            row.decision.why,
        )
        for row in _rows(profile, plan)
    ]


def _rows(profile: Profile, plan: Plan) -> Iterator[_Row]:
    pairs = (
        (find_block(profile.graph, profile.blocks, decision), decision)
        for decision in plan.decisions
    )
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


def _closing(plan: Plan, verdict: Verdict | None, unverified: str = _UNVERIFIED) -> Iterator[str]:
    yield plan.proof
    if verdict is None:
        yield unverified
    elif verdict.inexact_allowed and not verdict.exact:
        yield _inexact(verdict)
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
    if verdict is not None and verdict.has_uncertain_time:
        yield uncertain_time(verdict)
    if verdict is not None and verdict.waits_for_cpu:
        yield _launch_advice(verdict)
    if verdict is not None and verdict.wasted_bytes:
        yield _wasted(verdict)
    yield from plan.notes
    if verdict is not None:
        yield f"measured: {'; '.join(verdict.assumptions)}"


def uncertain_time(verdict: Verdict) -> str:
    """How far the repeats of a step were apart, for a reader who judges the figures by it."""
    return (
        f"step times are uncertain: repeats of the untouched step were "
        f"{format_percent(verdict.baseline_spread)} apart, of the planned one "
        f"{format_percent(verdict.measured_spread)}; on an idle machine they are worth more"
    )


def _launch_advice(verdict: Verdict) -> str:
    issued = format_seconds(verdict.issue_seconds)
    return (
        f"the device waits for the CPU, which takes {issued} to issue the planned step: a larger "
        'batch costs next to nothing here, and engine="inductor" issues fewer kernels'
    )


def _wasted(verdict: Verdict) -> str:
    share = verdict.wasted_bytes / verdict.measured_peak_bytes
    return (
        f"the allocator holds {format_percent(share)} more than the peak, in gaps that nothing "
        "fits: PYTORCH_ALLOC_CONF=expandable_segments:True, set before torch is imported, is "
        f"expected to give back up to {format_bytes(verdict.wasted_bytes)}"
    )


def _inexact(verdict: Verdict) -> str:
    differ = len(verdict.different) + len(verdict.within_spread)
    said = (
        f"inexact recipes were allowed: {differ} tensors are not bit-equal, largest relative "
        f"difference {verdict.largest_difference:.1g}"
    )
    if not verdict.beyond_tolerance:
        return said
    return f"{said}; FURTHER OFF THAN ROUNDING: {', '.join(verdict.beyond_tolerance[:5])}"
