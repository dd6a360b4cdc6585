"""Figures as files: plain data in, PNG or SVG out; matplotlib is loaded when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leanstep.errors import InputError
from leanstep.ir import Category, MemoryCurve, Reading, Sweep

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
    figure = _figure(9, 3.2 * len(curves) + 0.6)
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


def draw_sweep(sweep: Sweep, path: Path) -> None:
    """Draw peak, step time and samples a second against the batch, with and without a plan."""
    figure = _figure(12, 3.6)
    peak, time, rate = figure.subplots(1, 3)
    for name, colour, points in _series(sweep):
        batches = [batch for batch, _ in points]
        # Open marks are for what nobody has measured.
        style = {"color": colour, "label": name, "marker": "o"}
        style["markerfacecolor"] = colour if all(r.measured for _, r in points) else "white"
        peak.plot(batches, [reading.peak_bytes / _GIB for _, reading in points], **style)
        time.plot(batches, [1000 * reading.seconds for _, reading in points], **style)
        rate.plot(batches, [batch / reading.seconds for batch, reading in points], **style)
    peak.axhline(sweep.budget_bytes / _GIB, color=_BUDGET, linestyle="--", label="budget")
    for axes, label in ((peak, "peak, GiB"), (time, "step, ms"), (rate, "samples a second")):
        axes.set_xlabel("batch")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    handles, labels = peak.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"{sweep.model} · {sweep.device}")
    figure.savefig(path)


def _series(sweep: Sweep) -> list[tuple[str, str, Sequence[tuple[int, Reading]]]]:
    untouched = [(trial.batch, trial.baseline) for trial in sweep.trials]
    planned = [(trial.batch, trial.planned) for trial in sweep.trials]
    both = (("untouched", _UNTOUCHED, untouched), ("planned", _PLANNED, planned))
    known = [
        (name, colour, [(batch, reading) for batch, reading in points if reading is not None])
        for name, colour, points in both
    ]
    return [(name, colour, points) for name, colour, points in known if points]


def _figure(width: float, height: float) -> "Figure":
    try:
        # The object, not pyplot: no window, and no setting of the user's is touched.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError(
            "figures are drawn by matplotlib, which is not installed: pip install leanstep[report]"
        ) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")
