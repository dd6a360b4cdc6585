"""The public verb: a result as a file that a person looks at, by the ending of its name."""

from pathlib import Path

from leanstep.errors import InputError
from leanstep.ir import Plan, Profile, Sweep
from leanstep.ir.codec import Saved
from leanstep.reporters.figures import draw_memory, draw_sweep
from leanstep.simulator import memory_curve

_ENDINGS = (".png", ".svg")


def report(result: Saved, path: str | Path, *, plan: Plan | None = None) -> None:
    """Draw a result into a PNG or SVG file; needs matplotlib (`pip install leanstep[report]`).

    Args:
        result: a `Profile` (memory over the step, by category) or a `Sweep` (peak and time
            against the batch).
        path: where to, ending in `.png` or `.svg`; an existing file is overwritten.
        plan: of the profile: its step is drawn below the untouched one, with its budget.
    """
    place = Path(path)
    if place.suffix.lower() not in _ENDINGS:
        raise InputError(f"{place} does not say what to draw: end it in {' or '.join(_ENDINGS)}")
    match result:
        case Profile():
            before = memory_curve(result)
            after = None if plan is None else memory_curve(result, plan)
            budget_bytes = None if plan is None else plan.budget_bytes
            draw_memory(before, after, budget_bytes, place, title=_title(result))
        case Sweep():
            draw_sweep(result, place)
        case _:
            raise InputError(f"a {type(result).__name__} has no figure: give a Profile or a Sweep")


def _title(profile: Profile) -> str:
    return f"{profile.model} · {profile.device}{' (estimated)' if profile.estimated else ''}"
