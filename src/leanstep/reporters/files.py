"""The public verb: results as a file that a person looks at, by the ending of its name."""

from collections.abc import Sequence
from pathlib import Path

from leanstep.errors import InputError
from leanstep.ir import Profile
from leanstep.ir.codec import Saved
from leanstep.reporters.data import Results, collect, report_data, with_ladder
from leanstep.reporters.figures import draw_memory, draw_sweep
from leanstep.reporters.html import write_html
from leanstep.reporters.trace import write_trace
from leanstep.simulator import memory_curve

_ENDINGS = (".html", ".png", ".svg", ".json")


def report(results: Saved | Sequence[Saved], path: str | Path) -> None:
    """Write a report of one result, or of several about the same model.

    Args:
        results: a `Profile`, `Plan`, `Verdict`, `Frontier`, `Sweep` or `MaxBatch`, or a sequence of
            such; a profile with its plan shows the step before and after.
        path: where to; an existing file is overwritten. `.html` is one page with everything, which
            opens offline and plans for every budget (seconds for a large model); `.png` and `.svg`
            are one figure; `.json` is a trace of a profile for Perfetto or `chrome://tracing`.
            Pages and figures need `pip install leanstep[report]`.
    """
    place = Path(path)
    found = collect([results] if isinstance(results, Saved) else results)
    match place.suffix.lower():
        case ".html":
            write_html(report_data(with_ladder(found)), place)
        case ".png" | ".svg":
            _draw(found, place)
        case ".json":
            if found.profile is None:
                raise InputError("a trace is of a recorded step: give a profile")
            write_trace(found.profile, found.plan, place)
        case _:
            raise InputError(f"{place} does not say what to write: end it in {', '.join(_ENDINGS)}")


def _draw(results: Results, place: Path) -> None:
    profile, plan = results.profile, results.plan
    if profile is not None:
        after = None if plan is None else memory_curve(profile, plan)
        budget_bytes = None if plan is None else plan.budget_bytes
        draw_memory(memory_curve(profile), after, budget_bytes, place, title=_title(profile))
    elif results.study is not None:
        draw_sweep(results.study, place)
    else:
        raise InputError("there is no figure of that: give a profile or a sweep")


def _title(profile: Profile) -> str:
    return f"{profile.model} · {profile.device}{' (estimated)' if profile.estimated else ''}"
