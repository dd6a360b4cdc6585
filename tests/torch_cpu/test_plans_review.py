"""What a hostile review of whole plans found: each of these failed before its repair."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

import leanstep
from leanstep.errors import BudgetError
from leanstep.simulator import simulate


class Cheap(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(inputs))


class ListThenSequential(nn.Module):
    """Three blocks with a skip around one, then three that can run as one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(Cheap() for _ in range(3))
        self.second = nn.Sequential(*(Cheap() for _ in range(3)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        start = self.first[0](inputs)
        side = self.first[1](start)
        return self.second(self.first[2](side + start)) * side


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def floor_bytes(profile: leanstep.Profile) -> int:
    with pytest.raises(BudgetError) as caught:
        leanstep.plan(profile, 1)
    return caught.value.floor_bytes


def test_a_run_of_calls_does_not_take_a_border() -> None:
    torch.manual_seed(0)
    model, batch = ListThenSequential(), torch.randn(16, 64, 128)
    profile = leanstep.profile(model, batch, square)
    low, high = floor_bytes(profile), profile.peak_bytes

    for place in range(12):
        plan = leanstep.plan(profile, low + (high - low) * place // 12)
        assert simulate(profile, plan).peak_bytes == plan.peak_bytes <= plan.budget_bytes
        for before, after in zip(plan.decisions, plan.decisions[1:], strict=False):
            assert not (after.border_in and len(after.children) > 1), (before.name, after.name)


@pytest.mark.parametrize("solver", ["uniform", "optimal"])
def test_a_plan_with_joined_children_prints(solver: str) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Cheap() for _ in range(6))), torch.randn(16, 64, 128)
    profile = leanstep.profile(model, batch, square)
    budget = floor_bytes(profile) if solver == "optimal" else "80%"

    fitted = leanstep.fit(model, batch, square, budget=budget, solver=solver)

    assert any(len(d.children) > 1 for d in fitted.plan.changed)
    assert "layers" in str(fitted) or "[" in str(fitted)
    assert fitted.verdict is not None and fitted.verdict.gradients_equal
    assert fitted.verdict.measured_peak_bytes <= fitted.verdict.budget_bytes


def encoder() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(16, 64, 128)


def compare_solvers(profile: leanstep.Profile, places: Iterable[int]) -> set[str]:
    """No solver may be faster than the default one, or prove more; which ones had a plan."""
    low, high = floor_bytes(profile), profile.peak_bytes
    compared = set()
    for place in places:
        budget = low + (high - low) * place // 40
        best = leanstep.plan(profile, budget)
        for solver in ("mu_two", "chain_dp", "uniform"):
            try:
                other = leanstep.plan(profile, budget, solver=solver)
            except BudgetError:
                continue
            compared.add(solver)
            assert best.extra_seconds <= other.extra_seconds + 1e-12, (solver, place)
            assert other.bound_seconds <= best.extra_seconds + 1e-12, (solver, place)
    return compared


def test_no_solver_is_faster_than_optimal_near_the_floor() -> None:
    model, batch = encoder()
    for profile in (
        leanstep.profile(model, batch, square),
        replace(leanstep.profile(model, batch, square, device="h200"), link=None),
    ):
        assert {"mu_two", "chain_dp"} <= compare_solvers(profile, range(0, 8, 2))


def test_no_solver_is_faster_than_optimal_whatever_ops_take() -> None:
    model, batch = encoder()
    profile = leanstep.profile(model, batch, square)
    draw = random.Random(7)
    times = [1e-4 * draw.lognormvariate(0, 1) for _ in profile.costs]
    pairs = zip(profile.costs, times, strict=True)
    costs = tuple(replace(cost, seconds=seconds, recipe=None) for cost, seconds in pairs)
    drawn = replace(profile, costs=costs, step_seconds=sum(times))

    assert "mu_two" in compare_solvers(drawn, (0, 1, 2, 3, 5, 8, 13, 21))
