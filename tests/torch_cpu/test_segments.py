"""Segments of a Sequential run as one block: exactly, within the budget, as predicted."""

import pytest
import torch
from torch import Tensor, nn

import leanstep
from leanstep.errors import PlanError
from leanstep.ir import Engine
from leanstep.solvers.uniform import Uniform

WIDTH = 64


class Residual(nn.Module):
    """A block of its own, with batch norm and dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.second(torch.relu(self.first(self.norm(x)))))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def layers() -> nn.Module:
    """Torch's own layers: stretches of them are the blocks."""
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(9)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Residual() for _ in range(9)))


def nested() -> nn.Module:
    stages = [nn.Sequential(*(Residual() for _ in range(4))) for _ in range(2)]
    return nn.Sequential(*stages, nn.Linear(WIDTH, 1))


@pytest.mark.parametrize("make", [layers, blocks, nested])
@pytest.mark.parametrize("solver", ["uniform", "chen_sqrt", "chain_dp", Uniform(3)])
def test_segments_train_exactly_within_the_budget(make: object, solver: object) -> None:
    torch.manual_seed(0)
    model, batch = make(), torch.randn(512, WIDTH)
    profile = leanstep.profile(model, batch, squares)
    with pytest.raises(leanstep.BudgetError) as caught:
        leanstep.plan(profile, 1, solver=solver)

    fitted = leanstep.fit(
        model, batch, squares, budget=caught.value.floor_bytes + 40_000, solver=solver
    )

    joined = [d for d in fitted.plan.changed if len(d.children) > 1]
    assert joined or solver != Uniform(3)
    assert all(d.engine is Engine.REPLAY for d in joined)
    verdict = fitted.verdict
    assert verdict.gradients_equal
    assert verdict.measured_peak_bytes <= verdict.budget_bytes
    assert verdict.measured_peak_bytes <= verdict.predicted_peak_bytes
    assert verdict.predicted_peak_bytes <= 1.01 * verdict.measured_peak_bytes
    fitted.remove()


def test_plan_with_segments_is_saved_and_applied_elsewhere(tmp_path: object) -> None:
    model, batch = blocks(), torch.randn(64, WIDTH)
    profile = leanstep.profile(model, batch, squares)
    leanstep.plan(profile, "100%", solver=Uniform(3)).save(tmp_path / "plan.json")

    plan = leanstep.Plan.load(tmp_path / "plan.json")

    assert leanstep.simulate(profile, plan).peak_bytes == plan.peak_bytes
    assert leanstep.verify(blocks(), batch, squares, plan=plan).gradients_equal


class Twice(nn.Module):
    """Calls the same Sequential two times: its children cannot be told apart by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Residual() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.body(x))


class Bent(nn.Sequential):
    """A Sequential that does more than call its children in turn."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self:
            x = child(x) + x
        return x


Bent.__name__ = "Sequential"


@pytest.mark.parametrize("make", [Twice, lambda: nn.Sequential(nn.Tanh(), Bent(Residual()))])
def test_what_cannot_run_as_one_is_recomputed_block_by_block(make: object) -> None:
    batch = torch.randn(256, WIDTH)

    fitted = leanstep.fit(make(), batch, squares, budget="100%", solver=Uniform(2))

    assert all(len(decision.children) < 2 for decision in fitted.plan.changed)
    assert fitted.verdict.gradients_equal


def test_plan_for_another_kind_of_sequential_is_refused() -> None:
    model, batch = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(256, WIDTH)
    plan = leanstep.plan(leanstep.profile(model, batch, squares), "100%", solver=Uniform(2))

    with pytest.raises(PlanError, match="does not call its children as a Sequential does"):
        leanstep.apply(Bent(*(Residual() for _ in range(4))), plan)
