"""Figures: the curve that is drawn is the simulated step, and a file comes out."""

from pathlib import Path

import pytest

from leanstep.errors import InputError
from leanstep.ir import Category, MaxBatch, Phase, Reading, Sweep, Trial, Verdict
from leanstep.planner import frontier
from leanstep.planner import plan as make_plan
from leanstep.reporters import report
from leanstep.reporters.figures import draw_sweep
from leanstep.simulator import memory_curve, simulate
from leanstep.testing import Layer, chain_profile

PROFILE = chain_profile([[Layer(30_000), Layer(20_000)] for _ in range(6)])
SWEEP = Sweep(
    "bert",
    "NVIDIA H200 (estimated)",
    1 << 33,
    "optimal",
    (
        Trial(
            8,
            Reading(1 << 32, 0.1, False),
            Reading(1 << 32, 0.1, False),
            textbook=Reading(1 << 31, 0.12, False),
        ),
        Trial(16, Reading(1 << 34, 0.2, False), None, floor_bytes=1 << 35),
    ),
)
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml"}


def smaller_plan():
    return make_plan(PROFILE, "90%")


@pytest.mark.parametrize("is_planned", [False, True])
def test_categories_add_up_to_the_simulated_level_at_every_op(is_planned: bool) -> None:
    plan = smaller_plan() if is_planned else None

    curve, line = memory_curve(PROFILE, plan), simulate(PROFILE, plan)

    assert curve.totals == tuple(point.peak_bytes for point in line.points)
    assert max(curve.totals) == line.peak_bytes
    at_peak = {key: levels[line.peak] for key, levels in curve.layers if levels[line.peak]}
    assert at_peak == dict(line.at_peak)
    assert all(min(levels) >= 0 for _, levels in curve.layers)
    seconds = sum(point.seconds for point in line.points)
    assert curve.starts[-1] == pytest.approx(seconds)


def test_an_op_that_runs_again_belongs_to_backward() -> None:
    plan = smaller_plan()
    line = simulate(PROFILE, plan)
    again = [place for place, point in enumerate(line.points) if point.replayed]

    assert again
    assert {memory_curve(PROFILE, plan).phases[place] for place in again} == {Phase.BACKWARD}


@pytest.mark.parametrize("columns", [1, 3, 10_000])
def test_a_thinned_curve_keeps_the_peak_the_time_and_the_phases(columns: int) -> None:
    curve = memory_curve(PROFILE)

    thin = curve.thinned(columns)

    assert max(thin.totals) == max(curve.totals)
    assert (thin.starts[0], thin.starts[-1]) == (curve.starts[0], curve.starts[-1])
    assert len(thin.starts) == len(thin.phases) + 1 == len(thin.totals) + 1
    assert len(thin.phases) <= 3 * columns
    assert set(thin.phases) == set(curve.phases)
    assert thin.phase_starts == curve.phase_starts
    assert set(thin.totals) <= set(curve.totals)


def test_the_plan_takes_activations_away() -> None:
    before = dict(memory_curve(PROFILE).layers)[Category.ACTIVATION]
    after = dict(memory_curve(PROFILE, smaller_plan()).layers)[Category.ACTIVATION]

    assert max(after) < max(before)


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_every_figure_is_drawn_into_a_file(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = frontier(PROFILE, points=3)
    for name, results, figure in (
        ("before", PROFILE, None),
        ("both", [PROFILE, smaller_plan()], None),
        ("peak", [PROFILE, smaller_plan()], "peak"),
        ("lifetimes", [smaller_plan(), PROFILE], "lifetimes"),
        ("plan", smaller_plan(), None),
        ("frontier", curve, None),
        ("sweep", SWEEP, None),
    ):
        path = tmp_path / f"{name}{ending}"
        report(results, path, figure=figure)
        assert path.read_bytes().startswith(MAGIC[ending])


def test_a_drawn_study_has_a_line_for_each_side_the_textbook_and_the_largest_batches(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    largest = MaxBatch("bert", "NVIDIA H200", 1 << 33, "optimal", 8, 8, SWEEP.trials)

    for study in (SWEEP, largest):
        draw_sweep(study, tmp_path / "study.svg")

        drawn = (tmp_path / "study.svg").read_text()
        for said in ("untouched", "planned", "√n segments, as textbooks estimate", "budget", " 8"):
            assert f"<!-- {said} -->" in drawn


def test_an_unknown_ending_or_result_is_refused(tmp_path: Path) -> None:
    verdict = Verdict(*[1] * 4, *[1.0] * 3, *[True] * 4, (), (), ())
    for results, name, figure, said in (
        (PROFILE, "memory.bmp", None, r"end it in \.html, \.png, \.svg, \.json"),
        (PROFILE, "memory.png", "memroy", "did you mean 'memory'"),
        (smaller_plan(), "memory.png", "memory", "nothing to draw memory of: give a profile"),
        (PROFILE, "batches.svg", "batches", r"draw batches of: give a sweep \(leanstep sweep\)"),
        (verdict, "verdict.svg", None, "a verdict has no figure: give a profile"),
        (SWEEP, "trace.json", None, "a trace is of a recorded step"),
        ([PROFILE, PROFILE], "report.html", None, "one profile, and two were given"),
        ([], "report.html", None, "a report is of something"),
        (smaller_plan().explain(), "report.html", None, "no place for Explanation"),
    ):
        with pytest.raises(InputError, match=said):
            report(results, tmp_path / name, figure=figure)
    assert not list(tmp_path.iterdir())
