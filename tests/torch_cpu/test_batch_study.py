"""`benchmarks/batch_study.py` in small: what runs on a GPU for minutes runs here in seconds."""

import sys
from pathlib import Path

import pytest
import torch

import leanstep
from leanstep.study.isolation import can_travel
from leanstep.study.trials import Conditions

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def batch_study(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import batch_study

    yield batch_study
    sys.modules.pop("batch_study", None)


def test_what_is_predicted_is_then_measured(batch_study, tmp_path, monkeypatch, capsys):
    predicted, measured = tmp_path / "predicted.jsonl", tmp_path / "measured.jsonl"

    def max_batch(model, *, budget, device, **others):
        assert model(2).batch["tokens"].shape == (2, 16)
        return leanstep.MaxBatch(model.name, device, 6 << 20, "optimal", 12, 20, ())

    monkeypatch.setattr(leanstep, "max_batch", max_batch)
    sizes = ("--size", "16")
    batch_study.main(["predict", "bert-tiny", *sizes, "--json", str(predicted)])
    arguments = (str(predicted), "--device", "cpu", "--seconds", "0.5", *sizes)
    batch_study.main(["measure", *arguments, "--json", str(measured)])

    study = batch_study.study_of(measured.read_text().strip())
    assert study.model == "bert-tiny"
    assert [trial.batch for trial in study.trials][:1] == [12]
    assert all(trial.baseline.measured for trial in study.trials)
    said = capsys.readouterr()
    assert "predicted were 12 and 20" in said.out and "promised" in said.err


def test_images_have_their_channels_last(batch_study):
    model, batch, *_ = batch_study.Model("resnet-tiny", "cpu", 32)(4)

    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_trial_runs_in_a_process_of_its_own(batch_study):
    model = batch_study.Model("bert-tiny", "cpu", 16)
    conditions = Conditions(
        make=model,
        budget_bytes=6 << 20,
        device=None,
        solver="auto",
        engine="auto",
        offload=True,
        exact=True,
        isolated=True,
    )

    assert can_travel(model)
    assert conditions.trial(4).planned.measured


def test_the_two_largest_batches_are_bracketed_by_their_neighbours(batch_study, monkeypatch):
    def sweep(model, batches, *, budget, watch):
        (batch,) = batches
        reading = leanstep.ir.Reading(batch * 100, 0.01 * batch, measured=True)
        fits = batch <= 250
        planned = leanstep.ir.Reading(budget, 0.011 * batch, measured=True) if fits else None
        floor = 0 if fits else batch * 40
        trial = leanstep.ir.Trial(batch, reading, planned, floor_bytes=floor, device="GPU")
        return leanstep.Sweep(model.name, "GPU", budget, "optimal", (trial,))

    monkeypatch.setattr(leanstep, "sweep", sweep)
    predicted = leanstep.MaxBatch("bert", "GPU (estimated)", 10_000, "optimal", 130, 240, ())

    found = batch_study.measured(batch_study.Model("bert", "cpu"), predicted, float("inf"))

    assert (found.untouched_batch, found.planned_batch) == (100, 248)
    assert [trial.batch for trial in found.trials] == [100, 130, 240, 244, 248, 252]
    assert found.extra_share == pytest.approx(0.1)
