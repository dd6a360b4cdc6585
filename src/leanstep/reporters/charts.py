"""The other figures of the page as files: the peak's parts, lifetimes, peak against time."""

from itertools import groupby
from pathlib import Path
from typing import Any

from leanstep.ir import Frontier
from leanstep.reporters.data import Peaks
from leanstep.reporters.figures import new_figure
from leanstep.reporters.lifetimes import FATES, Lifetimes
from leanstep.reporters.steps import GROUPS, Steps
from leanstep.units import format_bytes

_GIB = 1024**3
_MIB = 1024**2

# Those of the page (page.css).
_GROUP_COLOURS = ("#0072b2", "#7cc4ec", "#a4abb2", "#009e73", "#e8a92c", "#d55e00")
_FATE_COLOURS = ("#aab1b8", "#0072b2", "#bf5f92")
_LINES = ("-", "--", "-.", ":")
_INK = "#1b1f23"


def draw_peaks(peaks: Peaks, budget_bytes: int | None, path: Path, *, title: str) -> None:
    """Draw what the peak is made of, by category, untouched above planned."""
    bars = [("untouched", peaks.before), ("planned", peaks.after)]
    known = [(name, peak) for name, peak in bars if peak is not None]
    unit, scale = _byte_unit(max(peak.peak_bytes for _, peak in known))
    figure = new_figure(9, 1.4 + 0.7 * len(known))
    axes = figure.subplots()
    for place, (name, peak) in enumerate(known):
        left = 0.0
        for group, nbytes in enumerate(peak.groups):
            label = GROUPS[group][0] if place == 0 else None
            width = nbytes / scale
            axes.barh(name, width, left=left, color=_GROUP_COLOURS[group], label=label)
            left += width
        axes.text(left, place, f" {format_bytes(peak.peak_bytes)}", va="center", size=9)
    if budget_bytes is not None:
        axes.axvline(budget_bytes / scale, color=_INK, linestyle="--", label="budget")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"peak, {unit}")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)


def draw_lifetimes(steps: Steps, lifetimes: Lifetimes, path: Path, *, title: str) -> None:
    """Draw each activation from the op that makes it to its last use in backward."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    starts = [1000 * start for start in steps.before.starts]
    lives = lifetimes.lives
    # In points: as thick as there is room for.
    width = max(0.3, 280 / max(1, len(lives)))
    for fate, colour in zip(FATES, _FATE_COLOURS, strict=True):
        rows = [row for row, life in enumerate(lives) if life.fate == fate]
        ready = [starts[lives[row].last_forward + 1] for row in rows]
        asked = [starts[lives[row].first_backward] for row in rows]
        if rows:
            axes.hlines(rows, ready, asked, colour, linewidth=width, label=f"waits, {fate}")
    every = range(len(lives))
    for first, last in (("made", "last_forward"), ("first_backward", "last_backward")):
        begins = [starts[getattr(life, first)] for life in lives]
        ends = [starts[getattr(life, last) + 1] for life in lives]
        axes.hlines(every, begins, ends, _INK, linewidth=width)
    axes.plot([], color=_INK, label="in use")
    for phase, begin in _phase_starts(steps):
        axes.axvline(starts[begin], color=_INK, linewidth=0.5)
        axes.text(starts[begin], 1, f" {phase}", transform=axes.get_xaxis_transform(), size=8)
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_ylabel(f"{len(lives)} activations, as they are made")
    axes.set_xlabel("time in the untouched step, ms")
    axes.set_title(title, pad=16)
    legend = figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    for line in legend.get_lines():
        line.set_linewidth(4)
    figure.savefig(path)


def _phase_starts(steps: Steps) -> list[tuple[str, int]]:
    groups = groupby(enumerate(steps.ops.phases), key=lambda pair: pair[1])
    return [(steps.phases[phase], next(found)[0]) for phase, found in groups]


def draw_frontier(frontier: Frontier, path: Path, *, title: str) -> None:
    """Draw extra time against peak, a line for each solver, and the proved bound."""
    unit, scale = _byte_unit(frontier.unplanned_peak_bytes)
    figure = new_figure(8.5, 4.5)
    axes = figure.subplots()
    for place, solver in enumerate(frontier.solvers):
        points = sorted(frontier.of(solver), key=lambda point: point.budget_bytes)
        peaks = [point.peak_bytes / scale for point in points]
        extra = [100 * point.extra_seconds / frontier.step_seconds for point in points]
        line = _LINES[place % len(_LINES)]
        # A plan fits up to the next one's peak, and a bound holds down to the next smaller budget.
        steps: dict[str, Any] = {"marker": "o", "markersize": 3, "drawstyle": "steps-post"}
        axes.plot(peaks, extra, linestyle=line, label=solver, **steps)
    bounds = {point.budget_bytes: point.bound_seconds for point in frontier.points}
    budgets = sorted(bounds)
    lowest = [100 * bounds[budget] / frontier.step_seconds for budget in budgets]
    xs = [budget / scale for budget in budgets]
    style: dict[str, Any] = {
        "color": _INK,
        "linewidth": 0.8,
        "linestyle": ":",
        "drawstyle": "steps-pre",
    }
    axes.plot(xs, lowest, label="proved bound", **style)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"peak, {unit}")
    axes.set_ylabel("extra time, % of the step")
    axes.set_title(title)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)


def _byte_unit(nbytes: int) -> tuple[str, int]:
    return ("GiB", _GIB) if nbytes >= _GIB else ("MiB", _MIB)
