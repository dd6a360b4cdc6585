"""A plan explains itself, alone: its numbers add up, and it says the same after a file."""

from dataclasses import replace
from pathlib import Path

import pytest

from leanstep.errors import BudgetError, PlanError
from leanstep.ir import Category, Decision, Engine, OpRow, Peak, Phase, Plan, Profile
from leanstep.ir.explanation import group
from leanstep.ir.text import names_in_a_row, table
from leanstep.planner import plan
from leanstep.planner.explain import advice
from leanstep.simulator import base_levels, memory_curve, simulate
from leanstep.testing import Layer, chain_profile, random_profile

SEEDS = range(24)


def equal_blocks(num_blocks: int = 6) -> Profile:
    layers = [Layer(400, 2e-3), Layer(1600, 5e-4), Layer(1600, 4e-3), Layer(400, 1e-3)]
    return chain_profile([layers] * num_blocks, input_bytes=400)


def lean(profile: Profile, share: str = "75%", engine: str = "auto") -> Plan:
    try:
        return plan(profile, share, engine=engine)
    except BudgetError as error:
        return plan(profile, error.floor_bytes, engine=engine)


@pytest.mark.parametrize("engine", ["auto", "module"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_freed_adds_up_to_the_difference_between_the_steps(seed: int, engine: str) -> None:
    profile = random_profile(seed, num_blocks=4)
    found = lean(profile, engine=engine)
    line, untouched = simulate(profile, found), simulate(profile)
    bases = base_levels(profile)
    point, old = line.points[line.peak], untouched.points[untouched.peak]

    freed = sum(decision.peak_freed_bytes for decision in found.decisions)
    freed_there = sum(decision.unplanned_peak_freed_bytes for decision in found.decisions)

    assert freed == bases[point.position] - point.live_bytes
    (there,) = [p for p in line.points if p.op == old.op and not p.replayed]
    assert freed_there == old.live_bytes - there.live_bytes
    assert (found.peak.other_live_bytes, found.unplanned_peak.other_live_bytes) == (
        bases[point.position],
        there.live_bytes,
    )


@pytest.mark.parametrize("engine", ["auto", "module"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_and_holders_add_up(seed: int, engine: str) -> None:
    profile = random_profile(seed, num_blocks=4)
    found = lean(profile, engine=engine)

    for decision in found.decisions:
        assert sum(row.kept_bytes for row in decision.rows) == decision.kept_bytes
        assert sum(row.dropped_bytes for row in decision.rows) == decision.dropped_bytes
        assert sum(row.seconds for row in decision.rows) <= decision.extra_seconds + 1e-12
    for peak in (found.peak, found.unplanned_peak):
        assert sum(holder.nbytes for holder in peak.holders) == peak.peak_bytes
    assert found.peak.peak_bytes == found.peak_bytes
    assert found.unplanned_peak.peak_bytes == found.unplanned_peak_bytes
    expected = dict(simulate(profile, found).at_peak)
    at_peak = {c: n for c, n in found.peak.by_category.items() if n}
    assert at_peak == {c: n for c, n in expected.items() if n}
    assert all(min(levels) >= 0 for _, levels in memory_curve(profile, found).layers)


def test_a_kept_plan_frees_nothing_and_moves_nothing() -> None:
    explained = plan(equal_blocks(), "100%").explain()

    assert not explained.peak_moved
    assert {row.peak_freed_bytes for member in explained.groups for row in member.rows} == {0}
    assert explained.planned.place == explained.unplanned.place


def test_a_plan_from_a_file_explains_the_same(tmp_path: Path) -> None:
    found = lean(equal_blocks())
    found.save(tmp_path / "plan.json")

    read = Plan.load(tmp_path / "plan.json")

    assert read == found
    assert read.explain() == found.explain()
    assert str(read.explain()) == str(found.explain())
    assert read.peak.holders[0].category in tuple(Category)
    assert type(read.decisions[0].rows[0]) is OpRow


def test_equal_decisions_are_one_row_with_their_sums() -> None:
    found = lean(equal_blocks(8), "60%")
    explained = found.explain()

    assert sum(len(member.names) for member in explained.groups) == len(found.decisions)
    assert len(explained.groups) < len(found.decisions)
    for name in ("kept_bytes", "dropped_bytes", "peak_freed_bytes"):
        whole = sum(getattr(decision, name) for decision in found.decisions)
        assert sum(getattr(member, name) for member in explained.groups) == whole
    text = str(explained)
    assert "…" in text and "calls): replay" in text and "layer#1" in text
    assert len(text.splitlines()) < 40


def test_the_text_says_where_and_why() -> None:
    found = lean(equal_blocks(), "70%")
    text = str(found.explain())

    assert f"at {found.peak.op} in {found.peak.phase.value}" in text
    assert "to lower it: " in text and "model.py:" in text
    assert all(len(line) <= 140 for line in text.splitlines())


def test_a_plan_without_rows_still_prints() -> None:
    bare = replace(lean(equal_blocks()), peak=None, unplanned_peak=None)
    decisions = tuple(replace(decision, rows=()) for decision in bare.decisions)

    assert "layers.0" in str(replace(bare, decisions=decisions).explain())


PEAK = Peak("aten.mm.default", Phase.BACKWARD, False, "a.b", "a", "m.py:1", 100, 140, 90, ())


@pytest.mark.parametrize(
    ("changes", "spare", "words"),
    [
        ({}, 1024, "other blocks keep 1.0 KiB there"),
        ({}, 0, "a's own backward needs"),
        ({"is_replayed": True}, 0, "a rebuilds what it dropped here"),
        ({"block": ""}, 0, "is in no block, so no plan changes the 40 B"),
        ({"phase": Phase.OPTIMIZER}, 0, "use fused=True or foreach=False"),
        ({"phase": Phase.OPTIMIZER, "op": "aten._fused_adamw_.default"}, 0, "frees none"),
    ],
)
def test_advice_names_what_would_lower_the_peak(changes: dict, spare: int, words: str) -> None:
    assert words in advice(replace(PEAK, **changes), spare)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["a", "b", "c"], "a … c (3 calls)"),
        (["a", "c", "d", "e"], "a, c … e (4 calls)"),
        (["a", "c", "e", "g"], "a, c, …, g (4 calls)"),
    ],
)
def test_names_in_a_row_are_told_by_their_ends(names: list[str], text: str) -> None:
    assert names_in_a_row(names, list("abcdefg")) == text


def test_a_table_has_its_columns_under_one_another() -> None:
    assert table([("a", "10"), ("bcd", "5")]) == ["a    10", "bcd   5"]


DROPS = Decision("a", 0, (), Engine.REPLAY, ("x::op#0:0",), 0, 8, 0.0, "")


@pytest.mark.parametrize(
    ("decisions", "sentence"),
    [
        ((DROPS, DROPS), "decides twice about a"),
        ((replace(DROPS, engine=Engine.MODULE),), "names values to drop in a, which is run by"),
        ((replace(DROPS, rows=(OpRow("op#0", "", 0, 8, 0.0, 0, 0),)),), "does not explain it"),
    ],
)
def test_a_file_whose_decisions_contradict_one_another_is_refused(
    decisions: tuple[Decision, ...], sentence: str, tmp_path: Path
) -> None:
    replace(lean(equal_blocks()), decisions=decisions).save(tmp_path / "plan.json")

    with pytest.raises(PlanError, match=sentence):
        Plan.load(tmp_path / "plan.json")


def test_groups_keep_the_order_of_the_calls() -> None:
    kept = Decision("b", 0, (), Engine.UNTOUCHED, (), 4, 0, 0.0, "")
    decisions = (DROPS, kept, replace(DROPS, path="c"), replace(kept, path="d"))

    assert [member.names for member in group(decisions)] == [("a", "c"), ("b", "d")]
