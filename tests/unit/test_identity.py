"""Two identities say in words what is not the same."""

from dataclasses import replace

import pytest

from leanstep.ir import Identity, TensorLook
from leanstep.ir.graph import relative_path, scoped_name

NET = Identity(
    model="Net",
    num_elements=20,
    parameters=(TensorLook("a.weight", "4×4 float32"), TensorLook("a.bias", "4 float32")),
    batch=(TensorLook("input_ids", "2×8 int64"),),
    evaluating=(),
)


def test_it_reads_as_a_few_words() -> None:
    assert str(NET) == "Net, 2 tensors, 20 parameters"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "Other"}, "the model is a Net in the plan and a Other here"),
        (
            {"parameters": (TensorLook("a.weight", "2×4 float32"), NET.parameters[1])},
            "parameter a.weight is 4×4 float32 in the plan and 2×4 float32 here",
        ),
        (
            {"parameters": NET.parameters[:1]},
            "parameter a.bias is 4 float32 in the plan and missing here",
        ),
        (
            {"parameters": (*NET.parameters, TensorLook("b.bias", "4 float16"))},
            "parameter b.bias is 4 float16 here and missing in the plan",
        ),
        (
            {"batch": (TensorLook("input_ids", "1×8 int64"),)},
            "the batch's input_ids is 2×8 int64 in the plan and 1×8 int64 here",
        ),
    ],
)
def test_a_difference_is_named(changes: dict, sentence: str) -> None:
    assert NET.differences(replace(NET, **changes)) == [sentence]


def test_a_batch_without_names_is_the_batch() -> None:
    small, large = (replace(NET, batch=(TensorLook("", f"{n}×8 float32"),)) for n in (1, 2))

    assert small.differences(large) == ["the batch is 1×8 float32 in the plan and 2×8 float32 here"]


def test_equal_models_and_a_missing_batch_differ_in_nothing() -> None:
    assert NET.differences(NET) == NET.differences(replace(NET, batch=())) == []
    assert NET.mode_difference(NET) is None


def test_the_mode_is_told_apart() -> None:
    evaluating = replace(NET, evaluating=("", "a"))

    assert NET.mode_difference(evaluating) == "the model trains in the plan and evaluates here"
    assert evaluating.mode_difference(NET) == "the model evaluates in the plan and trains here"


@pytest.mark.parametrize(
    ("path", "block", "seen"),
    [
        ("layers.3.mlp.up", "layers.3", "mlp.up"),
        ("layers.3", "layers.3", ""),
        ("layers.31.mlp", "layers.3", "/layers.31.mlp"),
        ("norm", "layers.3", "/norm"),
        ("layers.3.mlp", "", "layers.3.mlp"),
        ("", "", ""),
    ],
)
def test_a_path_is_seen_from_its_block(path: str, block: str, seen: str) -> None:
    assert relative_path(path, block) == seen


def test_an_operator_is_named_with_its_module() -> None:
    assert scoped_name("mlp.up", "aten.mm.default") == "mlp.up::aten.mm.default"
    assert scoped_name("", "aten.mm.default") == "aten.mm.default"
