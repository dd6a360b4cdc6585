"""Studies on a GPU: trials in processes of their own, and memory that really ends."""

import pytest

torch = pytest.importorskip("torch")

import too_large  # noqa: E402

import leanstep  # noqa: E402

pytestmark = pytest.mark.gpu

GIB = 1 << 30


def test_each_trial_is_measured_elsewhere():
    before = torch.cuda.memory_allocated()
    found = leanstep.sweep("bert-base", [4, 8], budget="3GiB")

    assert "NVIDIA" in found.device and not found.notes
    for trial in found.trials:
        assert not trial.failure
        assert trial.planned is None or trial.planned.measured
        assert trial.planned is None or trial.planned.peak_bytes <= 3 * GIB
    assert torch.cuda.memory_allocated() == before


def test_a_trial_that_runs_out_of_memory_costs_nothing_but_time():
    (trial,) = leanstep.sweep(too_large.make, [1], budget="auto").trials

    assert trial.failure.startswith("OutOfMemoryError")


def test_the_largest_batch_runs_and_the_next_one_does_not():
    found = leanstep.max_batch("bert-base", budget="4GiB", start=4)

    assert 0 < found.untouched_batch < found.planned_batch
    assert found.trial(found.planned_batch).planned.peak_bytes <= 4 * GIB
    assert found.trial(found.planned_batch).equal is not None
