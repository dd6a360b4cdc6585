"""What a person reads about a fit: the allocator's pool is shown where there is one."""

from dataclasses import replace

from leanstep.ir import Plan, Profile, Verdict
from leanstep.planner import plan as make_plan
from leanstep.reporters.summary import summarise
from leanstep.reporters.terminal import render
from leanstep.simulator import simulate
from leanstep.testing import Layer, chain_profile
from leanstep.units import format_bytes

GIB = 1 << 30


def fitted() -> tuple[Profile, Plan, Verdict]:
    profile = chain_profile([[Layer(300), Layer(200)], [Layer(100)]])
    plan = make_plan(profile, profile.peak_bytes)
    verdict = Verdict(
        budget_bytes=12 * GIB,
        baseline_peak_bytes=20 * GIB,
        predicted_peak_bytes=10 * GIB,
        measured_peak_bytes=10 * GIB,
        baseline_seconds=0.25,
        predicted_seconds=0.3,
        measured_seconds=0.29,
        loss_equal=True,
        gradients_equal=True,
        buffers_equal=True,
        random_state_equal=True,
        different=(),
        within_spread=(),
        assumptions=("one batch of the shapes given",),
        baseline_reserved_bytes=21 * GIB,
        measured_reserved_bytes=13 * GIB,
    )
    return profile, plan, verdict


def test_what_the_allocator_reserved_stands_below_the_peak():
    table = render(*fitted())

    (row,) = [line for line in table.splitlines() if "reserved for it" in line]
    assert row.split() == ["reserved", "for", "it", "21.0", "GiB", "13.0", "GiB", "-38.1%"]


def test_a_device_without_a_pool_shows_no_such_row():
    profile, plan, verdict = fitted()

    table = render(profile, plan, replace(verdict, measured_reserved_bytes=0))

    assert "reserved" not in table and "PYTORCH_ALLOC_CONF" not in table


def test_gaps_of_more_than_a_tenth_are_named_with_what_would_close_them():
    said = " ".join(render(*fitted()).split())

    assert "the allocator holds 30.0% more than the peak" in said
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said
    assert "give back up to 3.0 GiB" in said


def test_small_gaps_and_segments_that_expand_need_no_advice():
    profile, plan, verdict = fitted()
    small = replace(verdict, measured_reserved_bytes=int(10.9 * GIB))
    expanding = replace(verdict, expandable_segments=True)

    for quiet in (small, expanding):
        table = render(profile, plan, quiet)
        assert "PYTORCH_ALLOC_CONF" not in table and "reserved for it" in table


def test_an_untouched_step_that_does_not_fit_has_no_reserved_bytes():
    profile, plan, verdict = fitted()

    table = render(profile, plan, replace(verdict, baseline_reserved_bytes=0, baseline_fits=False))

    (row,) = [line for line in table.splitlines() if "reserved for it" in line]
    assert row.split() == ["reserved", "for", "it", "–", "13.0", "GiB", "–"]


def test_a_step_that_the_cpu_cannot_issue_in_time_is_told_with_what_would_help():
    profile, plan, verdict = fitted()
    late = replace(verdict, predicted_seconds=0.077, measured_seconds=0.117, issue_seconds=0.115)

    said = " ".join(render(profile, plan, late).split())
    assert "the device waits for the CPU, which takes 115 ms to issue the planned step" in said

    as_promised = replace(late, predicted_seconds=0.115)
    busy = replace(late, issue_seconds=0.04)
    for quiet in (verdict, as_promised, busy):
        assert "waits for the CPU" not in render(profile, plan, quiet)


def test_a_timeline_prints_its_peak_by_category_and_its_time():
    profile = chain_profile([[Layer(400, 1e-3)]] * 2, input_bytes=400)

    said = str(simulate(profile, make_plan(profile, "100%")))

    assert said.splitlines()[0].split() == [
        "peak",
        "memory",
        *format_bytes(profile.peak_bytes).split(),
    ]
    assert "  activation" in said and "run again" not in said and "Category" not in said


def test_repeats_of_a_step_that_are_far_apart_are_told_in_the_table_and_on_the_page():
    profile, plan, verdict = fitted()
    busy = replace(verdict, baseline_spread_seconds=0.05, measured_spread_seconds=0.029)

    said = " ".join(render(profile, plan, busy).split())

    sentence = (
        "step times are uncertain: repeats of the untouched step were 20.0% apart, of the planned "
        "one 10.0%"
    )
    assert sentence in said
    notes = summarise(profile, plan, busy, None, None).notes
    assert any(sentence in note for note in notes)


def test_repeats_that_are_near_each_other_need_no_word():
    profile, plan, verdict = fitted()
    calm = replace(verdict, baseline_spread_seconds=0.02, measured_spread_seconds=0.02)

    for quiet in (verdict, calm):
        assert "uncertain" not in render(profile, plan, quiet)
        assert not any(
            "uncertain" in note for note in summarise(profile, plan, quiet, None, None).notes
        )
