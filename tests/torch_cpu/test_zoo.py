"""A few of the zoo's architectures, one of each kind; `benchmarks/zoo.py` has them all."""

from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

# Shared layers, a cache in every call, experts chosen by the data, a state space, two stacks, two
# towers, batch norm, masks drawn by NumPy.
FEW = ("albert", "gpt2", "qwen2-moe", "mamba2", "t5", "clip", "mobilenet-v2", "wav2vec2")


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    import zoo

    return zoo


@pytest.mark.parametrize("name", FEW)
def test_steps_are_those_of_an_untouched_twin(zoo: ModuleType, name: str) -> None:
    row = zoo.examine(zoo.CATALOGUE[name])

    assert row["result"] == "exact", row
    assert zoo.saved_share(row) > 0.05


def test_an_architecture_this_transformers_lacks_is_a_row(zoo: ModuleType) -> None:
    entry = zoo.Entry("none", "text", "NoSuchModel", dict)

    row = zoo.examine(entry)

    assert row["result"] == "missing"


def test_a_model_that_does_not_train_untouched_is_told_apart_from_a_crash(zoo: ModuleType) -> None:
    entry = zoo.Entry("broken", "text", "BertForMaskedLM", dict, {"hidden_size": 7})

    assert zoo.examine(entry)["result"] == "does not train"


def test_a_crash_is_a_row_with_its_trace(zoo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args, **kwargs) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(zoo.leanstep, "profile", fails)

    row = zoo.examine(zoo.CATALOGUE["gpt2"])

    assert row["result"] == "crash"
    assert "Traceback" in row["trace"]


def test_other_bits_are_named(zoo: ModuleType) -> None:
    old = [{"the loss": torch.tensor([0.0, float("nan")]), "gradient of w": None}]
    new = [{"the loss": torch.tensor([-0.0, float("nan")]), "gradient of w": None}]

    assert zoo.compare(old, old) == []
    assert zoo.compare(old, new) == ["the loss in step 0"]
