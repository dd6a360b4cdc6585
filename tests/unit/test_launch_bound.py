"""Where the device waits for the CPU, a replay costs what issuing it takes."""

from dataclasses import replace

import pytest

from leanstep.errors import BudgetError
from leanstep.ir import Profile
from leanstep.planner import plan as make_plan
from leanstep.simulator import simulate
from leanstep.testing import Layer, chain_profile


def device_bound() -> Profile:
    return chain_profile([[Layer(10**6), Layer(10**6), Layer(9)]] * 4)


def floor_bytes(profile: Profile) -> int:
    with pytest.raises(BudgetError) as caught:
        make_plan(profile, 1)
    return caught.value.floor_bytes


def test_without_issue_seconds_replays_cost_device_time_alone():
    profile = device_bound()
    plan = make_plan(profile, floor_bytes(profile))

    line = simulate(profile, plan)

    replayed = sum(point.seconds for point in line.points if point.replayed)
    assert profile.launch_seconds == profile.call_seconds == 0.0
    assert line.extra_seconds == pytest.approx(replayed)


def test_a_launch_bound_step_pays_for_issuing_and_for_its_calls():
    profile = device_bound()
    slow = replace(profile, issue_seconds=100 * profile.step_seconds)
    budget = floor_bytes(profile)

    cheap, dear = make_plan(profile, budget), make_plan(slow, budget)
    line = simulate(slow, dear)

    assert dear.extra_seconds > cheap.extra_seconds
    # The planner counts in grains of the step, and adds what a region costs.
    assert dear.extra_seconds == pytest.approx(line.extra_seconds, rel=0.1)
    replays = [point for point in line.points if point.replayed]
    assert replays and all(point.seconds >= slow.launch_seconds for point in replays)
    assert dear.peak_bytes <= budget and dear.extra_seconds >= dear.bound_seconds


def test_an_op_that_takes_the_device_longer_than_the_cpu_costs_device_time():
    profile = device_bound()
    slow = replace(profile, issue_seconds=1e-10)
    plan = make_plan(profile, floor_bytes(profile))

    assert simulate(slow, plan).extra_seconds == pytest.approx(
        simulate(profile, plan).extra_seconds
    )


def test_a_step_that_waits_for_the_cpu_waits_for_its_copies_too():
    profile = chain_profile([[Layer(100, 1e-3)] * 2] * 2, input_bytes=100, head_bytes=100)

    slow = profile.waiting_for_cpu(1.0)

    assert slow.issue_seconds == 1.0 and not profile.copy_seconds
    assert slow.copy_seconds == profile.copy_seconds_at(1.0) > slow.launch_seconds > 0
