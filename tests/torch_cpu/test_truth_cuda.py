"""What is asked of CUDA's allocator, with a stand-in for it: there is no GPU here."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from leanstep import truth
from leanstep.step import seconds
from leanstep.step.training import TrainingStep


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the calls in order, and answer with figures that tell them apart."""
    calls: list[str] = []

    def answer(name, value):
        def call(*_):
            calls.append(name)
            return value

        monkeypatch.setattr(torch.cuda, name, call)

    for name, value in {
        "empty_cache": None,
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 1000,
        "max_memory_allocated": 1700,
        "max_memory_reserved": 2048,
        "memory_snapshot": [{"is_expandable": False}, {"is_expandable": True}],
    }.items():
        answer(name, value)
    return calls


def test_the_pool_is_emptied_before_the_warm_step_and_read_after_the_measured_one(allocator):
    peak = truth.measured_peak(lambda: allocator.append("step"), torch.device("cuda"))

    assert peak == truth.Peak(rise_bytes=700, reserved_bytes=2048)
    order = [name for name in allocator if name != "synchronize"]
    assert order == [
        *("empty_cache", "step", "memory_allocated", "reset_peak_memory_stats", "step"),
        *("max_memory_allocated", "max_memory_reserved"),
    ]


def test_issuing_is_timed_without_waiting_for_the_device(allocator):
    took = seconds.median_step_time(
        lambda: allocator.append("step"), torch.device("cuda"), repeats=2
    )

    assert 0 < took.issue_seconds < took.seconds < 1
    assert allocator == ["synchronize", "step", "synchronize"] * 2


def test_a_cpu_reserves_nothing_and_issues_nothing():
    cpu = torch.device("cpu")

    assert truth.measured_peak(lambda: torch.ones(100), cpu).reserved_bytes == 0
    took = seconds.median_step_time(lambda: None, cpu)
    assert took.issue_seconds == 0.0 < took.seconds
    assert not truth.has_expandable_segments(cpu)


def test_segments_that_expand_are_seen(allocator):
    assert truth.has_expandable_segments(torch.device("cuda"))


class Watch:
    """A stand-in for an event: the device needs so long for what comes between two of them.

    The CPU's clock goes on when a forward runs, and stands still otherwise: machines are moody.
    """

    milliseconds = 0.0
    cpu_seconds = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        pass

    def elapsed_time(self, other: "Watch") -> float:
        return self.milliseconds


@pytest.fixture
def forwards(allocator, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Let every forward take the CPU 20 ms; and note each."""
    monkeypatch.setattr(torch.cuda, "Event", Watch)
    monkeypatch.setattr(Watch, "cpu_seconds", 0.0)
    clock = SimpleNamespace(perf_counter=lambda: Watch.cpu_seconds)
    monkeypatch.setattr(seconds, "time", clock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)

    def set_mode(mode):
        allocator.append(mode)
        warnings.warn("does not yet detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return []


def step_of(forwards: list[None], *, waits_for_number: bool = False) -> TrainingStep:
    def loss(model, batch):
        forwards.append(None)
        Watch.cpu_seconds += 0.02
        if waits_for_number:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return model(batch).sum()

    return TrainingStep(torch.nn.Linear(3, 3), torch.ones(3), loss)


TOOK = seconds.StepTime(0.2, 0.1)


@pytest.mark.parametrize(("milliseconds", "waits"), [(20.0, True), (200.0, False)])
def test_forward_waits_for_the_cpu_where_the_device_is_done_when_all_is_issued(
    allocator, forwards, monkeypatch, milliseconds, waits
):
    monkeypatch.setattr(Watch, "milliseconds", milliseconds)
    step = step_of(forwards)

    assert seconds.forward_waits_for_cpu(step, TOOK, num_launches=100) is waits
    assert len(forwards) == 3 and step.model.weight.grad is None
    # What torch was asked to tell of is as it was.
    assert [mode for mode in allocator if mode in ("warn", 0)] == ["warn", 0] * 3


def test_a_forward_that_waits_for_a_number_does_not_wait_for_the_cpu(forwards, monkeypatch):
    monkeypatch.setattr(Watch, "milliseconds", 20.0)
    step = step_of(forwards, waits_for_number=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not seconds.forward_waits_for_cpu(step, TOOK, num_launches=100)


def test_a_cpu_that_waits_for_room_in_the_queue_is_not_late(forwards, monkeypatch):
    # The device needs 24 ms for 6,000 launches, of which the last thousand are issued at once.
    monkeypatch.setattr(Watch, "milliseconds", 24.0)

    assert seconds.forward_waits_for_cpu(step_of(forwards), TOOK, num_launches=1000)
    assert not seconds.forward_waits_for_cpu(step_of(forwards), TOOK, num_launches=6000)


def test_a_cpu_waits_for_nobody():
    step = TrainingStep(torch.nn.Linear(3, 3), torch.ones(3), None)

    assert not seconds.forward_waits_for_cpu(step, seconds.StepTime(0.2, 0.0), num_launches=100)
