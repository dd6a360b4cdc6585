"""The largest batch under a budget, with and without leanstep: predicted anywhere, then measured.

    python benchmarks/batch_study.py predict --device h200 --budget 24GiB --json predicted.jsonl
    python benchmarks/batch_study.py measure predicted.jsonl --json measured.jsonl --seconds 170
    python benchmarks/batch_study.py measure predicted.jsonl --known measured.jsonl    # goes on

`predict` needs no GPU. `measure` takes minutes, not hours, since it begins where the prediction
ends: the two largest batches are tried first, then, while time is left, their neighbours 2 % up or
down, or further where more was over. Each trial is a process of its own. Models compute in bf16,
image models have their channels last, and AdamW is fused where the device can.

    python benchmarks/batch_study.py predict bert-tiny --budget 40MiB --json predicted.jsonl
    python benchmarks/batch_study.py measure predicted.jsonl --device cpu      # a try without a GPU
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import leanstep
from leanstep import models
from leanstep.ir.codec import from_plain

MODELS = ("resnet152", "bert-large")
# What a sample may take longer than in the largest untouched step.
MAX_SLOWDOWN = 0.2
NEIGHBOUR = 0.02


@dataclass(frozen=True)
class Model:
    """A built-in model as people train it; `device` None is one that need not be there."""

    name: str
    device: str | None = None
    size: int | None = None

    @property
    def __name__(self):
        return self.name

    def __call__(self, batch):
        has_images = self.name.startswith(("resnet", "unet"))
        sizes = {"image" if has_images else "seq": self.size} if self.size else {}
        is_fused = self.device in (None, "cuda")
        built = models.build(
            self.name,
            batch=batch,
            device=self.device or "cpu",
            autocast="bf16",
            fused=is_fused,
            **sizes,
        )
        if not has_images:
            return built
        last = {"memory_format": torch.channels_last}
        return built._replace(model=built.model.to(**last), batch=built.batch.to(**last))


def predict(args):
    for name in args.models or MODELS:
        found = leanstep.max_batch(
            Model(name, size=args.size),
            budget=args.budget,
            device=args.device,
            max_slowdown=args.max_slowdown,
            watch=say_trial,
        )
        yield found


def measure(args):
    predicted = studies_in(args.predicted)
    known = {study.model: study.trials for study in studies_in(args.known)} if args.known else {}
    share = args.seconds / max(1, len(predicted))
    for number, study in enumerate(predicted, start=1):
        deadline = args.started + number * share
        model = Model(study.model, args.device, args.size)
        yield measured(model, study, deadline, known.get(study.model, ()))


def measured(model, predicted, deadline, known=()):
    """A study like the predicted one, of as many trials as there is time for."""
    trials = {trial.batch: trial for trial in known}

    def tried(batch):
        if batch not in trials:
            sweep = leanstep.sweep(model, [batch], budget=limit, watch=say_trial)
            (trials[batch],) = sweep.trials
        return trials[batch]

    limit = predicted.budget_bytes
    untouched = Bracket(predicted.untouched_batch)
    planned = Bracket(predicted.planned_batch)
    took = 0.0
    while time.monotonic() + took < deadline and not (untouched.is_closed and planned.is_closed):
        start = time.monotonic()
        bracket = min((b for b in (untouched, planned) if not b.is_closed), key=lambda b: b.trials)
        trial = tried(bracket.next)
        if bracket is untouched:
            need = trial.baseline.peak_bytes if trial.baseline else 0
            untouched.add(trial.untouched_fits(limit), need / limit)
        else:
            is_fast = is_fast_enough(trial, tried(untouched.fits or untouched.next))
            planned.add(is_fast, trial.floor_bytes / limit)
        took = max(took, time.monotonic() - start)
    rows = [trials[batch] for batch in sorted(trials)]
    return leanstep.MaxBatch(
        model=predicted.model,
        device=next((trial.device for trial in rows if trial.device), "unknown"),
        budget_bytes=limit,
        solver=predicted.solver,
        untouched_batch=untouched.fits,
        planned_batch=planned.fits,
        trials=tuple(rows),
        max_slowdown=MAX_SLOWDOWN,
        notes=(f"predicted were {predicted.untouched_batch} and {predicted.planned_batch}",),
    )


def is_fast_enough(trial, untouched):
    if trial.planned is None or untouched.baseline is None:
        return False
    return trial.planned_sample_seconds <= (1 + MAX_SLOWDOWN) * untouched.baseline_sample_seconds


class Bracket:
    """The largest batch that fits, between neighbours that differ by a few per cent."""

    def __init__(self, start):
        self.next, self.fits, self.too_many, self.trials = max(1, start), 0, 0, 0

    @property
    def is_closed(self):
        return bool(self.fits and self.too_many) or self.next < 1

    def add(self, is_fitting, load):
        """Take in what came of the next batch; a load above 1 says how much it was over."""
        self.trials += 1
        step = max(1, int(NEIGHBOUR * self.next))
        if is_fitting:
            self.fits = self.next
            self.next += step
        else:
            self.too_many = self.next
            self.next = min(self.next - step, int(self.next / max(1.0, load)))


def studies_in(path):
    return [study_of(line) for line in path.read_text().splitlines()]


def study_of(line):
    return from_plain(leanstep.MaxBatch, json.loads(line)["content"])


def say_trial(trial):
    print(f"  batch {trial.batch}: {trial.failure or _said(trial)}", file=sys.stderr, flush=True)


def _said(trial):
    def cell(reading):
        if reading is None:
            return "none"
        return f"{reading.peak_bytes / 2**30:.2f} GiB, {1000 * reading.seconds:.0f} ms"

    promised = f" (promised {cell(trial.promised)})" if trial.promised else ""
    return f"untouched {cell(trial.baseline)}; planned {cell(trial.planned)}{promised}"


def parser():
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = top.add_subparsers(required=True)
    first = commands.add_parser("predict", help="for a device that need not be here")
    first.add_argument("models", nargs="*")
    first.add_argument("--budget", default="24GiB")
    first.add_argument("--device", default="h200")
    first.add_argument("--max-slowdown", default=MAX_SLOWDOWN)
    first.set_defaults(studies=predict)
    second = commands.add_parser("measure", help="here, beginning with what was predicted")
    second.add_argument("predicted", type=Path)
    second.add_argument("--known", type=Path, help="go on where an earlier call has ended")
    second.add_argument("--device", default="cuda")
    second.add_argument("--seconds", type=float, default=170.0)
    second.set_defaults(studies=measure)
    for command in (first, second):
        command.add_argument("--size", type=int, help="tokens in a row, or the images' side")
        command.add_argument("--json", type=Path, help="append the studies to this file")
    return top


def main(arguments=None):
    args = parser().parse_args(arguments)
    args.started = time.monotonic()
    for study in args.studies(args):
        print(study, "\n")
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(study.to_json() + "\n")
    print(f"{time.monotonic() - args.started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    # By its name, so that other processes can import what they are to run.
    import batch_study

    batch_study.main()
