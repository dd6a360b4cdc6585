"""A plan for every budget: what the report's slider moves over."""

import pytest

from leanstep.errors import InputError
from leanstep.ir import Identity, Ladder, TensorLook
from leanstep.planner import ladder, plan
from leanstep.simulator import simulate
from leanstep.testing import Layer, chain_profile, random_profile

PROFILE = chain_profile([[Layer(30_000), Layer(20_000)] for _ in range(6)])


@pytest.mark.parametrize("seed", range(3))
def test_every_rung_is_the_plan_for_its_budget(seed: int) -> None:
    profile = random_profile(seed, num_blocks=4)

    found = ladder(profile, rungs=5)

    assert found.rungs[0].budget_bytes == profile.peak_bytes
    for rung in found.rungs:
        own = plan(profile, rung.budget_bytes)
        assert (rung.peak_bytes, rung.extra_seconds) == (own.peak_bytes, own.extra_seconds)
        assert [share.name for share in rung.shares] == [d.name for d in own.decisions]
        dropped = sum(share.dropped_bytes for share in rung.shares)
        assert dropped == sum(decision.dropped_bytes for decision in own.decisions)
    assert sorted(rung.budget_bytes for rung in found.rungs)[::-1] == [
        rung.budget_bytes for rung in found.rungs
    ]


@pytest.mark.parametrize("solver", ["uniform", "chen_sqrt", "mu_two"])
def test_a_heuristic_has_a_ladder_too(solver: str) -> None:
    found = ladder(PROFILE, solver=solver, rungs=9)

    assert found.rungs[0].extra_seconds == 0
    assert all(rung.peak_bytes <= rung.budget_bytes for rung in found.rungs)


def test_a_budget_of_its_own_gets_a_rung_where_it_lies_between() -> None:
    asked = PROFILE.peak_bytes * 9 // 10 + 1

    found = ladder(PROFILE, rungs=3, also=(asked, 1, PROFILE.peak_bytes * 2))

    assert len(found.rungs) == 4
    assert asked in [rung.budget_bytes for rung in found.rungs]


def test_the_batch_grows_as_far_as_the_simulated_step_of_it_fits() -> None:
    found = ladder(PROFILE, rungs=5)

    first, last = found.rungs[0], found.rungs[-1]
    assert first.untouched_growth == pytest.approx(1.0, abs=0.02)
    for rung in found.rungs:
        assert rung.batch_growth >= rung.untouched_growth
        # The same chain with as many times the bytes fits the budget untouched, and no larger one.
        for share, fits in ((0.99, True), (1.03, False)):
            growth = rung.untouched_growth * share
            layers = [Layer(int(size * growth)) for size in (30_000, 20_000)]
            sizes = {"input_bytes": int(64 * growth), "head_bytes": int(64 * growth)}
            larger = chain_profile([layers for _ in range(6)], **sizes)
            assert (simulate(larger).peak_bytes <= rung.budget_bytes) is fits
    assert last.untouched_growth < last.batch_growth


def test_it_saves_and_loads(tmp_path) -> None:
    found = ladder(PROFILE, rungs=2)

    found.save(tmp_path / "ladder.json")

    assert Ladder.load(tmp_path / "ladder.json") == found


def test_one_rung_is_no_ladder() -> None:
    with pytest.raises(InputError, match="at least 2"):
        ladder(PROFILE, rungs=1)


@pytest.mark.parametrize(
    ("looks", "size"),
    [
        ([], 0),
        (["64×512 int64"], 64),
        (["8 float32", "8×3×224×224 float32"], 8),
        (["8×4 float32", "4×8 float32"], 0),
        (["scalar float32"], 0),
    ],
)
def test_the_size_of_a_batch_is_what_all_its_tensors_agree_on(looks, size) -> None:
    batch = tuple(TensorLook(str(place), look) for place, look in enumerate(looks))

    assert Identity("Model", batch=batch).batch_size == size
