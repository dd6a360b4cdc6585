"""Settings in files: leanstep's own, pyproject's, and VISSL's as it is."""

import copy

import pytest
import torch
from torch import nn

import leanstep
from leanstep import models
from leanstep.config import Config, read_config
from leanstep.errors import BudgetError, InputError

VISSL = """\
# @package _global_
config:
  VERBOSE: False
  DATA:
    NUM_DATALOADER_WORKERS: 5
  MODEL:
    TRUNK:
      NAME: regnet
    ACTIVATION_CHECKPOINTING:
      USE_ACTIVATION_CHECKPOINTING: True
      NUM_ACTIVATION_CHECKPOINTING_SPLITS: {splits}
  DISTRIBUTED:
    BACKEND: nccl
    NUM_NODES: 1
    MANUAL_GRADIENT_REDUCTION: True
{more}"""


def write(folder, name: str, text: str):
    path = folder / name
    path.write_text(text)
    return path


def test_all_three_files_say_the_same(tmp_path) -> None:
    own = write(tmp_path, "leanstep.yaml", "splits: 8\nmanual_gradient_reduction: true\n")
    tool = "[project]\nname='x'\n[tool.leanstep]\nsplits = 8\nmanual_gradient_reduction = true\n"
    project = write(tmp_path, "pyproject.toml", tool)
    vissl = write(tmp_path, "vissl.yaml", VISSL.format(splits=8, more=""))

    expected = Config(splits=8, manual_gradient_reduction=True)

    assert read_config(own) == read_config(project) == read_config(vissl) == expected


def test_vissl_without_its_head_switched_off_or_with_a_budget(tmp_path) -> None:
    bare = "MODEL:\n  ACTIVATION_CHECKPOINTING:\n    USE_ACTIVATION_CHECKPOINTING: False\n"
    assert read_config(write(tmp_path, "off.yaml", bare)).splits == 1
    assert read_config(write(tmp_path, "on.yaml", bare.replace("False", "True"))).splits == 2
    assert not read_config(tmp_path / "on.yaml").manual_gradient_reduction
    text = VISSL.format(splits="auto", more="  LEANSTEP:\n    budget: 90%\n")
    found = read_config(write(tmp_path, "auto.yaml", text))
    assert (found.splits, found.budget) == ("auto", "90%")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buget: 1GiB", "no key is called 'buget': did you mean 'budget'"),
        ("wq: red", "no key is called 'wq': known are budget, solver"),
        ("budget: many", "bad.yaml: "),
        ("solver: optimum\nbudget: 60%", "did you mean 'optimal'"),
        ("engine: jit", "no engine is called 'jit'"),
        ("splits: 0", "not a number from 1 on"),
        ("splits: true", "not a number from 1 on"),
        ("splits: auto", "add one"),
        ("splits: 3\nsolver: optimal", "leave out solver"),
        ("verify: maybe", "not true or false"),
        ("overrides: keep", "not a section"),
        ("- budget", "not keys with values"),
        ("budget: [", "cannot be read"),
        (
            "MODEL:\n  ACTIVATION_CHECKPOINTING:\n    USE_ACTIVATION_CHECKPOINT: True",
            "did you mean 'USE_ACTIVATION_CHECKPOINTING'",
        ),
        ("DISTRIBUTED:\n  MANUAL_GRADIENTS_REDUCTION: True", "write 'MANUAL_GRADIENT_REDUCTION'"),
        (VISSL.format(splits="auto", more=""), "add one"),
    ],
)
def test_what_means_nothing_is_refused_with_what_is_near(tmp_path, text, message) -> None:
    with pytest.raises(InputError, match=message):
        read_config(write(tmp_path, "bad.yaml", text))


def test_missing_file_and_missing_table_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    with pytest.raises(InputError, match=r"no table \[tool.leanstep\]"):
        read_config(write(tmp_path, "pyproject.toml", "[project]\nname='x'\n"))


def gradients(model, batch, loss) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss(model, batch).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_vissl_file_cuts_a_model_as_it_says_with_the_same_gradients(tmp_path) -> None:
    model, batch, loss, optimizer = models.build("resnet-tiny", batch=8, image=64, optimizer="sgd")
    twin = copy.deepcopy(model)
    path = write(tmp_path, "vissl.yaml", VISSL.format(splits=4, more=""))

    fitted = leanstep.from_config(model, path, batch=batch, loss=loss, optimizer=optimizer)

    assert fitted.plan.solver == "uniform"
    assert fitted.plan.changed
    assert fitted.verdict is not None and fitted.verdict.gradients_equal
    pairs = zip(gradients(twin, batch, loss), gradients(model, batch, loss), strict=True)
    assert all(torch.equal(expected, got) for expected, got in pairs)
    fitted.remove()


def test_auto_splits_fit_the_budget_and_off_changes_nothing(tmp_path) -> None:
    layers = [layer for _ in range(9) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, batch = nn.Sequential(*layers), torch.randn(512, 64)

    def loss(model, batch):
        return model(batch).square().mean()

    path = write(tmp_path, "auto.yaml", "splits: auto\nbudget: 75%\nverify: false\n")
    fitted = leanstep.from_config(model, path, batch=batch, loss=loss)
    assert fitted.plan.changed
    assert fitted.plan.peak_bytes <= fitted.plan.budget_bytes < fitted.profile.peak_bytes
    fitted.remove()

    off = write(tmp_path, "off.yaml", "splits: 1\n")
    assert not leanstep.from_config(model, off, batch=batch, loss=loss).plan.changed
    with pytest.raises(BudgetError):
        small = write(tmp_path, "small.yaml", "splits: auto\nbudget: 1000\n")
        leanstep.from_config(copy.deepcopy(model), small, batch=batch, loss=loss)
