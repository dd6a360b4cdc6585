"""Figures as files: plain data in, PNG or SVG out; matplotlib is loaded when one is drawn."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanstep.errors import InputError
from leanstep.ir import Category, MaxBatch, MemoryCurve, Reading, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1024**3
_MIB = 1024**2

# What stays at the bottom, what moves on top; colours that differ in grey too.
_COLOURS = {
    Category.OTHER: "#7f7f7f",
    Category.PARAMETER: "#1f4e79",
    Category.BUFFER: "#5b7fa3",
    Category.OPTIMIZER_STATE: "#7b5ea7",
    Category.INPUT: "#bcbd22",
    Category.GENERATOR: "#c7c7c7",
    Category.GRADIENT: "#2a9d8f",
    Category.ACTIVATION: "#f4a261",
    Category.TEMPORARY: "#e76f51",
}
# What is thinner than a line is not drawn.
_LEAST_SHARE = 0.001

# As many stretches of time as a screen shows; a large model has ten thousand ops.
_COLUMNS = 800

_UNTOUCHED, _PLANNED, _BUDGET = "#7f7f7f", "#1f77b4", "#c1121f"
_TEXTBOOK = "√n segments, as textbooks estimate"


def draw_memory(
    before: MemoryCurve,
    after: MemoryCurve | None,
    budget_bytes: int | None,
    path: Path,
    *,
    title: str,
) -> None:
    """Draw memory over the step, stacked by category; with a plan, before above after."""
    drawn = [("untouched", before)] + ([("planned", after)] if after is not None else [])
    curves = [(name, curve.thinned(_COLUMNS)) for name, curve in drawn]
    figure = new_figure(9, 3.2 * len(curves) + 0.6)
    grid = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)
    highest = max(max(curve.totals) for _, curve in curves)
    unit, scale = ("GiB", _GIB) if highest >= _GIB else ("MiB", _MIB)
    for axes, (name, curve) in zip(grid[:, 0], curves, strict=True):
        _draw_curve(axes, curve, scale)
        axes.set_ylabel(f"{name}, {unit}")
        # Room for the names of the phases.
        axes.set_ylim(0, 1.1 * highest / scale)
        axes.set_xlim(0, 1000 * max(curve.starts[-1] for _, curve in curves))
        if budget_bytes is not None:
            axes.axhline(budget_bytes / scale, color=_BUDGET, linestyle="--", label="budget")
    axes.set_xlabel("time in the step, ms")
    grid[0, 0].set_title(title)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.savefig(path)


def _draw_curve(axes: "Axes", curve: MemoryCurve, scale: int) -> None:
    layers = dict(curve.layers)
    visible = max(curve.totals) * _LEAST_SHARE
    shown = [key for key in _COLOURS if key in layers and max(layers[key]) >= visible]
    # The last level is held to the step's end.
    milliseconds = [1000 * start for start in curve.starts]
    axes.stackplot(
        milliseconds,
        [_held([max(0, level) / scale for level in layers[category]]) for category in shown],
        labels=[category.value for category in shown],
        colors=[_COLOURS[category] for category in shown],
        step="post",
    )
    for phase, start in curve.phase_starts:
        axes.axvline(1000 * start, color="black", linewidth=0.5, alpha=0.5)
        upright = axes.get_xaxis_transform()
        # The last phase is short: its name stands before it.
        side = "right" if start > 0.85 * curve.starts[-1] else "left"
        axes.text(
            1000 * start, 0.98, f" {phase.value} ", transform=upright, va="top", ha=side, size=8
        )


def _held(levels: list[float]) -> list[float]:
    return [*levels, levels[-1]]


def draw_sweep(study: Sweep | MaxBatch, path: Path) -> None:
    """Draw peak, step time and samples a second against the batch, with and without a plan.

    The largest batch of each is marked where it meets the budget.
    """
    figure = new_figure(12, 3.8)
    panels = peak, time, rate = figure.subplots(1, 3)
    for series in _series(study):
        batches = [batch for batch, _ in series.points]
        style = series.style
        peak.plot(batches, [one.peak_bytes / _GIB for _, one in series.points], **style)
        time.plot(batches, [1000 * one.seconds for _, one in series.points], **style)
        rate.plot(batches, [batch / one.seconds for batch, one in series.points], **style)
    budget = study.budget_bytes / _GIB
    peak.axhline(budget, color=_BUDGET, linestyle="--", label="budget")
    # What is far above the budget would flatten the rest.
    peak.set_ylim(top=min(peak.get_ylim()[1], 2.5 * budget))
    for trial, colour in (
        (study.largest_untouched, _UNTOUCHED),
        (study.largest_planned, _PLANNED),
    ):
        if trial is not None:
            _mark_batch(panels, trial.batch, colour)
    labels = ("peak, GiB", "step, ms", "samples a second")
    for axes, label in zip(panels, labels, strict=True):
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    handles, names = peak.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{study.model} · {study.device}")
    figure.savefig(path)


def _mark_batch(panels: "Sequence[Axes]", batch: int, colour: str) -> None:
    for axes in panels:
        axes.axvline(batch, color=colour, linewidth=0.8, alpha=0.6)
    upright = panels[0].get_xaxis_transform()
    panels[0].text(batch, 0.02, f" {batch}", transform=upright, color=colour, size=8)


@dataclass(frozen=True, slots=True)
class _Series:
    """The points of one line against the batch."""

    name: str
    colour: str
    line: str
    points: Sequence[tuple[int, Reading]]

    @property
    def style(self) -> dict[str, Any]:
        """How it is drawn: open marks are for what nobody has measured, dots for hearsay."""
        is_measured = all(reading.measured for _, reading in self.points)
        return {
            "color": self.colour,
            "label": self.name,
            "linestyle": self.line,
            "marker": "" if self.line == ":" else "o",
            "markerfacecolor": self.colour if is_measured else "white",
        }


def _series(study: Sweep | MaxBatch) -> list[_Series]:
    trials = study.trials
    found = (
        _Series("untouched", _UNTOUCHED, "-", _known((t.batch, t.baseline) for t in trials)),
        _Series("planned", _PLANNED, "-", _known((t.batch, t.planned) for t in trials)),
        _Series(_TEXTBOOK, "#2a9d8f", ":", _known((t.batch, t.textbook) for t in trials)),
    )
    return [series for series in found if series.points]


def _known(points: Iterable[tuple[int, Reading | None]]) -> list[tuple[int, Reading]]:
    return [(batch, reading) for batch, reading in points if reading is not None]


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure; says what to install where matplotlib is missing."""
    try:
        # The object, not pyplot: no window, and no setting of the user's is touched.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError(
            "figures are drawn by matplotlib, which is not installed: pip install leanstep[report]"
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")
