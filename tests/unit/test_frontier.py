"""The whole curve in one call: what it promises about its points."""

from pathlib import Path

import pytest

from leanstep.errors import InputError
from leanstep.ir import Frontier, FrontierPoint
from leanstep.planner import frontier, plan
from leanstep.testing import random_profile


@pytest.mark.parametrize("seed", range(4))
def test_points_are_the_plans_of_each_solver_and_optimal_is_below(seed: int) -> None:
    profile = random_profile(seed, num_blocks=4)

    curve = frontier(profile, points=6)

    best = {point.budget_bytes: point for point in curve.of("optimal")}
    assert len(best) == 6 and max(best) == profile.peak_bytes
    for point in curve.points:
        found = plan(profile, point.budget_bytes, solver=point.solver)
        assert point.extra_seconds == pytest.approx(found.extra_seconds)
        assert point.peak_bytes == found.peak_bytes <= point.budget_bytes
        assert point.bound_seconds <= point.extra_seconds
        assert best[point.budget_bytes].extra_seconds <= point.extra_seconds + 1e-12


def test_curve_prints_saves_and_loads(tmp_path: Path) -> None:
    curve = frontier(random_profile(1), points=3, solvers=["uniform", "keep_all"])

    curve.save(tmp_path / "curve.json")

    assert Frontier.load(tmp_path / "curve.json") == curve
    assert "uniform  keep_all" in str(curve) and "least peak" in str(curve)


def test_one_point_is_no_curve() -> None:
    with pytest.raises(InputError, match="at least 2"):
        frontier(random_profile(1), points=1)


def test_each_point_is_shown_when_it_is_planned() -> None:
    seen: list[FrontierPoint] = []

    curve = frontier(random_profile(1), points=3, solvers=["optimal"], watch=seen.append)

    assert tuple(seen) == curve.points
