"""Marks and overrides: a user's word holds whatever the budget, and is named when it costs it."""

import copy

import pytest
import torch
from torch import nn

import leanstep
from leanstep import models
from leanstep.errors import BudgetError, InputError
from leanstep.ir import Engine, Plan


class TwoParts(nn.Module):
    """Two different parts in a row, as in OneFlow's guide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 64))
        self.second = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs)).mean()


def dropped_bytes(plan: Plan, path: str) -> int:
    return sum(d.dropped_bytes for d in plan.decisions if d.path == path)


def test_marked_parts_are_blocks_and_recomputed_without_need() -> None:
    torch.manual_seed(0)
    model, batch = TwoParts(), torch.randn(64, 32)
    leanstep.recompute(model.first)
    leanstep.keep(model.second)

    fitted = leanstep.fit(model, batch, budget="110%")

    assert {d.path for d in fitted.plan.changed} == {"first"}
    assert dropped_bytes(fitted.plan, "first") >= 2 * 64 * 256 * 4
    assert fitted.verdict is not None and fitted.verdict.gradients_equal
    assert fitted.verdict.measured_peak_bytes <= fitted.verdict.budget_bytes


def test_mark_changes_nothing_in_the_module_and_can_be_taken_back() -> None:
    model = TwoParts()
    before = dict(vars(model.first))

    assert leanstep.recompute(model.first) is model.first
    assert vars(model.first) == before
    assert leanstep.profile(model, torch.randn(4, 32)).marks == (("first", "recompute"),)
    assert leanstep.profile(copy.deepcopy(model), torch.randn(4, 32)).marks == ()

    leanstep.recompute(model.first, False)
    assert leanstep.profile(model, torch.randn(4, 32)).marks == ()


def test_mark_is_for_modules() -> None:
    with pytest.raises(InputError, match="not for Tensor"):
        leanstep.keep(torch.zeros(1))  # type: ignore[type-var]


@pytest.mark.parametrize("solver", ["optimal", "uniform", "keep_all"])
def test_overrides_are_honoured_by_every_solver_at_a_budget_that_needs_none(solver: str) -> None:
    model, batch, loss, optimizer = models.build("bert-tiny")
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer)

    found = leanstep.plan(
        profile, "150%", solver=solver, overrides={"layers.0": "recompute", "*::aten.mm": "keep"}
    )

    changed = [d for d in found.decisions if d.engine is not Engine.UNTOUCHED]
    assert [d.path for d in changed] == ["layers.0"]
    assert not any("aten.mm" in key for d in changed for key in d.drop)


def test_kept_op_is_never_dropped_and_the_numbers_stay_equal() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")

    fitted = leanstep.fit(
        model,
        batch,
        loss,
        optimizer=optimizer,
        budget="85%",
        overrides={"layers.*::aten.gelu": "keep"},
    )

    assert fitted.plan.changed
    assert not any("aten.gelu.default" in key for d in fitted.plan.changed for key in d.drop)
    assert fitted.verdict is not None and fitted.verdict.gradients_equal


def test_override_that_makes_the_budget_unreachable_is_named() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer)
    with pytest.raises(BudgetError) as plain:
        leanstep.plan(profile, 1)
    assert plain.value.overrides == ()

    with pytest.raises(BudgetError) as caught:
        leanstep.plan(
            profile,
            plain.value.floor_bytes,
            overrides={"layers.*": "keep", "head": "keep"},
        )

    assert caught.value.overrides == ("'layers.*': 'keep'",)
    assert "with the override 'layers.*': 'keep'" in str(caught.value)
    assert leanstep.plan(profile, caught.value.floor_bytes, overrides={"layers.*": "keep"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layer.0": "keep"}, "matches nothing in this model; did you mean 'layers"),
        ({"layers.0::aten.add_mm": "keep"}, "did you mean 'aten.addmm'"),
        ({"layers.0": "drop"}, "use 'keep' or 'recompute'"),
    ],
)
def test_unusable_override_is_refused(overrides: dict[str, str], message: str) -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer)

    with pytest.raises(InputError, match=message):
        leanstep.plan(profile, overrides=overrides)


def test_two_consecutive_marked_parts_are_both_recomputed_and_exact() -> None:
    torch.manual_seed(0)
    model, batch = TwoParts(), torch.randn(64, 32)
    leanstep.recompute(model.first)
    leanstep.recompute(model.second)

    fitted = leanstep.fit(model, batch, budget="110%")

    assert [d.path for d in fitted.plan.changed] == ["first", "second"]
    assert dropped_bytes(fitted.plan, "first") >= 2 * 64 * 256 * 4
    assert dropped_bytes(fitted.plan, "second") >= 64 * 128 * 4
    assert fitted.verdict is not None and fitted.verdict.gradients_equal


def test_marked_layers_of_bert_are_recomputed_and_the_others_left_alone() -> None:
    model, batch, loss, optimizer = models.build("bert-tiny")
    leanstep.recompute(model.layers[0])

    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="150%")

    assert [d.path for d in fitted.plan.changed] == ["layers.0"]
    (decision,) = fitted.plan.changed
    assert decision.dropped_bytes > 10 * decision.kept_bytes
    assert fitted.verdict is not None and fitted.verdict.gradients_equal
