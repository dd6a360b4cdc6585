"""Everything a report shows, as one plain value: what the page draws, and what tests assert on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from leanstep.errors import InputError
from leanstep.ir import Frontier, Ladder, MaxBatch, Peak, Plan, Profile, Reading, Sweep, Verdict
from leanstep.ir.codec import Saved
from leanstep.planner import ladder as make_ladder
from leanstep.planner.explain import untouched_peak
from leanstep.reporters.decisions import Row, rows_of
from leanstep.reporters.lifetimes import Lifetimes, lifetimes_of
from leanstep.reporters.steps import GROUP_OF, GROUPS, Steps, steps_of
from leanstep.reporters.summary import Summary, summarise
from leanstep.solvers.registry import CURVED
from leanstep.units import format_bytes_up


@dataclass(frozen=True, slots=True)
class Results:
    """What leanstep found about one model, each at most once; a report is of some of them."""

    profile: Profile | None = None
    plan: Plan | None = None
    verdict: Verdict | None = None
    frontier: Frontier | None = None
    ladder: Ladder | None = None
    study: Sweep | MaxBatch | None = None


@dataclass(frozen=True, slots=True)
class PeakShares:
    """One peak by group and by owner, in the order of the step; both add up to it."""

    peak_bytes: int
    place: str
    groups: tuple[int, ...]
    owners: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of the untouched and of the planned step."""

    groups: tuple[str, ...]
    before: PeakShares | None
    after: PeakShares | None


@dataclass(frozen=True, slots=True)
class StudyPoint:
    """One batch size: untouched, planned, and as the textbook estimates √n segments."""

    batch: int
    before: Reading | None
    after: Reading | None
    textbook: Reading | None


@dataclass(frozen=True, slots=True)
class Study:
    """The batch-size study; a largest batch of 0 fits nothing."""

    budget_bytes: int
    largest_before: int
    largest_after: int
    points: tuple[StudyPoint, ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """The whole report. A part that is None has a line in `missing`: what to type to get it.

    `planned` are the peak and the extra seconds of the plan.
    """

    title: str
    subtitle: tuple[str, ...]
    summary: Summary
    budget_bytes: int | None
    planned: tuple[int, float] | None
    steps: Steps | None
    peaks: Peaks | None
    lifetimes: Lifetimes | None
    ladder: Ladder | None
    frontier: Frontier | None
    decisions: tuple[Row, ...] | None
    study: Study | None
    missing: tuple[tuple[str, str], ...]


def collect(results: Sequence[Saved]) -> Results:
    """Sort results by their kind.

    Raises:
        InputError: there is none, two are of one kind, a kind has no place in a report, or a plan
            and a profile are of different models.
    """
    found: dict[str, Saved] = {}
    for result in results:
        name = "study" if isinstance(result, (Sweep, MaxBatch)) else type(result).__name__.lower()
        if name not in {field.name for field in fields(Results)}:
            raise InputError(f"a report has no place for {type(result).__name__}")
        if name in found:
            raise InputError(f"a report has one {name}, and two were given")
        found[name] = result
    if not found:
        raise InputError("a report is of something: give a profile, a plan or a study")
    collected = Results(**found)  # type: ignore[arg-type]  # each by the name of its kind
    _check_alike(collected)
    return collected


def _check_alike(results: Results) -> None:
    if results.profile is None or results.plan is None:
        return
    if differences := results.plan.model.differences(results.profile.model):
        raise InputError(f"plan and profile are not of one step: {differences[0]}")


def with_ladder(results: Results) -> Results:
    """The same, with a plan for every budget where there is a profile to plan from.

    They are made as the given plan was, as far as it tells: with its solver unless that is a slow
    one, and with host memory if it uses any.
    """
    profile, plan = results.profile, results.plan
    if profile is None or results.ladder is not None:
        return results
    found = make_ladder(
        profile,
        solver=plan.solver if plan is not None and plan.solver in CURVED else "auto",
        engine="inductor" if profile.is_compiled else "auto",
        exact=plan is None or plan.exact,
        offload=plan is None or not plan.changed or bool(plan.host_bytes),
        also=() if plan is None else (plan.budget_bytes,),
    )
    return replace(results, ladder=found)


def report_data(results: Results) -> ReportData:
    """Turn results into what a report shows."""
    profile, plan, study = results.profile, results.plan, results.study
    parts = {
        "steps": None if profile is None else steps_of(profile, plan),
        "lifetimes": None if profile is None else lifetimes_of(profile, plan),
        "peaks": peaks_of(profile, plan),
        "ladder": results.ladder,
        "decisions": None if plan is None else rows_of(plan),
        "study": None if study is None else _study(study),
    }
    how = _how(_budget_bytes(results))
    title, *subtitle = _titles(results)
    return ReportData(
        title=title,
        subtitle=tuple(subtitle),
        summary=summarise(profile, plan, results.verdict, results.ladder, study),
        budget_bytes=_budget_bytes(results),
        planned=None if plan is None else (plan.peak_bytes, plan.extra_seconds),
        frontier=results.frontier,
        missing=tuple((name, how[name]) for name, part in parts.items() if part is None),
        **parts,  # type: ignore[arg-type]  # each by its name
    )


_PROFILE = "leanstep profile TARGET -o run.json, then leanstep report run.json -o report.html"


def _how(budget_bytes: int | None) -> dict[str, str]:
    """What to type for each part that is missing, with the budget that the others have."""
    budget = None if budget_bytes is None else format_bytes_up(budget_bytes).replace(" ", "")
    return {
        "steps": _PROFILE,
        "lifetimes": _PROFILE,
        "peaks": _PROFILE,
        "ladder": _PROFILE,
        "decisions": (
            f"leanstep plan run.json --budget {budget or '60%'} -o plan.json, then "
            "leanstep report run.json plan.json -o report.html"
        ),
        "study": (
            f"leanstep sweep TARGET --batch 8,16,32,64 --budget {budget or 'BUDGET'} -o "
            "sweep.json, then leanstep report run.json sweep.json -o report.html"
        ),
    }


def _titles(results: Results) -> Iterator[str]:
    profile, plan, study = results.profile, results.plan, results.study
    identity = profile.model if profile is not None else plan.model if plan is not None else None
    if identity is not None:
        yield identity.model
        yield f"{identity.num_elements:,} parameters"
        if identity.batch_size:
            yield f"batch {identity.batch_size}"
    elif study is not None:
        yield study.model
    else:
        yield "leanstep"
    if profile is not None:
        yield f"{profile.device} (estimated)" if profile.estimated else profile.device
        yield f"torch {profile.torch_version}"
    elif study is not None:
        yield study.device
    if plan is not None:
        yield f"solver {plan.solver}"


def _budget_bytes(results: Results) -> int | None:
    for part in (results.verdict, results.plan, results.study):
        if part is not None:
            return part.budget_bytes
    return None


def peaks_of(profile: Profile | None, plan: Plan | None) -> Peaks | None:
    """What the peaks are made of; None where nothing says it."""
    before = None if plan is None else plan.unplanned_peak
    after = None if plan is None else plan.peak
    if before is None and profile is not None:
        before = untouched_peak(profile)
    if before is None and after is None:
        return None
    return Peaks(
        groups=tuple(name for name, _ in GROUPS),
        before=None if before is None else _shares(before),
        after=None if after is None else _shares(after),
    )


def _shares(peak: Peak) -> PeakShares:
    groups = [0] * len(GROUPS)
    owners: dict[str, int] = {}
    for holder in peak.holders:
        groups[GROUP_OF[holder.category]] += holder.nbytes
        name = holder.owner or GROUPS[GROUP_OF[holder.category]][0]
        owners[name] = owners.get(name, 0) + holder.nbytes
    return PeakShares(
        peak_bytes=peak.peak_bytes,
        place=peak.place,
        groups=tuple(groups),
        owners=tuple(owners.items()),
    )


def _study(study: Sweep | MaxBatch) -> Study:
    before, after = study.largest_untouched, study.largest_planned
    return Study(
        budget_bytes=study.budget_bytes,
        largest_before=0 if before is None else before.batch,
        largest_after=0 if after is None else after.batch,
        points=tuple(
            StudyPoint(trial.batch, trial.baseline, trial.planned, trial.textbook)
            for trial in study.trials
        ),
    )
