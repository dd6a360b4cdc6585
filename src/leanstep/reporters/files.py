"""The public verb: results as a file that a person looks at, by the ending of its name."""

from collections.abc import Callable, Sequence
from pathlib import Path

from leanstep.errors import InputError, unknown_name
from leanstep.ir.codec import Saved
from leanstep.reporters.charts import draw_frontier, draw_lifetimes, draw_peaks
from leanstep.reporters.data import Results, collect, peaks_of, report_data, with_ladder
from leanstep.reporters.figures import draw_memory, draw_sweep
from leanstep.reporters.html import write_html
from leanstep.reporters.lifetimes import lifetimes_of
from leanstep.reporters.steps import steps_of
from leanstep.reporters.trace import write_trace
from leanstep.simulator import memory_curve

_PICTURES = (".png", ".svg")
_ENDINGS = (".html", *_PICTURES, ".json")


def report(
    results: Saved | Sequence[Saved], path: str | Path, *, figure: str | None = None
) -> None:
    """Write a report of one result, or of several about the same model.

    Args:
        results: a `Profile`, `Plan`, `Verdict`, `Frontier`, `Sweep` or `MaxBatch`, or a sequence of
            such; a profile with its plan shows the step before and after.
        path: where to; an existing file is overwritten. `.html` is one page with everything, which
            opens offline and plans for every budget (seconds for a large model); `.png` and `.svg`
            are one figure; `.json` is a trace of a profile for Perfetto or `chrome://tracing`.
            Pages and figures need `pip install leanstep[report]`.
        figure: which one: `"memory"`, `"peak"`, `"lifetimes"`, `"frontier"` or `"batches"`; by
            default the first of these that there is something to draw of.
    """
    place = Path(path)
    _check_place(place, figure)
    found = collect([results] if isinstance(results, Saved) else results)
    match place.suffix.lower():
        case ".html":
            write_html(report_data(with_ladder(found)), place)
        case ".png" | ".svg":
            _FIGURES[_figure_name(found, figure)](found, place)
        case ".json":
            if found.profile is None:
                raise InputError("a trace is of a recorded step: give a profile")
            write_trace(found.profile, found.plan, place)


def _check_place(place: Path, figure: str | None) -> None:
    """Raise InputError unless the name of a file says what to write."""
    ending = place.suffix.lower()
    if ending not in _ENDINGS:
        raise InputError(f"{place} does not say what to write: end it in {', '.join(_ENDINGS)}")
    if figure is not None and figure not in _FIGURES:
        raise unknown_name("figure", figure, _FIGURES)
    if figure is not None and ending not in _PICTURES:
        raise InputError(f"{place} is no figure: {figure!r} goes with {' or '.join(_PICTURES)}")


def _figure_name(results: Results, asked: str | None) -> str:
    can_draw = {
        "memory": results.profile is not None,
        "batches": results.study is not None,
        "frontier": results.frontier is not None,
        "peak": results.profile is not None or results.plan is not None,
        "lifetimes": results.profile is not None,
    }
    names = [asked] if asked is not None else list(can_draw)
    drawn = [name for name in names if can_draw[name]]
    if not drawn:
        needs = _NEEDS.get(asked or "", _PROFILE)
        fault = f"there is nothing to draw {asked} of" if asked else "a verdict has no figure"
        raise InputError(f"{fault}: give {needs}")
    return drawn[0]


_PROFILE = "a profile (leanstep profile)"
_NEEDS = {
    "batches": "a sweep (leanstep sweep)",
    "frontier": "a frontier (leanstep frontier)",
    "peak": f"{_PROFILE} or a plan (leanstep plan)",
}


def _draw_memory(results: Results, place: Path) -> None:
    profile, plan = results.profile, results.plan
    assert profile is not None, "asked only where there is one"
    after = None if plan is None else memory_curve(profile, plan)
    budget_bytes = None if plan is None else plan.budget_bytes
    draw_memory(memory_curve(profile), after, budget_bytes, place, title=_title(results))


def _draw_batches(results: Results, place: Path) -> None:
    assert results.study is not None, "asked only where there is one"
    draw_sweep(results.study, place)


def _draw_frontier(results: Results, place: Path) -> None:
    assert results.frontier is not None, "asked only where there is one"
    title = results.frontier.device if results.profile is None else _title(results)
    draw_frontier(results.frontier, place, title=title)


def _draw_peak(results: Results, place: Path) -> None:
    peaks = peaks_of(results.profile, results.plan)
    if peaks is None:
        raise InputError("the plan does not say what its peak is made of: make it anew")
    budget_bytes = None if results.plan is None else results.plan.budget_bytes
    draw_peaks(peaks, budget_bytes, place, title=_title(results))


def _draw_lifetimes(results: Results, place: Path) -> None:
    profile, plan = results.profile, results.plan
    assert profile is not None, "asked only where there is one"
    lifetimes = lifetimes_of(profile, plan)
    draw_lifetimes(steps_of(profile, None), lifetimes, place, title=_title(results))


_FIGURES: dict[str, Callable[[Results, Path], None]] = {
    "memory": _draw_memory,
    "peak": _draw_peak,
    "lifetimes": _draw_lifetimes,
    "frontier": _draw_frontier,
    "batches": _draw_batches,
}


def _title(results: Results) -> str:
    """Model, batch and device: what fits above a figure."""
    profile, plan = results.profile, results.plan
    identity = profile.model if profile is not None else plan.model if plan is not None else None
    if identity is None:
        return ""
    parts = [identity.model]
    if identity.batch_size:
        parts.append(f"batch {identity.batch_size}")
    if profile is not None:
        parts.append(f"{profile.device}{' (estimated)' if profile.estimated else ''}")
    return " · ".join(parts)
