"""The first thing that a report says: whether it fits, what it cost, and how that is known."""

from collections.abc import Iterator
from dataclasses import dataclass

from leanstep.errors import InputError
from leanstep.ir import Ladder, MaxBatch, Plan, Profile, Sweep, Trial, Verdict
from leanstep.reporters.terminal import uncertain_time
from leanstep.units import format_bytes, format_change, format_seconds

GOOD, BAD, PLAIN = "good", "bad", "plain"


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure with its name; `note` says what it is compared with or where it comes from."""

    label: str
    value: str
    note: str = ""
    tone: str = PLAIN


@dataclass(frozen=True, slots=True)
class Summary:
    """A sentence, and the figures that it rests on."""

    tone: str
    word: str
    sentence: str
    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()


def summarise(
    profile: Profile | None,
    plan: Plan | None,
    verdict: Verdict | None,
    ladder: Ladder | None,
    study: Sweep | MaxBatch | None,
) -> Summary:
    """Say what the strongest result at hand says."""
    if verdict is not None:
        return _of_verdict(verdict, plan)
    if plan is not None:
        return _of_plan(plan)
    if profile is not None:
        return _of_profile(profile, ladder)
    if study is not None:
        return _of_study(study)
    raise InputError(
        "a page needs more than a frontier: give the profile too; a figure can be of it alone"
    )


def _of_verdict(verdict: Verdict, plan: Plan | None) -> Summary:
    tone, word = GOOD, "Fits"
    if not verdict.within_budget:
        tone, word = BAD, "Over budget"
    elif verdict.beyond_tolerance or (verdict.different and not verdict.inexact_allowed):
        tone, word = BAD, "Not the same numbers"
    predicted = "" if verdict.baseline_fits else " (predicted: it does not fit the device)"
    return Summary(
        tone=tone,
        word=word,
        sentence=(
            f"The measured peak is {format_bytes(verdict.measured_peak_bytes)} of a budget of "
            f"{format_bytes(verdict.budget_bytes)}."
        ),
        facts=(
            _change_fact(
                "Peak memory",
                format_bytes(verdict.baseline_peak_bytes),
                format_bytes(verdict.measured_peak_bytes),
                verdict.measured_peak_bytes / max(1, verdict.baseline_peak_bytes) - 1,
                f"measured{predicted}",
            ),
            _change_fact(
                "Step time",
                format_seconds(verdict.baseline_seconds),
                format_seconds(verdict.measured_seconds),
                verdict.slowdown - 1,
                f"measured{predicted}",
            ),
            _numbers_fact(verdict),
            _prediction_fact(verdict),
            *(() if plan is None else (_gap_fact(plan),)),
        ),
        notes=(
            *((uncertain_time(verdict),) if verdict.has_uncertain_time else ()),
            *(() if plan is None else plan.notes),
            *verdict.assumptions,
        ),
    )


def _change_fact(label: str, before: str, after: str, share: float, how: str) -> Fact:
    return Fact(label, f"{before} → {after}", f"{format_change(share)}, {how}")


def _numbers_fact(verdict: Verdict) -> Fact:
    if verdict.exact:
        return Fact("Gradients", "equal, bit for bit", "loss, buffers, random state too", GOOD)
    if not verdict.different:
        count = len(verdict.within_spread)
        note = f"{count} tensors differ from run to run without a plan too; the rest is bit-equal"
        return Fact("Gradients", "equal within their own spread", note, GOOD)
    count = len(verdict.different)
    if verdict.inexact_allowed and not verdict.beyond_tolerance:
        note = f"largest relative difference {verdict.largest_difference:.1g}, as was allowed"
        return Fact("Gradients", f"{count} tensors differ by rounding", note)
    names = ", ".join(verdict.different[:3])
    return Fact("Gradients", f"{count} tensors differ", names, BAD)


def _prediction_fact(verdict: Verdict) -> Fact:
    error = verdict.predicted_peak_bytes / max(1, verdict.measured_peak_bytes) - 1
    seconds = verdict.predicted_seconds / max(1e-12, verdict.measured_seconds) - 1
    return Fact(
        "Predicted against measured",
        f"{format_change(error)} peak, {format_change(seconds)} time",
        f"predicted {format_bytes(verdict.predicted_peak_bytes)}, "
        f"{format_seconds(verdict.predicted_seconds)}",
    )


def _gap_fact(plan: Plan) -> Fact:
    excess = f"at most {format_seconds(plan.excess_seconds)}"
    return Fact(
        "From the optimum",
        "0, proved" if plan.is_optimal else excess,
        f"extra {format_seconds(plan.extra_seconds)}, proved bound "
        f"{format_seconds(plan.bound_seconds)}",
    )


def _of_plan(plan: Plan) -> Summary:
    planned = plan.step_seconds + plan.extra_seconds
    return Summary(
        tone=GOOD,
        word="Fits, as predicted",
        sentence=(
            f"The planned peak is {format_bytes(plan.peak_bytes)} of a budget of "
            f"{format_bytes(plan.budget_bytes)}; nothing has been measured with the plan yet."
        ),
        facts=(
            _change_fact(
                "Peak memory",
                format_bytes(plan.unplanned_peak_bytes),
                format_bytes(plan.peak_bytes),
                plan.peak_bytes / max(1, plan.unplanned_peak_bytes) - 1,
                "predicted",
            ),
            _change_fact(
                "Step time",
                format_seconds(plan.step_seconds),
                format_seconds(planned),
                plan.extra_seconds / max(1e-12, plan.step_seconds),
                "predicted",
            ),
            Fact("Gradients", "not compared yet", "leanstep fit compares every number"),
            _gap_fact(plan),
        ),
        notes=plan.notes,
    )


def _of_profile(profile: Profile, ladder: Ladder | None) -> Summary:
    how = "estimated" if profile.estimated else "measured"
    facts = [
        Fact("Peak memory", format_bytes(profile.peak_bytes), f"untouched, {how}"),
        Fact("Step time", format_seconds(profile.step_seconds), f"untouched, {how}"),
        Fact("Recorded", f"{len(profile.graph.ops)} ops", f"{len(profile.blocks)} block calls"),
    ]
    if ladder is not None:
        last = ladder.rungs[-1]
        extra = format_change(last.extra_seconds / max(1e-12, ladder.step_seconds))
        # With host memory a still smaller budget may do: nobody has looked for it.
        label = "Least peak" if profile.link is None else "Smallest budget tried"
        note = f"at {extra} step time"
        facts.insert(2, Fact(label, format_bytes(last.budget_bytes), note))
    return Summary(
        tone=PLAIN,
        word="Profiled",
        sentence="Nothing is planned yet. The slider below shows what every budget would cost.",
        facts=tuple(facts),
        notes=profile.notes,
    )


def _of_study(study: Sweep | MaxBatch) -> Summary:
    before, after = study.largest_untouched, study.largest_planned
    tone = GOOD if after is not None and after.planned is not None else BAD
    return Summary(
        tone=tone,
        word="Batch-size study" if tone == GOOD else "Nothing fits",
        sentence=f"Under a budget of {format_bytes(study.budget_bytes)} on {study.device}.",
        facts=tuple(_study_facts(before, after)),
        notes=study.notes,
    )


def _study_facts(before: Trial | None, after: Trial | None) -> Iterator[Fact]:
    if before is not None and before.baseline is not None:
        how = "measured" if before.baseline.measured else "predicted"
        peak = format_bytes(before.baseline.peak_bytes)
        yield Fact("Largest batch, untouched", str(before.batch), f"{peak}, {how}")
    if after is None or after.planned is None:
        return
    how = "measured" if after.planned.measured else "predicted"
    peak = format_bytes(after.planned.peak_bytes)
    yield Fact("Largest batch, planned", str(after.batch), f"{peak}, {how}", GOOD)
    if before is not None and before.baseline is not None:
        share = after.planned_sample_seconds / before.baseline_sample_seconds - 1
        yield Fact("Gain", f"{after.batch / before.batch:.2f} ×", "times the batch")
        yield Fact("Time per sample", format_change(share), "at the larger batch")
