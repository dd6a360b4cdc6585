"""Studies of batch sizes: what is predicted, what is measured, and how a trial is kept apart."""

import functools
import os
import signal

import pytest
import torch
from torch import nn

import leanstep
from leanstep import models
from leanstep.errors import InputError
from leanstep.ir import Trial
from leanstep.study import trials
from leanstep.study.isolation import alone, can_travel
from leanstep.study.search import largest

MIB = 1 << 20


def tiny(batch):
    """Four blocks, of which half the memory can be dropped."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    return model, torch.randn(batch, 64), lambda model, batch: model(batch).square().mean()


@pytest.mark.parametrize("answer", [0, 1, 7, 8, 9, 100, 706, 4096])
@pytest.mark.parametrize("known", ["both", "above", "low", "none", "misleading"])
def test_the_search_finds_the_largest_that_fits_in_few_trials(answer: int, known: str) -> None:
    asked = []

    def probe(batch: int) -> tuple[bool, float]:
        asked.append(batch)
        load = {"both": (10 * batch + 5) / (10 * answer + 9), "misleading": (1 + batch) / 9999}
        if batch > answer:
            load |= {"above": (batch + 0.5) / (answer + 1), "low": (batch + 3) / (answer + 1)}
        return batch <= answer, load.get(known, 0.0)

    assert largest(probe, most=4096) == answer
    assert len(asked) == len(set(asked)), "no batch is tried twice"
    assert len(asked) <= {"both": 6, "above": 12, "low": 14}.get(known, 26)


def test_a_predicted_sweep_says_so_and_fits_where_it_says():
    seen = []
    found = leanstep.sweep(
        tiny, [2048, 256, 8192], budget="12MiB", device="h200", watch=seen.append
    )

    assert [trial.batch for trial in found.trials] == [256, 2048, 8192]
    assert list(found.trials) == seen
    assert found.device == "NVIDIA H200 (estimated)"
    for trial in found.trials:
        assert not trial.baseline.measured
        assert trial.planned is None or trial.planned.peak_bytes <= found.budget_bytes
        assert trial.planned is not None or trial.floor_bytes > found.budget_bytes
    assert found.largest_planned.batch > found.largest_untouched.batch


def test_a_measured_sweep_has_the_same_numbers_and_the_true_peak():
    found = leanstep.sweep(tiny, [4, 2048], budget="12MiB")

    assert found.model == "tiny"
    assert found.device.startswith("CPU")
    small, large = found.trials
    assert small.untouched_fits(12 * MIB) and not large.untouched_fits(12 * MIB)
    assert large.baseline.measured and large.planned.measured
    assert large.planned.peak_bytes <= 12 * MIB < large.baseline.peak_bytes
    assert small.equal and large.equal


def test_a_budget_that_no_plan_meets_leaves_the_floor():
    (trial,) = leanstep.sweep(tiny, [512], budget="1MiB").trials

    assert trial.planned is None and trial.floor_bytes > 1 * MIB
    assert trial.baseline.measured
    assert leanstep.sweep(tiny, [512], budget=trial.floor_bytes).trials[0].planned is not None


def test_the_largest_batch_fits_and_the_next_one_does_not():
    found = leanstep.max_batch(tiny, budget="16MiB", device="h200")

    assert 0 < found.untouched_batch < found.planned_batch
    best = found.trial(found.planned_batch)
    assert best.planned.peak_bytes <= 16 * MIB
    assert found.trial(found.planned_batch + 1).planned is None
    assert found.trial(found.untouched_batch).untouched_fits(16 * MIB)
    assert not found.trial(found.untouched_batch + 1).untouched_fits(16 * MIB)
    assert found.gain == found.planned_batch / found.untouched_batch


def test_a_limit_on_time_keeps_the_batch_smaller(monkeypatch):
    def trial(conditions, batch):
        # Twice the budget's worth of rows costs 50 % more time, and so on.
        extra = max(0.0, batch / 100 - 1) / 2
        baseline = leanstep.ir.Reading(batch * MIB, batch * 0.01, measured=False)
        planned = leanstep.ir.Reading(100 * MIB, batch * 0.01 * (1 + extra), measured=False)
        return Trial(batch, baseline, planned if batch <= 400 else None)

    monkeypatch.setattr(trials, "predicted", trial)
    study = functools.partial(leanstep.max_batch, "bert-tiny", budget="100MiB", device="h200")

    assert study().planned_batch == 400
    assert study(max_slowdown=0.25).planned_batch == 150
    assert study(max_slowdown="25%").max_slowdown == 0.25
    assert study().untouched_batch == 100


def in_line(conditions, batch):
    """A step of 1 MiB a row; plans save nine tenths of it."""
    reading = leanstep.ir.Reading(batch * MIB, batch * 0.01, measured=False)
    fits = batch * MIB // 10 <= conditions.budget_bytes
    return Trial(batch, reading, reading if fits else None, floor_bytes=0 if fits else MIB)


@pytest.mark.parametrize(
    ("budget", "batches"),
    [
        ("100MiB", [8, 16, 32, 64, 128, 256, 512, 1024]),
        ("1000MiB", [8, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
        ("300KiB", [2, 4, 8]),
        ("1KiB", [1, 2, 4, 8]),
    ],
)
def test_without_batch_sizes_powers_of_two_are_tried_until_none_fits(budget, batches, monkeypatch):
    monkeypatch.setattr(trials, "predicted", in_line)

    found = leanstep.sweep("bert-tiny", budget=budget, device="h200")

    assert [trial.batch for trial in found.trials] == batches


def test_the_textbook_stands_beside_each_trial():
    def make(batch):
        return models.build("bert-tiny", batch=batch)

    (trial,) = leanstep.sweep(make, [64], budget="1GiB", device="h200").trials

    # Of four blocks it saves nothing, of eight it does.
    assert trial.textbook is None
    (trial,) = leanstep.sweep("resnet-tiny", [64], budget="1GiB", device="h200").trials
    assert trial.textbook.peak_bytes < trial.baseline.peak_bytes
    assert 1 < trial.textbook.seconds / trial.baseline.seconds < 1.5
    assert not trial.textbook.measured


def test_a_measured_trial_has_what_was_promised():
    (trial,) = leanstep.sweep(tiny, [2048], budget="12MiB").trials

    assert not trial.promised.measured and trial.planned.measured
    assert trial.planned.peak_bytes <= trial.promised.peak_bytes <= 12 * MIB


def test_a_trial_that_runs_out_of_memory_is_a_result():
    def make(batch):
        raise torch.OutOfMemoryError("no room\nlong story")

    (trial,) = leanstep.sweep(make, [4], budget="3MiB").trials

    assert trial.failure == "OutOfMemoryError: no room"
    assert "batch 4: OutOfMemoryError: no room" in str(leanstep.sweep(make, [4], budget="3MiB"))


def killed(number):
    os.kill(os.getpid(), signal.SIGKILL)


def refused(number):
    raise InputError(f"not {number}")


def test_what_happens_alone_stays_there():
    assert alone(killed, 3) is None
    with pytest.raises(InputError, match="not 3"):
        alone(refused, 3)


def test_a_trial_of_its_own_process_gives_the_same_kind_of_result():
    target = models.find_target("bert-tiny")
    conditions = trials.Conditions(
        make=target,
        budget_bytes=12 * MIB,
        device=None,
        solver="auto",
        engine="auto",
        offload=True,
        exact=True,
        isolated=True,
    )

    trial = conditions.trial(4)

    assert trial.planned.measured and trial.equal


def test_only_what_another_process_can_import_travels(monkeypatch):
    assert can_travel(models.find_target("bert-tiny"))
    assert can_travel(abs)
    assert not can_travel(lambda batch: None)
    monkeypatch.setattr(tiny, "__module__", "__main__")
    assert not can_travel(tiny)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batches": []}, "1 or more"),
        ({"batches": [0]}, "1 or more"),
        ({"batches": [1], "budget": "60%"}, "share of the unplanned peak"),
        ({"batches": [1], "budget": "2 furlongs"}, "furlongs"),
        ({"batches": [1], "device": "h2000"}, "did you mean 'h200'"),
        ({"batches": [1], "solver": "optimall"}, "did you mean 'optimal'"),
        ({"batches": [1], "engine": "inductor"}, "measured on their device"),
    ],
)
def test_what_cannot_be_studied_is_refused_before_any_trial(arguments, said):
    given = {"budget": "1GiB", "device": "h200"} | arguments

    with pytest.raises(InputError, match=said):
        leanstep.sweep("bert-tiny", **given)


def test_without_a_gpu_or_a_budget_the_user_is_asked_for_one():
    with pytest.raises(InputError, match="write a size"):
        leanstep.sweep(tiny, [4])
