"""What a study of batch sizes found: peak and time of a step, with and without a plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from leanstep.ir.codec import Saved
from leanstep.ir.notebook import html_card, html_lines, html_table
from leanstep.ir.text import table
from leanstep.units import (
    format_budget_up,
    format_bytes,
    format_change,
    format_rate,
    format_seconds,
)

_HEADINGS = ("batch", "untouched", "step", "samples/s", "planned", "step", "samples/s", "extra")


@dataclass(frozen=True, slots=True)
class Reading:
    """The peak and the time of one step; `measured` on the device, or predicted."""

    peak_bytes: int
    seconds: float
    measured: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size: the untouched step, and the planned one under the budget.

    Without a plan that fits, `planned` is None and `floor_bytes` the least peak that a plan
    reaches. Where the trial came to no figures at all, `failure` says why. `equal` says whether
    every number of the planned step was bit for bit that of the untouched one, or (false) some were
    within the spread that this has from run to run; None where none was compared.
    `device` is what the figures are about. `promised` is what the plan said of a step that was then
    measured, `host_bytes` what it leaves in host memory, and `textbook` the usual estimate of
    `checkpoint_sequential` in √n segments, for comparison.
    """

    batch: int
    baseline: Reading | None
    planned: Reading | None
    floor_bytes: int = 0
    failure: str = ""
    equal: bool | None = None
    device: str = ""
    promised: Reading | None = None
    host_bytes: int = 0
    textbook: Reading | None = None

    def untouched_fits(self, budget_bytes: int) -> bool:
        """Whether the untouched step is inside a budget."""
        return self.baseline is not None and self.baseline.peak_bytes <= budget_bytes

    @property
    def baseline_sample_seconds(self) -> float:
        """The untouched step's time for each sample; 0 where it is not known."""
        return self.baseline.seconds / self.batch if self.baseline else 0.0

    @property
    def planned_sample_seconds(self) -> float:
        """The planned step's time for each sample; 0 where there is none."""
        return self.planned.seconds / self.batch if self.planned else 0.0


@dataclass(frozen=True, slots=True)
class Sweep(Saved):
    """Trials of several batch sizes under one budget, by rising batch."""

    model: str
    device: str
    budget_bytes: int
    solver: str
    trials: tuple[Trial, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def largest_untouched(self) -> Trial | None:
        """The largest batch tried that fits as the model stands."""
        return max(
            (trial for trial in self.trials if trial.untouched_fits(self.budget_bytes)),
            key=lambda trial: trial.batch,
            default=None,
        )

    @property
    def largest_planned(self) -> Trial | None:
        """The largest batch tried for which a plan fits."""
        return max(
            (trial for trial in self.trials if trial.planned is not None),
            key=lambda trial: trial.batch,
            default=None,
        )

    def __str__(self) -> str:
        """A table: a row a batch size, the untouched step beside the planned one."""
        return "\n".join([_title(self), "", *_table(self), "", *_closing(self)])

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return html_card(_title(self), html_table(_rows(self), left=()), html_lines(_closing(self)))


@dataclass(frozen=True, slots=True)
class MaxBatch(Saved):
    """The largest batch under a budget without a plan and with one; a batch of 0 fits nothing.

    `trials` are all that were tried on the way. `max_slowdown` is the share of time that a sample
    may take longer than in the largest untouched step; None where only memory counted.
    """

    model: str
    device: str
    budget_bytes: int
    solver: str
    untouched_batch: int
    planned_batch: int
    trials: tuple[Trial, ...] = field(repr=False)
    max_slowdown: float | None = None
    notes: tuple[str, ...] = ()

    def trial(self, batch: int) -> Trial | None:
        """The trial of one batch size."""
        return next((trial for trial in self.trials if trial.batch == batch), None)

    @property
    def largest_untouched(self) -> Trial | None:
        """The trial of the largest batch that fits as the model stands."""
        return self.trial(self.untouched_batch)

    @property
    def largest_planned(self) -> Trial | None:
        """The trial of the largest batch for which a plan fits, fast enough."""
        return self.trial(self.planned_batch)

    @property
    def gain(self) -> float:
        """How many times larger the batch is with a plan; 0 where nothing fits without one."""
        return self.planned_batch / self.untouched_batch if self.untouched_batch else 0.0

    @property
    def extra_share(self) -> float | None:
        """How much longer a sample takes at the larger batch; None where one side is not known."""
        before, after = self.largest_untouched, self.largest_planned
        if before is None or after is None or not before.baseline or not after.planned:
            return None
        return after.planned_sample_seconds / before.baseline_sample_seconds - 1

    def __str__(self) -> str:
        """The two batch sizes, what they cost, and the trials that led there."""
        lines = [_title(self), "", *table(list(_largest_rows(self))), ""]
        lines += [f"{len(self.trials)} batch sizes were tried:", *_table(self), "", *_closing(self)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        largest = html_table(list(_largest_rows(self)))
        trials = html_table(_rows(self), left=())
        return html_card(_title(self), largest, trials, html_lines(_closing(self)))


def _title(study: Sweep | MaxBatch) -> str:
    budget = format_bytes(study.budget_bytes)
    return f"{study.model} · {study.device} · budget {budget} · solver {study.solver}"


def _table(study: Sweep | MaxBatch) -> list[str]:
    return table(_rows(study), left=())


def _rows(study: Sweep | MaxBatch) -> list[Sequence[str]]:
    return [_HEADINGS, *(_row(trial, study.budget_bytes) for trial in study.trials)]


def _row(trial: Trial, budget_bytes: int) -> tuple[str, ...]:
    over = "" if trial.untouched_fits(budget_bytes) or trial.baseline is None else " over"
    baseline = _cells(trial.batch, trial.baseline)
    planned = _cells(trial.batch, trial.planned)
    extra = "–"
    if trial.baseline is not None and trial.planned is not None:
        extra = format_change(trial.planned.seconds / trial.baseline.seconds - 1)
    elif trial.floor_bytes:
        planned = (f"none below {format_bytes(trial.floor_bytes)}", "–", "–")
    elif trial.failure:
        planned = ("failed", "–", "–")
    return (str(trial.batch), f"{baseline[0]}{over}", *baseline[1:], *planned, extra)


def _cells(batch: int, reading: Reading | None) -> tuple[str, str, str]:
    if reading is None:
        return "–", "–", "–"
    # The mark of what nobody has measured.
    mark = "" if reading.measured else "~"
    return (
        f"{mark}{format_bytes(reading.peak_bytes)}",
        f"{mark}{format_seconds(reading.seconds)}",
        f"{mark}{format_rate(batch / reading.seconds)}",
    )


def _largest_rows(study: MaxBatch) -> Iterator[tuple[str, ...]]:
    yield ("", "batch", "peak", "step", "samples/s")
    before, after = study.largest_untouched, study.largest_planned
    cells = _cells(study.untouched_batch, before.baseline if before else None)
    yield ("without leanstep", str(study.untouched_batch), *cells)
    cells = _cells(study.planned_batch, after.planned if after else None)
    yield ("with leanstep", str(study.planned_batch), *cells)


def _closing(study: Sweep | MaxBatch) -> Iterator[str]:
    if isinstance(study, MaxBatch) and study.gain and study.extra_share is not None:
        yield f"{study.gain:.2f} × the batch, {format_change(study.extra_share)} time per sample"
    floors = [trial.floor_bytes for trial in study.trials if trial.floor_bytes]
    if floors and all(trial.planned is None for trial in study.trials):
        least = format_budget_up(min(floors))
        yield f"no batch size that was tried fits: raise the budget to {least}"
    if any(is_predicted(trial) for trial in study.trials):
        yield "~ predicted, not measured"
    compared = [trial.equal for trial in study.trials if trial.equal is not None]
    if compared:
        how = "bit for bit" if all(compared) else "some within its own spread from run to run"
        yield f"loss, gradients, buffers and random state: those of the untouched step, {how}"
    yield from _promises(study.trials)
    for trial in study.trials:
        if trial.failure:
            yield f"batch {trial.batch}: {trial.failure}"
    yield from study.notes


def _promises(trials: Sequence[Trial]) -> Iterator[str]:
    """How far what plans said was from what was measured."""
    kept = [(t.promised, t.planned) for t in trials if t.promised and t.planned]
    if kept:
        peaks = [promised.peak_bytes / planned.peak_bytes - 1 for promised, planned in kept]
        times = [promised.seconds / planned.seconds - 1 for promised, planned in kept]
        yield f"predicted against measured: peak {_range(peaks)}, step {_range(times)}"


def _range(shares: Sequence[float]) -> str:
    low, high = format_change(min(shares)), format_change(max(shares))
    return low if low == high else f"{low} to {high}"


def is_predicted(trial: Trial) -> bool:
    """Whether some figure of a trial was not measured."""
    return any(one is not None and not one.measured for one in (trial.baseline, trial.planned))
