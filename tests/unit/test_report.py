"""What a report says, as data: the page, the trace and a notebook only draw it."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from leanstep.errors import InputError
from leanstep.ir import Identity, MaxBatch, Phase, Reading, Sweep, TensorLook, Trial, Verdict
from leanstep.planner import frontier
from leanstep.planner import plan as make_plan
from leanstep.reporters.data import collect, report_data, with_ladder
from leanstep.reporters.html import page
from leanstep.reporters.summary import BAD, GOOD, PLAIN
from leanstep.reporters.terminal import render_html
from leanstep.reporters.trace import trace_events
from leanstep.simulator import memory_curve, simulate
from leanstep.testing import Layer, chain_profile

PROFILE = chain_profile([[Layer(30_000), Layer(20_000)] for _ in range(6)])
PLAN = make_plan(PROFILE, "85%")
SWEEP = Sweep(
    *("bert", "NVIDIA H200 (estimated)", 1 << 33, "optimal"),
    (
        Trial(8, Reading(1 << 32, 0.1, True), Reading(1 << 32, 0.1, True)),
        Trial(16, Reading(1 << 34, 0.2, False), Reading(1 << 33, 0.22, False)),
        Trial(32, Reading(1 << 35, 0.4, False), None, floor_bytes=1 << 34),
    ),
)
VERDICT = Verdict(
    budget_bytes=100,
    baseline_peak_bytes=200,
    predicted_peak_bytes=99,
    measured_peak_bytes=98,
    baseline_seconds=1.0,
    predicted_seconds=1.1,
    measured_seconds=1.2,
    loss_equal=True,
    gradients_equal=True,
    buffers_equal=True,
    random_state_equal=True,
    different=(),
    within_spread=(),
    assumptions=("one batch",),
)


def data_of(*results):
    return report_data(collect(results))


def facts_of(*results):
    return {fact.label: fact for fact in data_of(*results).summary.facts}


def test_the_verdict_comes_first_and_says_how_it_is_known() -> None:
    said = data_of(PROFILE, PLAN, VERDICT).summary

    assert (said.word, said.tone) == ("Fits", GOOD)
    facts = {fact.label: (fact.value, fact.note) for fact in said.facts}
    assert facts["Peak memory"] == ("200 B → 98 B", "-51.0%, measured")
    assert facts["Step time"] == ("1.0 s → 1.2 s", "+20.0%, measured")
    assert facts["Gradients"][0] == "equal, bit for bit"
    assert facts["Predicted against measured"][0] == "+1.0% peak, -8.3% time"
    assert facts["From the optimum"][0].startswith(("at most", "0, proved"))


@pytest.mark.parametrize(
    ("changes", "word", "tone"),
    [
        ({"measured_peak_bytes": 101}, "Over budget", BAD),
        ({"different": ("w",), "gradients_equal": False}, "Not the same numbers", BAD),
        ({"within_spread": ("w",)}, "Fits", GOOD),
        ({"different": ("w",), "inexact_allowed": True}, "Fits", GOOD),
        (
            {"different": ("w",), "inexact_allowed": True, "beyond_tolerance": ("w",)},
            *("Not the same numbers", BAD),
        ),
    ],
)
def test_a_verdict_that_is_not_good_says_so(changes, word, tone) -> None:
    said = data_of(PLAN, replace(VERDICT, **changes)).summary

    assert (said.word, said.tone) == (word, tone)


def test_what_was_not_measured_is_called_predicted() -> None:
    assert data_of(PLAN).summary.word == "Fits, as predicted"
    assert facts_of(PLAN)["Peak memory"].note.endswith("predicted")
    assert facts_of(PLAN)["Gradients"].value == "not compared yet"
    assert data_of(PROFILE).summary.tone == PLAIN


@pytest.mark.parametrize("which", ["before", "after"])
def test_the_columns_of_a_step_are_those_of_the_simulator(which: str) -> None:
    steps = data_of(PROFILE, PLAN).steps
    plan = PLAN if which == "after" else None
    curve, line = getattr(steps, which), simulate(PROFILE, plan)

    assert tuple(map(sum, zip(*curve.layers, strict=True))) == memory_curve(PROFILE, plan).totals
    assert curve.live == tuple(point.live_bytes for point in line.points)
    assert curve.ops == tuple(point.op for point in line.points)
    assert curve.peak == line.peak and len(curve.starts) == len(curve.ops) + 1


def test_what_is_alive_at_an_op_can_be_read_off_the_columns() -> None:
    steps = data_of(PROFILE, PLAN).steps
    storages = steps.storages
    apart = PROFILE.other_bytes + PROFILE.slack_bytes
    for which, shifts in (("before", ()), ("after", steps.shifts)):
        curve = getattr(steps, which)
        for op, position, live in zip(curve.ops, curve.positions, curve.live, strict=True):
            alive = Counter({-2: apart})
            for number, nbytes in enumerate(storages.nbytes):
                if storages.births[number] < position <= storages.deaths[number]:
                    alive[number] += nbytes
            for start, stop, nbytes, storage in shifts:
                is_again = op != position
                late, early = is_again and nbytes > 0, is_again and nbytes < 0
                if start + late <= position < stop + early:
                    alive[storage] += nbytes
            assert all(nbytes >= 0 for nbytes in alive.values())
            # An op that runs again has rebuilt something on top.
            assert alive.total() == live if op == position else alive.total() <= live


def test_peaks_by_category_and_by_owner_add_up() -> None:
    for results in ((PROFILE,), (PLAN,), (PROFILE, PLAN)):
        peaks = data_of(*results).peaks
        for peak in (peaks.before, peaks.after):
            if peak is not None:
                assert sum(peak.groups) == peak.peak_bytes
                assert sum(nbytes for _, nbytes in peak.owners) == peak.peak_bytes
        assert peaks.before.peak_bytes == PROFILE.peak_bytes


def test_activations_wait_from_forward_to_backward() -> None:
    lives = data_of(PROFILE, PLAN).lifetimes.lives
    ops = PROFILE.graph.ops

    assert lives and {life.fate for life in lives} == {"kept", "recomputed"}
    for life in lives:
        assert life.made <= life.last_forward < life.first_backward <= life.last_backward
        assert ops[life.last_forward].phase is Phase.FORWARD
        assert ops[life.first_backward].phase is Phase.BACKWARD
        idle = ops[life.last_forward + 1 : life.first_backward]
        assert life.storage not in {value.storage for op in idle for value in op.reads}
        asked = {PROFILE.graph.saves[save].value.storage: at for save, at in PROFILE.graph.unpacks}
        assert (
            life.first_backward
            <= asked.get(life.storage, life.first_backward)
            <= life.last_backward
        )
    dropped = sum(life.nbytes for life in lives if life.fate == "recomputed")
    assert dropped == sum(decision.dropped_bytes for decision in PLAN.decisions)


def test_decisions_are_a_tree_whose_lines_add_up() -> None:
    rows = data_of(PLAN).decisions
    blocks = [row for row in rows if row.kind == "block"]

    assert len(blocks) == len(PLAN.decisions)
    assert sum(row.dropped_bytes for row in blocks) == sum(
        row.dropped_bytes for row in rows if row.kind == "op"
    )
    assert rows[0].depth == 0
    for above, below in itertools.pairwise(rows):
        assert below.depth <= above.depth + 1
    for place, block in enumerate(rows):
        ops = list(itertools.takewhile(lambda row: row.kind == "op", rows[place + 1 :]))
        if block.kind == "block" and ops:
            assert block.freed_bytes == sum(row.freed_bytes for row in ops)
            assert block.kept_bytes == sum(row.kept_bytes for row in ops)
            assert block.seconds == pytest.approx(sum(row.seconds for row in ops))
    for module in (row for row in rows if row.kind == "module"):
        inside = [row for row in blocks if row.path.startswith(f"{module.path}.")]
        assert module.dropped_bytes == sum(row.dropped_bytes for row in inside)
        assert module.seconds == pytest.approx(sum(row.seconds for row in inside))


def test_the_ladder_has_a_rung_for_the_plan() -> None:
    found = with_ladder(collect([PROFILE, PLAN]))

    assert PLAN.budget_bytes in [rung.budget_bytes for rung in found.ladder.rungs]
    assert with_ladder(collect([PLAN])).ladder is None
    # Nothing to decide: one rung, the untouched step.
    assert len(with_ladder(collect([replace(PROFILE, blocks=())])).ladder.rungs) == 1


def test_a_study_marks_its_largest_batches() -> None:
    study = data_of(SWEEP).study

    assert (study.largest_before, study.largest_after) == (8, 16)
    assert [point.batch for point in study.points] == [8, 16, 32]
    assert facts_of(SWEEP)["Largest batch, planned"].note == "8.0 GiB, predicted"
    assert facts_of(SWEEP)["Gain"].value == "2.00 ×"
    largest = MaxBatch("bert", "cpu", 1 << 33, "optimal", 8, 16, SWEEP.trials)
    assert facts_of(largest)["Gain"].value == "2.00 ×"
    nothing = replace(SWEEP, budget_bytes=1, trials=SWEEP.trials[2:])
    assert data_of(nothing).summary.tone == BAD


def test_sections_without_data_say_what_to_type() -> None:
    assert dict(data_of(SWEEP).missing).keys() == {
        *("steps", "lifetimes", "peaks", "ladder", "decisions")
    }
    assert dict(data_of(PROFILE).missing)["decisions"].startswith("leanstep plan run.json")
    everything = with_ladder(collect([PROFILE, PLAN, SWEEP, frontier(PROFILE, points=2)]))
    assert report_data(everything).missing == ()


def test_results_of_two_models_are_refused() -> None:
    other = replace(PROFILE, model=Identity("Other"))

    with pytest.raises(InputError, match="not of one step: the model is a"):
        collect([other, PLAN])


def test_names_of_a_model_cannot_end_the_script_or_open_a_tag() -> None:
    pytest.importorskip("plotly")
    nasty = Identity("</script><b>{{DATA}}", batch=(TensorLook("", "4×2 float32"),))

    text = page(data_of(replace(PLAN, model=nasty)))

    assert "</script><b>" not in text
    assert "<title>&lt;/script&gt;&lt;b&gt;{{DATA}} · leanstep</title>" in text
    inside = text.split('id="data">')[1].split("</script>")[0]
    assert json.loads(inside)["title"] == nasty.model


def test_a_trace_has_every_op_and_its_memory_for_both_steps(tmp_path: Path) -> None:
    events = list(trace_events(PROFILE, PLAN))

    for process, plan in ((1, None), (2, PLAN)):
        line = simulate(PROFILE, plan)
        own = [event for event in events if event["pid"] == process]
        ops = [event for event in own if event["ph"] == "X" and event["tid"] == 1]
        counters = [event for event in own if event["ph"] == "C"]
        assert len(ops) == len(counters) == len(line.points)
        assert max(sum(event["args"].values()) for event in counters) == line.peak_bytes
        assert sum(event["args"]["runs again"] for event in ops) == sum(
            point.replayed for point in line.points
        )
        phases = [event["name"] for event in own if event["ph"] == "X" and event["tid"] == 2]
        assert phases == ["forward", "backward"]
    modules = [event for event in events if event["ph"] == "X" and event["tid"] == 3]
    assert len(modules) == sum(call.start < call.stop for call in PROFILE.graph.calls)


def test_notebooks_show_the_same_tables_as_a_terminal() -> None:
    curve = frontier(PROFILE, points=2)
    largest = MaxBatch("<b>", "cpu", 1 << 33, "optimal", 8, 16, SWEEP.trials)
    for noun, said in (
        (PROFILE, "peak memory"),
        (PLAN, "proved bound"),
        (curve, "least peak"),
        (SWEEP, "samples/s"),
        (largest, "with leanstep"),
    ):
        text = noun._repr_html_()
        assert said in text and said in str(noun)
        assert text.startswith("<div>") and text.count("<tr>") >= 2
    assert "<b>" not in largest._repr_html_()
    assert "NOT" not in render_html(PROFILE, PLAN, VERDICT)
    assert "bit-equal" in render_html(PROFILE, PLAN, VERDICT)
