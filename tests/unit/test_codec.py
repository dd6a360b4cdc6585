"""A noun that was saved is the same when it is read; what is no such file is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from leanstep.errors import GraphError, InputError, LeanstepError
from leanstep.ir import (
    Cost,
    Decision,
    Engine,
    Fact,
    Identity,
    Plan,
    Profile,
    TensorLook,
    Value,
    Verdict,
    codec,
)
from leanstep.testing import Layer, chain_profile

DECISION = Decision(
    path="layers.3",
    occurrence=1,
    children=("0", "2"),
    engine=Engine.REPLAY,
    drop=("attention.query::aten.addmm.default#0:0", "aten.gelu.default#0:0"),
    kept_bytes=12,
    dropped_bytes=2**40,
    extra_seconds=0.1,
    why="fits",
)
PLAN = Plan(
    solver="optimal",
    budget_bytes=2**34,
    peak_bytes=2**33 + 1,
    unplanned_peak_bytes=2**35,
    movable_bytes=7,
    step_seconds=1 / 3,
    extra_seconds=0.1,
    bound_seconds=1e-300,
    decisions=(DECISION, replace(DECISION, engine=Engine.UNTOUCHED, drop=(), children=())),
    model=Identity("Net", 5, (TensorLook("0.weight", "2×2 float32"),), evaluating=("0",)),
    torch_version="2.13.0",
    notes=("größer als gedacht",),
)
VERDICT = Verdict(
    budget_bytes=3,
    baseline_peak_bytes=4,
    predicted_peak_bytes=3,
    measured_peak_bytes=2,
    baseline_seconds=0.25,
    predicted_seconds=0.3,
    measured_seconds=0.29,
    loss_equal=True,
    gradients_equal=False,
    buffers_equal=True,
    random_state_equal=True,
    different=("gradient of layers.0.weight",),
    within_spread=("the loss",),
    assumptions=("one batch of the shapes given",),
)


def small_profile() -> Profile:
    blocks = [[Layer(300, facts=(Fact.RANDOM,)), Layer(200)], [Layer(100, saves_input=False)]]
    return replace(chain_profile(blocks), notes=("a note", "another"), gradients_kept=True)


@pytest.mark.parametrize("noun", [small_profile(), PLAN, VERDICT], ids=lambda n: type(n).__name__)
def test_what_was_saved_is_equal_when_it_is_read(
    noun: Profile | Plan | Verdict, tmp_path: Path
) -> None:
    for path in (tmp_path / "noun.json", str(tmp_path / "noun.json")):
        noun.save(path)

        assert type(noun).load(path) == noun


def test_values_and_enums_come_back_as_what_they_were(tmp_path: Path) -> None:
    small_profile().save(tmp_path / "profile.json")
    PLAN.save(tmp_path / "plan.json")

    graph = Profile.load(tmp_path / "profile.json").graph
    assert type(graph.ops[0].writes[0]) is Value
    assert graph.ops[0].facts[0] is Fact.RANDOM
    assert Plan.load(tmp_path / "plan.json").decisions[0].engine is Engine.REPLAY


def test_a_verdict_from_before_its_times_had_a_spread_is_read(tmp_path: Path) -> None:
    whole = json.loads(VERDICT.to_json())
    for name in ("baseline_spread_seconds", "measured_spread_seconds"):
        del whole["content"][name]
    (tmp_path / "old.json").write_text(json.dumps(whole))

    old = Verdict.load(tmp_path / "old.json")

    assert old == VERDICT and not old.has_uncertain_time


def test_the_file_is_one_line_of_plain_ascii(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")

    text = (tmp_path / "plan.json").read_bytes().decode("ascii")
    assert text.count("\n") == 1 and json.loads(text)["leanstep"] == "Plan"


GARBAGE = {
    "empty": b"",
    "not JSON": b"budget: 16GiB\n",
    "cut": b'{"leanstep":"Plan","format":1,"content":{"solver":"opt',
    "a picture": b"\x89PNG\r\n\x1a\n\xff\xfe",
    "a list": b"[1, 2]",
    "a number": b"7",
    "another's": b'{"weights": [1.5]}',
    "null": b"null",
}


@pytest.mark.parametrize("noun", [Profile, Plan, Verdict])
@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_file_that_leanstep_did_not_write_is_refused_in_one_sentence(
    noun: type[Profile] | type[Plan] | type[Verdict], content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)

    with pytest.raises(InputError, match="is not a file that leanstep wrote") as caught:
        noun.load(path)

    assert_is_one_sentence_about(caught.value, path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    said = "holds a Plan, not a Profile: leanstep profile TARGET -o run.json makes one"
    with pytest.raises(InputError, match=said) as caught:
        Profile.load(path)

    assert_is_one_sentence_about(caught.value, path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    change(path, ["format"], codec.FORMAT_VERSION + 1)

    with pytest.raises(InputError, match="has format 3, this leanstep reads 2: make it anew"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["content"], None),
        (["content"], []),
        (["content", "decisions"], 3),
        (["content", "decisions"], [{}]),
        (["content", "decisions", 0, "engine"], "magic"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_sentence(
    keys: list[str | int], value: object, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    change(path, keys, value)

    with pytest.raises(InputError, match="is damaged") as caught:
        Plan.load(path)

    assert_is_one_sentence_about(caught.value, path)


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        (["graph", "ops", 1, "reads", 0], [99, 0], "does not exist"),
        (["graph", "storages", 2, "death"], -5, "is born at op"),
        (["blocks", 0, "saves", 0], 99, "does not exist"),
    ],
)
def test_an_edited_profile_that_breaks_a_rule_is_refused(
    keys: list[str | int], value: object, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    small_profile().save(path)
    change(path, ["content", *keys], value)

    with pytest.raises(GraphError, match=rule) as caught:
        Profile.load(path)

    assert "\n" not in str(caught.value)


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "plan.json")


def test_costs_are_read_with_their_numbers(tmp_path: Path) -> None:
    profile = replace(small_profile(), costs=(Cost("aten.add", 1e-9),) * 9)
    profile.save(tmp_path / "profile.json")

    assert Profile.load(tmp_path / "profile.json").costs == profile.costs


def change(path: Path, keys: list[str | int], value: object) -> None:
    """Set one entry of a saved file."""
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("name", ["a list", "a number", "another's", "null"])
def test_other_json_is_refused_in_words_not_in_pythons(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(GARBAGE[name])

    with pytest.raises(InputError, match="wrote: it does not say what it holds"):
        Profile.load(path)


def assert_is_one_sentence_about(error: LeanstepError, path: Path) -> None:
    assert str(path) in str(error)
    assert "\n" not in str(error)
