"""The planner on synthetic chains: what it promises about budgets, floors and plans."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from leanstep.effects import replay_effect
from leanstep.errors import BudgetError, InputError
from leanstep.ir import Engine, Fact, Plan, Profile
from leanstep.planner import plan, plan_in, prepare, replay_options
from leanstep.planner.lower import effects
from leanstep.planner.option import Option
from leanstep.simulator import simulate, timeline
from leanstep.testing import Layer, chain_profile, random_profile

SEEDS = range(16)
ENGINES = ("auto", "module")


def equal_blocks(num_blocks: int = 6) -> Profile:
    layers = [Layer(400, 2e-3), Layer(1600, 5e-4), Layer(1600, 4e-3), Layer(400, 1e-3)]
    return chain_profile([layers] * num_blocks, input_bytes=400)


def floor_of(profile: Profile, **arguments: str) -> int:
    with pytest.raises(BudgetError) as caught:
        plan(profile, 1, **arguments)
    return caught.value.floor_bytes


def test_budget_above_the_peak_leaves_everything_untouched() -> None:
    profile = equal_blocks()

    found = plan(profile, "100%")

    assert {decision.engine for decision in found.decisions} == {Engine.UNTOUCHED}
    assert (found.extra_seconds, found.bound_seconds, found.gap) == (0.0, 0.0, 0.0)
    assert found.peak_bytes == found.unplanned_peak_bytes == profile.peak_bytes
    assert found.changed == ()
    assert found.proof == "nothing has to be dropped for this budget"


def test_distance_from_the_best_plan_is_said_in_seconds_and_as_a_share_of_the_step() -> None:
    found = plan(equal_blocks(), "70%")
    best = replace(found, step_seconds=0.1, bound_seconds=found.extra_seconds)
    worse = replace(best, bound_seconds=best.extra_seconds - 1e-3)

    assert best.is_optimal and not worse.is_optimal
    assert best.proof.startswith("no such plan takes less extra time (proved bound ")
    assert worse.proof.startswith("at most 1.00 ms, 1.0% of the step, above the least extra time")


def test_plan_has_one_decision_for_each_call_in_order() -> None:
    profile = equal_blocks()

    found = plan(profile, "70%")

    assert [d.path for d in found.decisions] == [block.path for block in profile.blocks]
    assert all(d.drop for d in found.changed)
    assert all(d.extra_seconds == 0 for d in found.decisions if d.engine is Engine.UNTOUCHED)
    assert found.extra_seconds == pytest.approx(sum(d.extra_seconds for d in found.decisions))
    assert "drops" in found.changed[0].why and "replays" in found.changed[0].why


def test_kept_and_dropped_bytes_add_up_to_what_the_block_saved() -> None:
    found = plan(equal_blocks(), "70%")

    assert {d.kept_bytes + d.dropped_bytes for d in found.decisions} == {400 + 1600 + 1600}


def clashes(before: Option, after: Option) -> bool:
    """Whether a dropped output is not taken by the next call, or not in time."""
    takes = after.engine is Engine.REPLAY and not after.reads_border_early
    return before.drops_border and not takes


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_plan_equals_enumeration_of_the_same_options(seed: int, engine: str) -> None:
    profile = random_profile(seed)
    space = prepare(profile, engine)
    budget_bytes = int(0.85 * profile.peak_bytes)
    exact = {
        picked: timeline(
            profile, effects(list(zip(space.parts.alone, picked, strict=True)))
        ).peak_bytes
        for picked in itertools.product(
            *((*call.options, *call.border_options) for call in space.options)
        )
        if not any(map(clashes, picked, picked[1:]))
    }
    fitting = {
        picked: sum(option.seconds for option in picked)
        for picked, peak_bytes in exact.items()
        if peak_bytes <= budget_bytes
    }

    try:
        found = plan(profile, budget_bytes, engine=engine)
    except BudgetError as error:
        assert not fitting
        assert error.floor_bytes == min(exact.values())
    else:
        assert found.extra_seconds == pytest.approx(min(fitting.values()), abs=1e-11)
        assert found.bound_seconds <= found.extra_seconds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_plan_fits_and_budgets_are_monotone(seed: int, engine: str) -> None:
    profile = random_profile(seed, num_blocks=4)
    space = prepare(profile, engine)
    floor_bytes = floor_of(profile, engine=engine)
    stride_bytes = max(1, (profile.peak_bytes - floor_bytes) // 20)
    plans = []

    for budget_bytes in range(floor_bytes, profile.peak_bytes + 1, stride_bytes):
        plans.append(plan_in(space, budget_bytes))
        simulated = simulate(profile, plans[-1])
        assert simulated.peak_bytes == plans[-1].peak_bytes <= budget_bytes

    seconds = [round(found.extra_seconds, 12) for found in plans]
    peaks = [found.peak_bytes for found in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("solver", ["optimal", "uniform", "keep_all"])
@pytest.mark.parametrize("seed", SEEDS)
def test_asking_for_exactly_the_floor_succeeds(seed: int, solver: str) -> None:
    profile = random_profile(seed, num_blocks=4)
    floor_bytes = floor_of(profile, solver=solver)

    assert plan(profile, floor_bytes, solver=solver).peak_bytes == floor_bytes
    with pytest.raises(BudgetError):
        plan(profile, floor_bytes - 1, solver=solver)


def test_no_other_solver_is_faster_than_optimal() -> None:
    profile = equal_blocks()
    space = prepare(profile)
    budget_bytes = int(0.7 * profile.peak_bytes)

    fastest = plan_in(space, budget_bytes).extra_seconds

    assert fastest < plan_in(space, budget_bytes, solver="uniform").extra_seconds


def test_budget_error_names_the_floor_and_the_op_that_owns_it() -> None:
    with pytest.raises(BudgetError, match=r"the least reachable peak is .* at layer") as caught:
        plan(equal_blocks(), 1)

    assert caught.value.op is not None
    assert caught.value.source is not None
    assert caught.value.budget_bytes == 1


def test_equal_blocks_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    original = replay_options.drop_sets

    def counted(*arguments: object) -> object:
        solved.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(replay_options, "drop_sets", counted)

    found = plan(equal_blocks(12), "70%")

    assert len(found.changed) > 2
    # The first call starts from the batch, the head reads the output of the last, and the last but
    # one has another neighbour.
    assert len(solved) == 4


def test_cheap_values_are_dropped_before_dear_ones() -> None:
    layers = [Layer(100, 1e-3), Layer(1000, 1e-5), Layer(1000, 5e-2), Layer(100, 1e-3)]
    profile = chain_profile([layers] * 4)

    found = plan(profile, profile.peak_bytes - 1000)

    dropped = {name for decision in found.changed for name in decision.drop}
    assert dropped == {"layer#1:0"}


def test_block_that_cannot_be_replayed_runs_by_module() -> None:
    read = Layer(10**6, facts=(Fact.HOST_READ,))
    profile = chain_profile([[read, read, Layer(9)]] * 4)

    found = plan(profile, profile.peak_bytes - 10**6)

    assert {decision.engine for decision in found.changed} == {Engine.MODULE}
    assert any(
        note.startswith("run again as a whole: layers.") and "reads a value on the host" in note
        for note in found.notes
    )
    with pytest.raises(BudgetError):
        plan(profile, profile.peak_bytes - 10**6, engine="replay")


def test_block_that_can_drop_nothing_is_named() -> None:
    stuck = [Layer(10**6, facts=(Fact.HOST_READ,)), Layer(9)]
    profile = chain_profile([stuck, *[[Layer(10**6), Layer(10**6), Layer(9)]] * 3])

    found = plan(profile, profile.peak_bytes - 10**6, engine="replay")

    assert found.decisions[0].why == "nothing in it can be dropped"
    assert (
        "nothing can be dropped in layers.0 (layer reads a value on the host at model.py:0)"
        in found.notes
    )


def test_plan_saves_and_loads(tmp_path: Path) -> None:
    found = plan(equal_blocks(), "70%")

    found.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == found


def test_plan_says_where_the_peak_is() -> None:
    assert "the peak of" in plan(equal_blocks(), "70%").notes[0]


def test_plan_is_the_same_from_run_to_run() -> None:
    assert plan(equal_blocks(), "70%") == plan(equal_blocks(), "70%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"solver": "best"}, "no solver is called 'best'"),
        ({"engine": "magic"}, "no engine is called 'magic': known are auto, replay, module"),
    ],
)
def test_unusable_argument_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(equal_blocks(), "100%", **arguments)


def test_step_without_blocks_has_its_peak_as_floor() -> None:
    profile = replace(equal_blocks(), blocks=())

    assert floor_of(profile) == profile.peak_bytes
    assert plan(profile, profile.peak_bytes).decisions == ()


def test_what_the_engine_keeps_on_the_host_counts_only_there() -> None:
    on_host = equal_blocks()
    elsewhere = replace(on_host, graph=replace(on_host.graph, is_on_host=False))

    def held_bytes(profile: Profile) -> int:
        view = prepare(profile).views[0]
        shifts = replay_effect(view, view.candidates).shifts
        return sum(shift.nbytes for shift in shifts if shift.storage < 0)

    assert held_bytes(on_host) > 0
    assert held_bytes(elsewhere) == 0
