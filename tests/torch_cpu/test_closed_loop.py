"""What a measured step teaches: a budget that was wasted or missed is planned for again."""

import dataclasses
import itertools

import pytest
import torch

import leanstep
from leanstep import api, models, verifier
from leanstep.api import is_launch_bound
from leanstep.engines import attach
from leanstep.engines.attach import is_attached
from leanstep.fitting import attempts, fitter
from leanstep.ir import Profile
from leanstep.simulator import simulate
from leanstep.step.seconds import StepTime

NAME, SIZES = "gpt2-tiny", {"batch": 8}


def profile_with(monkeypatch: pytest.MonkeyPatch, excess: float) -> Profile:
    """Let fit believe that the step needs more than it does, by a share of its peak."""
    model, batch, loss, optimizer = models.build(NAME, **SIZES)
    true = leanstep.profile(model, batch, loss, optimizer=optimizer)
    more = int(excess * true.peak_bytes)

    def too_high(step, engine, *, exact):
        found = api.profile_for(step, engine, exact=exact)
        return dataclasses.replace(
            found, slack_bytes=found.slack_bytes + more, peak_bytes=found.peak_bytes + more
        )

    monkeypatch.setattr(fitter, "profile_for", too_high)
    return true


def test_a_wasted_budget_is_planned_for_again(monkeypatch: pytest.MonkeyPatch):
    true = profile_with(monkeypatch, 0.1)
    budget = int(0.8 * true.peak_bytes)
    first = leanstep.plan(
        dataclasses.replace(
            true,
            slack_bytes=true.slack_bytes + int(0.1 * true.peak_bytes),
            peak_bytes=true.peak_bytes + int(0.1 * true.peak_bytes),
        ),
        budget,
    )
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)

    assert fitted.plan.extra_seconds < first.extra_seconds
    assert fitted.verdict.within_budget and fitted.verdict.exact
    assert fitted.profile.peak_bytes >= fitted.verdict.baseline_peak_bytes
    assert fitted.verdict.predicted_peak_bytes >= fitted.verdict.measured_peak_bytes


def test_the_first_plan_stays_where_the_second_misses_the_budget(monkeypatch: pytest.MonkeyPatch):
    true = profile_with(monkeypatch, 0.1)
    budget = int(0.8 * true.peak_bytes)
    plans = []
    judge = attempts.judge

    def second_is_over(step, applied, before):
        plans.append(applied.plan)
        verdict = judge(step, applied, before)
        if len(plans) == 1:
            return verdict
        return dataclasses.replace(verdict, measured_peak_bytes=budget + 1)

    monkeypatch.setattr(attempts, "judge", second_is_over)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)

    assert len(plans) == 2 and plans[1].extra_seconds < plans[0].extra_seconds
    assert fitted.plan == plans[0] and fitted.applied.plan == plans[0]
    assert fitted.verdict.within_budget
    with pytest.raises(leanstep.LeanstepError, match="already fitted"):
        leanstep.fit(model, batch, loss, optimizer=optimizer)
    fitted.remove()
    assert not any(map(is_attached, model.modules()))


def test_the_first_plan_stays_where_the_second_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch):
    true = profile_with(monkeypatch, 0.1)
    plans = []
    rehearse = attempts.engines.rehearse

    def second_runs_out(step, applied):
        plans.append(applied.plan)
        if len(plans) == 2:
            raise torch.OutOfMemoryError("no room")
        return rehearse(step, applied)

    monkeypatch.setattr(attempts.engines, "rehearse", second_runs_out)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(
        model, batch, loss, optimizer=optimizer, budget=int(0.8 * true.peak_bytes)
    )

    assert len(plans) == 2 and fitted.plan == plans[0]
    assert any(map(is_attached, model.modules()))
    fitted.remove()
    assert not any(map(is_attached, model.modules()))


def test_an_account_that_is_right_is_left_alone():
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="80%")

    assert fitted.profile.slack_bytes >= 0


@pytest.mark.parametrize(
    ("issue", "ops", "step", "expected"),
    [
        (0.0, 0.5, 1.0, False),  # a CPU, or not measured
        (0.3, 0.95, 1.0, False),  # the device is busy, the CPU far ahead
        (0.98, 0.5, 1.0, True),  # the device idles while ops are issued
        (0.98, 0.97, 1.0, False),  # the code waits for the device
        (0.5, 0.5, 1.0, False),  # something else takes the time
    ],
)
def test_a_step_is_launch_bound_where_the_device_waits_for_the_cpu(issue, ops, step, expected):
    assert is_launch_bound(issue, ops, step) is expected


def test_a_missed_budget_is_planned_for_until_it_is_held(monkeypatch: pytest.MonkeyPatch):
    model, batch, loss, optimizer = models.build(NAME, **SIZES)
    true = leanstep.profile(model, batch, loss, optimizer=optimizer)
    budget = int(0.8 * true.peak_bytes)
    plans, judge = [], attempts.judge

    def over_twice(step, applied, before):
        plans.append(applied.plan)
        verdict = judge(step, applied, before)
        # Sizes that follow the data: what the second step shows is more than the first showed.
        over = budget + 5000 * len(plans)
        return verdict if len(plans) > 2 else dataclasses.replace(verdict, measured_peak_bytes=over)

    monkeypatch.setattr(attempts, "judge", over_twice)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)

    assert len(plans) == 3
    assert fitted.verdict.within_budget and fitted.plan == plans[2]


def waiting_for_the_cpu(monkeypatch: pytest.MonkeyPatch, seconds_a_call) -> list:
    """Let planned steps be measured to take the CPU's time for every block that is changed."""
    plans, judge = [], attempts.judge

    def slow(step, applied, before):
        plans.append(applied.plan)
        verdict = judge(step, applied, before)
        extra = seconds_a_call(len(plans)) * len(applied.plan.changed)
        measured = verdict.baseline_seconds + extra
        promised = verdict.baseline_seconds + applied.plan.extra_seconds
        return dataclasses.replace(
            verdict,
            measured_seconds=measured,
            issue_seconds=measured,
            predicted_seconds=promised,
        )

    monkeypatch.setattr(attempts, "judge", slow)
    return plans


def test_a_step_that_waits_for_the_cpu_is_planned_again_with_less_for_it_to_do(monkeypatch):
    plans = waiting_for_the_cpu(monkeypatch, lambda _: 1.0)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="90%")

    first, second = plans
    assert len(second.changed) < len(first.changed)
    assert fitted.plan == second == fitted.applied.plan
    assert fitted.verdict.within_budget and fitted.verdict.exact
    # With the time that was found for the CPU, the first plan is predicted as it was measured.
    measured = 1.0 * len(first.changed)
    assert simulate(fitted.profile, first).extra_seconds == pytest.approx(measured, rel=0.01)


def test_the_first_plan_stays_where_the_second_waits_as_long(monkeypatch):
    plans = waiting_for_the_cpu(monkeypatch, lambda number: float(number**5))
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="90%")

    assert len(plans) == 2 and fitted.plan == plans[0] == fitted.applied.plan
    fitted.remove()
    assert not any(map(is_attached, model.modules()))


def test_a_step_that_is_slow_without_a_plan_has_nothing_to_plan_again(monkeypatch):
    judge = attempts.judge

    def slow(step, applied, before):
        verdict = judge(step, applied, before)
        measured = 2 * verdict.baseline_seconds
        return dataclasses.replace(verdict, measured_seconds=measured, issue_seconds=measured)

    monkeypatch.setattr(attempts, "judge", slow)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="100%")

    assert fitted.verdict.waits_for_cpu and not fitted.plan.changed


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_in_planning_again_leaves_no_plan_in_force(monkeypatch, error):
    def interrupted(*_):
        raise error

    monkeypatch.setattr(attempts, "with_cpu_seconds", interrupted)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    with pytest.raises(error):
        leanstep.fit(model, batch, loss, optimizer=optimizer, budget="90%")

    assert not any(map(is_attached, model.modules()))


def test_a_second_plan_is_not_kept_because_the_whole_machine_was_faster_in_its_race(monkeypatch):
    plans = waiting_for_the_cpu(monkeypatch, lambda number: float(number**5))
    judge = attempts.judge

    def faster_machine(step, applied, before):
        verdict = judge(step, applied, before)
        share = 1e-6 if len(plans) == 2 else 1.0
        return dataclasses.replace(
            verdict,
            baseline_seconds=share * verdict.baseline_seconds,
            measured_seconds=share * verdict.measured_seconds,
        )

    monkeypatch.setattr(attempts, "judge", faster_machine)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="90%")

    assert len(plans) == 2 and fitted.plan == plans[0] == fitted.applied.plan


def test_a_second_plan_that_is_wrong_is_not_kept_and_said(monkeypatch):
    plans = waiting_for_the_cpu(monkeypatch, lambda _: 1.0)
    judge = attempts.judge

    def second_is_wrong(step, applied, before):
        verdict = judge(step, applied, before)
        wrong = ("gradient of x",) if len(plans) == 2 else ()
        return dataclasses.replace(verdict, different=wrong)

    monkeypatch.setattr(attempts, "judge", second_is_wrong)
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    with pytest.warns(UserWarning, match="keeps its first plan"):
        fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="90%")

    assert len(plans) == 2 and fitted.plan == plans[0] == fitted.applied.plan
    assert fitted.verdict.exact


def test_a_planned_step_is_timed_where_no_call_of_it_is_recorded(monkeypatch):
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    def num_recorded() -> int:
        runners = [attach.runner_of(module) for module in model.modules() if is_attached(module)]
        return runners[0].rounds.num_recorded if runners else 0

    def timed(step, device):
        before = num_recorded()
        step()
        return StepTime(10.0 if num_recorded() > before else 1.0)

    monkeypatch.setattr(verifier, "step_time", timed)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="80%")

    assert fitted.plan.changed and num_recorded()
    assert fitted.verdict.measured_seconds == fitted.verdict.baseline_seconds == 1.0


def test_the_verdict_says_how_far_the_repeats_of_a_step_were_apart(monkeypatch):
    # The untouched step and the planned one in turns: a machine that others use meanwhile.
    times = itertools.cycle([1.0, 2.0, 1.1, 6.0, 1.5, 3.0])

    def timed(step, device):
        step()
        return StepTime(next(times))

    monkeypatch.setattr(verifier, "step_time", timed)
    monkeypatch.setattr(verifier, "_unrecorded_time", lambda step, _: timed(step.run, step.device))
    model, batch, loss, optimizer = models.build(NAME, **SIZES)

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="80%")

    verdict = fitted.verdict
    assert (verdict.baseline_seconds, verdict.measured_seconds) == (1.1, 3.0)
    assert (verdict.baseline_spread_seconds, verdict.measured_spread_seconds) == (0.5, 4.0)
    assert "step times are uncertain" in str(fitted)
