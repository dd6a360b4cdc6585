"""A copy to the host is priced where forward waits for the CPU: the profile says so to the plan."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import leanstep
from leanstep import api, models
from leanstep.condense import condense
from leanstep.ir import Link
from leanstep.planner import corrections
from leanstep.simulator import simulate
from leanstep.step.seconds import StepTime
from leanstep.testing import Layer, chain_profile

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

MIB = 1 << 20
ISSUE_SECONDS = 0.5


@pytest.fixture(params=[True, False], ids=["waits", "does not"])
def waits(request, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let steps be issued in half a second, and forward wait for it or not."""
    took = StepTime(1.0, ISSUE_SECONDS)
    monkeypatch.setattr(api, "median_step_time", lambda *_: took)
    monkeypatch.setattr(api, "forward_waits_for_cpu", lambda *_: request.param)
    return request.param


def profile_of(**choices: str) -> leanstep.Profile:
    torch.manual_seed(1)
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=4)
    return leanstep.profile(model, batch, loss, optimizer=optimizer, **choices)


def test_a_profile_counts_copies_where_its_forward_waits(waits: bool):
    profile = profile_of()

    expected = profile.copy_seconds_at(ISSUE_SECONDS) if waits else 0.0
    assert profile.copy_seconds == expected and profile.issue_seconds == 0.0
    assert profile.copy_seconds_at(ISSUE_SECONDS) > 0


@pytest.mark.usefixtures("without_compiler")
def test_a_compiled_step_counts_them_in_ops_of_the_eager_one(waits: bool, monkeypatch):
    monkeypatch.setattr("leanstep.forms.compiled.MOST_FORMS", 2)
    eager, profile = profile_of(), profile_of(engine="inductor")

    assert len(profile.graph.ops) < len(eager.graph.ops)
    assert profile.copy_seconds == (eager.copy_seconds_at(ISSUE_SECONDS) if waits else 0.0)


def test_a_step_that_is_late_on_the_whole_counts_its_copies(monkeypatch):
    monkeypatch.setattr(api, "median_step_time", lambda *_: StepTime(1.0, 0.99))
    monkeypatch.setattr(api, "forward_waits_for_cpu", lambda *_: False)

    profile = profile_of()

    assert profile.issue_seconds == 0.99
    assert profile.copy_seconds == profile.copy_seconds_at(0.99)


def test_what_a_measured_step_teaches_is_for_copies_too():
    layers = (Layer(4 * MIB, 2e-3), Layer(16 * MIB, 5e-4), Layer(16 * MIB, 4e-3))
    profile = replace(
        chain_profile([layers] * 8, input_bytes=4 * MIB, head_bytes=4 * MIB),
        link=Link(to_host=2e9, from_host=2e9, host_bytes=1 << 40),
    )
    plan = leanstep.plan(profile, "60%")
    assert any(decision.offload for decision in plan.decisions)
    measured = SimpleNamespace(
        waits_for_cpu=True, measured_seconds=3.0, baseline_seconds=1.0, issue_seconds=2.9
    )

    slow = corrections.with_cpu_seconds(profile, plan, measured)

    assert slow.copy_seconds == slow.copy_seconds_at(slow.issue_seconds) > 0
    assert simulate(slow, plan).extra_seconds == pytest.approx(2.0, rel=0.01)


def test_the_price_of_the_eager_step_is_not_that_of_the_compiled_one():
    profile = replace(profile_of(), copy_seconds=1.0)

    assert condense(profile, {}, ()).copy_seconds == 0.0
