"""What the planner moves to the host: never over the budget, never late, never for nothing."""

from contextlib import suppress
from dataclasses import replace

import pytest

from leanstep.errors import BudgetError, PlanError
from leanstep.ir import Category, Engine, Link, Plan, Profile, Storage
from leanstep.ir.decision import INPUT
from leanstep.ir.plan import check_plan
from leanstep.planner import plan, plan_in, prepare
from leanstep.planner.offload import LEAST_SECONDS, capacity_bytes
from leanstep.simulator import simulate
from leanstep.testing import Layer, chain_profile, random_profile

MIB = 1 << 20
LAYERS = (Layer(4 * MIB, 2e-3), Layer(16 * MIB, 5e-4), Layer(16 * MIB, 4e-3), Layer(4 * MIB, 1e-3))
FAST = Link(to_host=5e10, from_host=5e10, host_bytes=1 << 40)
SLOW = Link(to_host=2e9, from_host=2e9, host_bytes=1 << 40)


def steps(link: Link | None, num_blocks: int = 8) -> Profile:
    found = chain_profile([LAYERS] * num_blocks, input_bytes=4 * MIB, head_bytes=4 * MIB)
    return replace(found, link=link)


def test_a_fast_link_costs_no_time() -> None:
    found = plan(steps(FAST), "60%")

    assert found.host_bytes > 0
    check_plan(found)
    # Hooks alone: nothing runs again.
    assert not any(decision.drop for decision in found.decisions)
    assert found.extra_seconds < plan(steps(None), "60%").extra_seconds / 10


@pytest.mark.parametrize("share", ["80%", "70%", "60%", "50%", "45%"])
def test_a_slow_link_saves_some_of_the_time(share: str) -> None:
    alone, moved = plan(steps(None), share), plan(steps(SLOW), share)

    assert moved.peak_bytes <= moved.budget_bytes
    assert moved.peak_bytes == simulate(steps(SLOW), moved).peak_bytes
    assert 0 < moved.host_bytes <= capacity_bytes(steps(SLOW))
    assert moved.extra_seconds < alone.extra_seconds
    assert moved.bound_seconds <= moved.extra_seconds


def test_without_a_link_or_by_wish_nothing_is_moved() -> None:
    assert plan(steps(None), "60%").host_bytes == 0
    assert plan(steps(FAST), "60%", offload=False).host_bytes == 0


def test_what_fits_anyway_is_not_moved() -> None:
    found = plan(steps(FAST), "100%")

    assert found.host_bytes == 0
    assert {decision.engine for decision in found.decisions} == {Engine.UNTOUCHED}


def test_the_host_is_not_filled() -> None:
    small = replace(FAST, host_bytes=64 * MIB)

    assert plan(steps(small), "60%").host_bytes <= 32 * MIB


def test_the_last_call_keeps_its_own() -> None:
    found = plan(steps(FAST), "50%")

    assert found.decisions[-1].offload == ()


def test_copies_are_done_before_the_bytes_are_counted_as_gone() -> None:
    profile = steps(SLOW)
    found = plan(profile, "60%")
    forward = 0.0
    ends = [0.0] * len(found.decisions)
    for number, block in enumerate(profile.blocks):
        forward += sum(profile.seconds(index) for index in range(block.start, block.stop))
        ends[number] = forward
    sent = 0
    for number, decision in enumerate(found.decisions):
        for entry in decision.offload:
            sent += entry.nbytes
            assert ends[number + entry.release] * SLOW.to_host >= sent


def test_the_floor_that_an_error_names_can_be_asked_for() -> None:
    profile = steps(SLOW)
    with pytest.raises(BudgetError) as caught:
        plan(profile, 1)

    found = plan(profile, caught.value.floor_bytes)

    assert found.peak_bytes <= caught.value.floor_bytes
    with pytest.raises(BudgetError) as alone:
        plan(steps(None), 1)
    assert caught.value.floor_bytes <= alone.value.floor_bytes


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
def test_no_budget_that_is_a_little_below_that_floor_can_be_met(link: Link) -> None:
    profile = steps(link)
    with pytest.raises(BudgetError) as caught:
        plan(profile, 1)

    for share in (0.99, 0.97, 0.9):
        with pytest.raises(BudgetError):
            plan(profile, int(share * caught.value.floor_bytes))


def test_storages_that_are_emptied_do_not_raise_that_floor() -> None:
    profile = steps(FAST)
    end = len(profile.graph.ops)
    away = Storage(1 << 40, Category.PARAMETER, -1, end, end, absences=((0, end + 1),))
    graph = replace(profile.graph, storages=(*profile.graph.storages, away))
    floors = []
    for one in (profile, replace(profile, graph=graph)):
        with pytest.raises(BudgetError) as caught:
            plan(one, 1)
        floors.append(caught.value.floor_bytes)

    assert floors[0] == floors[1]


def test_a_plan_with_offload_survives_the_disk(tmp_path) -> None:
    found = plan(steps(SLOW), "60%")
    found.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == found


def test_an_explanation_says_what_waits_on_the_host_and_not_that_it_is_kept() -> None:
    found = plan(steps(FAST), "60%")
    said = found.explain()
    inputs = sum(e.nbytes for d in found.decisions for e in d.offload if e.key == INPUT)

    assert sum(group.host_bytes for group in said.groups) == sum(
        decision.host_bytes for decision in found.decisions
    )
    assert sum(row.host_bytes for group in said.groups for row in group.rows) == (
        sum(group.host_bytes for group in said.groups) - inputs
    )
    assert sum(group.kept_bytes for group in said.groups) == sum(
        decision.resident_bytes for decision in found.decisions
    )
    assert "to host" in str(said)
    assert "to host" not in str(plan(steps(FAST), "60%", offload=False).explain())


def test_a_plan_that_moves_what_cannot_be_moved_is_refused() -> None:
    found = plan(steps(SLOW), "60%")
    place = next(n for n, decision in enumerate(found.decisions) if decision.offload)
    entry = found.decisions[place].offload[0]
    for wrong in (entry._replace(fetch=0), entry._replace(release=99), entry._replace(fetch=99)):
        changed = list(found.decisions)
        changed[place] = replace(changed[place], offload=(wrong,))
        with pytest.raises(PlanError, match="to the host"):
            check_plan(replace(found, decisions=tuple(changed)))


def test_below_every_recomputation_the_inputs_of_blocks_go_to_the_host() -> None:
    """With all that blocks made dropped, what they hold is what they were called with."""
    with pytest.raises(BudgetError) as alone:
        plan(steps(None), 1)

    found = plan(steps(FAST), alone.value.floor_bytes - 8 * MIB)

    moved = [entry.key for decision in found.decisions for entry in decision.offload]
    assert INPUT in moved
    assert found.peak_bytes == simulate(steps(FAST), found).peak_bytes
    assert found.peak_bytes < alone.value.floor_bytes


def test_a_copy_that_is_shorter_than_its_python_is_not_made() -> None:
    least = int(LEAST_SECONDS * FAST.to_host)
    found = plan(steps(FAST), "60%")

    moved = [entry.nbytes for decision in found.decisions for entry in decision.offload]
    assert moved and min(moved) >= least
    # A link on which even the largest takes no time to speak of moves nothing that can be rebuilt.
    quick = replace(FAST, to_host=1e13, from_host=1e13)
    assert plan(steps(quick), "60%").host_bytes == 0


def test_large_copies_come_first_within_a_call() -> None:
    found = plan(steps(SLOW), "60%")

    for decision in found.decisions:
        sizes = [entry.nbytes for entry in decision.offload]
        assert sizes == sorted(sizes, reverse=True)


def num_copies(found: Plan) -> int:
    return sum(len(decision.offload) for decision in found.decisions)


@pytest.mark.parametrize("share", ["80%", "60%", "50%"])
def test_where_copies_cost_the_cpu_more_than_they_save_there_are_none(share: str) -> None:
    free = plan(steps(SLOW), share)
    saved = plan(steps(None), share).extra_seconds - free.extra_seconds
    dear = replace(steps(SLOW), copy_seconds=2 * saved)

    found = plan(dear, share)

    assert num_copies(free) and not num_copies(found)
    assert found.extra_seconds == pytest.approx(plan(steps(None), share).extra_seconds)


def test_what_copies_cost_is_promised_with_the_rest() -> None:
    free, alone = plan(steps(SLOW), "60%"), plan(steps(None), "60%")
    saved = alone.extra_seconds - free.extra_seconds
    dear = replace(steps(SLOW), copy_seconds=saved / num_copies(free) / 2)

    found = plan(dear, "60%")

    assert num_copies(found) > 0 and found.extra_seconds < alone.extra_seconds
    by_decision = sum(decision.extra_seconds for decision in found.decisions)
    assert found.extra_seconds == pytest.approx(by_decision)
    counted, uncounted = simulate(dear, found), simulate(steps(SLOW), found)
    copied = num_copies(found) * dear.copy_seconds
    assert counted.extra_seconds == pytest.approx(uncounted.extra_seconds + copied)
    # Beside what the engine's own hooks take.
    assert counted.extra_seconds <= found.extra_seconds < 1.1 * counted.extra_seconds


def test_where_only_the_host_helps_few_copies_are_made_if_they_cost() -> None:
    with pytest.raises(BudgetError) as refused:
        plan(steps(None), 1)
    budget = int(0.99 * refused.value.floor_bytes)

    free = plan(steps(SLOW), budget)
    dear = plan(replace(steps(SLOW), copy_seconds=1.0), budget)

    assert 0 < num_copies(dear) < num_copies(free)
    assert dear.peak_bytes <= budget


@pytest.mark.parametrize("copy_seconds", [0.0, 1e-4, 3e-3, 0.1])
@pytest.mark.parametrize("share", ["80%", "60%", "45%"])
def test_no_solver_proves_more_than_another_reaches(share: str, copy_seconds: float) -> None:
    profile = replace(steps(SLOW), copy_seconds=copy_seconds)
    plans: list[Plan] = []
    # Without the host's help first: what that reaches can be reached with it.
    for offload in (False, True):
        own = []
        for solver in ("optimal", "uniform", "keep_all", "chen_sqrt", "mu_two", "chain_dp"):
            with suppress(BudgetError):
                own.append(plan(profile, share, solver=solver, offload=offload))
        plans += own

        best = min(found.extra_seconds for found in plans)
        assert own and all(found.bound_seconds <= best + 1e-12 for found in own)


def uneven(seed: int, rate: float, copy_seconds: float) -> Profile:
    """A chain of random calls, and a link that takes so many of its bytes while forward runs."""
    found = random_profile(seed, num_blocks=6)
    made = sum(storage.nbytes for storage in found.graph.storages if storage.birth >= 0)
    link = Link(rate * made / found.step_seconds, rate * made / found.step_seconds, 1 << 40)
    return replace(found, link=link, copy_seconds=copy_seconds)


@pytest.mark.parametrize(
    ("seed", "rate", "copy_seconds"), [(0, 1.0, 0.0), (1, 1.0, 1e-3), (2, 3.0, 0.0)]
)
def test_more_budget_is_never_slower_and_less_never_higher(
    seed: int, rate: float, copy_seconds: float
) -> None:
    profile = uneven(seed, rate, copy_seconds)
    space = prepare(profile)
    with pytest.raises(BudgetError) as refused:
        plan_in(space, 1)
    low, high = refused.value.floor_bytes, profile.peak_bytes
    plans = [plan_in(space, low + (high - low) * place // 16) for place in range(17)]

    assert all(found.peak_bytes <= found.budget_bytes for found in plans)
    assert any(found.host_bytes for found in plans)
    seconds = [round(found.extra_seconds, 12) for found in plans]
    peaks = [found.peak_bytes for found in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)
