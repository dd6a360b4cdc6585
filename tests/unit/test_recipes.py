"""Cheap replays in programs, effects, costs and plans; no torch."""

from dataclasses import replace

import pytest

from leanstep.effects import replay_effect
from leanstep.ir import (
    Block,
    Category,
    Cost,
    Fact,
    Graph,
    Identity,
    ModuleCall,
    Op,
    Phase,
    Profile,
    RecipeCost,
    Save,
    Storage,
    Unpack,
    Value,
)
from leanstep.planner import plan
from leanstep.planner.cut import find_projects
from leanstep.rebuild.block import BlockGraph
from leanstep.rebuild.program import Rerun, Session, build_program
from leanstep.rebuild.recipes import cheap_rerun, usable_recipes
from leanstep.simulator import plan_effects, simulate

INPUT, OUT, MASK, DRAWN, SUM, EXTRA = (Value(number, 0) for number in range(6))
BEFORE, AFTER = Value(9, 0), Value(9, 1)

FULL = Rerun(0, (INPUT, BEFORE), (OUT, MASK, AFTER))
CHEAP = Rerun(0, (INPUT, MASK), (OUT,), siblings=(MASK,))
ADD = Rerun(1, (OUT, INPUT), (SUM,))
NEXT_DRAW = Rerun(2, (INPUT, AFTER), (DRAWN, Value(9, 2)))


def program_of(*wanted: Value, kept: tuple[Value, ...]):
    ops = [FULL, ADD, NEXT_DRAW]
    return build_program(ops, dict.fromkeys(wanted, 1), frozenset(kept), [CHEAP])


def test_recipe_runs_where_its_sibling_is_kept() -> None:
    program = program_of(OUT, kept=(INPUT, BEFORE, MASK))

    assert program.reruns == {0: CHEAP}
    assert program.all_sources == {INPUT, MASK}


def test_op_runs_where_the_sibling_is_dropped_too() -> None:
    program = program_of(OUT, MASK, kept=(INPUT, BEFORE))

    assert program.reruns == {0: FULL}
    assert program.all_sources == {INPUT, BEFORE}


def test_recipe_rebuilds_what_autograd_never_saved() -> None:
    program = program_of(SUM, kept=(INPUT, BEFORE, MASK))

    assert program.reruns == {0: CHEAP, 1: ADD}
    assert [run.op for run in Session(program).request(SUM)] == [CHEAP, ADD]


def test_op_runs_where_something_else_of_it_is_needed() -> None:
    # A later draw needs the generator as this one left it.
    program = program_of(OUT, DRAWN, kept=(INPUT, BEFORE, MASK))

    assert program.reruns == {0: FULL, 2: NEXT_DRAW}
    assert MASK not in program.all_sources


def test_session_lets_the_recipe_s_output_go_when_it_is_served() -> None:
    session = Session(program_of(SUM, kept=(INPUT, BEFORE, MASK)))

    runs = session.request(SUM)

    assert [run.frees for run in runs] == [(), (OUT.storage,)]
    assert session.served(SUM)
    assert not session.present


# One block: dropout of its input, then a sum that the next op saves. Both dropout's mask and the
# sum are saved; the output of dropout is not. Backward asks for the sum, then for the mask.
NBYTES = {"input": 400, "out": 400, "mask": 100, "sum": 400, "loss": 8}
DROPOUT_SECONDS, ADD_SECONDS = 5e-3, 1e-3
CHEAP_COST = RecipeCost(seconds=2e-3, exact=True, workspace_bytes=50)


def dropout_profile(recipe: RecipeCost | None = CHEAP_COST) -> Profile:
    x, out, mask, total, loss, generator = range(6)
    last = 5

    def op(name, phase, reads, writes, rise, cost, *facts):
        values = tuple(Value(number, 0) for number in reads)
        return Op(name, phase, 0, "", values, writes, rise, cost, facts)

    born = tuple(Value(number, 0) for number in range(6))
    draw = op("aten.native_dropout.default", Phase.FORWARD, [x], (), 500, 0, Fact.RANDOM)
    draw = replace(
        draw,
        reads=(born[x], Value(generator, 0)),
        writes=(born[out], born[mask], Value(generator, 1)),
    )
    ops = (
        draw,
        op("aten.add.Tensor", Phase.FORWARD, [out, x], (born[total],), 400, 1),
        op("loss", Phase.FORWARD, [total], (born[loss],), 8, 2),
        op("loss backward", Phase.BACKWARD, [loss, total], (), 0, 2),
        op("add backward", Phase.BACKWARD, [], (), 0, 2),
        op("dropout backward", Phase.BACKWARD, [mask], (), 0, 2),
    )
    storages = (
        Storage(400, Category.INPUT, -1, last, last),
        Storage(400, Category.TEMPORARY, 0, 1, 1),
        Storage(100, Category.ACTIVATION, 0, 5, 0),
        Storage(400, Category.ACTIVATION, 1, 3, 2),
        Storage(8, Category.ACTIVATION, 2, 3, 3),
        Storage(0, Category.GENERATOR, -1, last, last),
    )
    saves = (Save(born[mask], 0, 1, 6), Save(born[total], 0, 2, 4))
    unpacks = (Unpack(1, 3), Unpack(0, 5))
    calls = (ModuleCall("block", "Block", 0, -1, 0, 2),)
    graph = Graph(ops, storages, saves, unpacks, calls)
    costs = (
        Cost("aten.native_dropout.default", DROPOUT_SECONDS, recipe),
        Cost("add", ADD_SECONDS),
        Cost("rest", 1e-3),
    )
    blocks = (Block("block", "Block", 0, 0, 2, (0, 1)),)
    profile = Profile(graph, blocks, costs, 1e-2, 0, 0, "cpu", "", Identity("dropout"))
    return replace(profile, peak_bytes=simulate(profile).peak_bytes)


MASK_STORAGE, SUM_STORAGE = 2, 3


def view_of(profile: Profile, *, exact: bool = True) -> BlockGraph:
    (block,) = profile.blocks
    return BlockGraph(profile.graph, block, usable_recipes(profile, block, exact=exact))


def test_recipe_of_a_recorded_op_reads_its_inputs_and_siblings_but_not_the_generator() -> None:
    view = view_of(dropout_profile())
    full = view.reruns[0]

    assert cheap_rerun(view.graph, view.graph.ops[0], full) == Rerun(
        0, (Value(0, 0), Value(2, 0)), (Value(1, 0),), siblings=(Value(2, 0),)
    )
    assert cheap_rerun(view.graph, view.graph.ops[1], view.reruns[1]) is None


@pytest.mark.parametrize(
    ("recipe", "exact", "is_used"),
    [
        (CHEAP_COST, True, True),
        (None, True, False),
        (None, False, False),
        (replace(CHEAP_COST, exact=False), True, False),
        (replace(CHEAP_COST, exact=False), False, True),
        (replace(CHEAP_COST, seconds=1.0), True, False),
    ],
)
def test_recipe_is_used_where_it_is_exact_or_allowed_and_no_slower(
    recipe: RecipeCost | None, exact: bool, is_used: bool
) -> None:
    view = view_of(dropout_profile(recipe), exact=exact)

    assert view.program([SUM_STORAGE]).reruns[0].is_recipe is is_used


def test_effect_prices_the_recipe_and_not_the_op() -> None:
    profile = dropout_profile()

    effect = replay_effect(view_of(profile), [SUM_STORAGE])

    assert effect.seconds(profile) == pytest.approx(CHEAP_COST.seconds + ADD_SECONDS)
    cheap, add = effect.replays
    # Both run before the request; the level after them holds the sum.
    assert cheap.peak_bytes == NBYTES["out"] + CHEAP_COST.workspace_bytes - NBYTES["sum"]
    assert add.peak_bytes == NBYTES["out"] + 400 - NBYTES["sum"]


def test_effect_prices_the_op_where_the_mask_is_dropped_too() -> None:
    profile = dropout_profile()

    effect = replay_effect(view_of(profile), [MASK_STORAGE, SUM_STORAGE])

    assert effect.seconds(profile) == pytest.approx(DROPOUT_SECONDS + ADD_SECONDS)


@pytest.mark.parametrize("exact", [True, False])
def test_projects_price_every_set_as_the_simulator_does(exact: bool) -> None:
    profile = dropout_profile(replace(CHEAP_COST, exact=False))
    view = view_of(profile, exact=exact)
    projects = find_projects(profile, view, view.candidates)

    assert projects.storages == (MASK_STORAGE, SUM_STORAGE)
    for chosen in ([0], [1], [0, 1]):
        dropped = [projects.storages[place] for place in chosen]
        simulated = replay_effect(view, dropped).seconds(profile)
        assert projects.seconds(chosen) == pytest.approx(simulated)


def test_plan_names_what_comes_back_cheaply_and_simulates_the_same() -> None:
    profile = dropout_profile()
    # Room for all but the sum.
    found = plan(profile, 10**6, overrides={"block::aten.add": "recompute"})

    (decision,) = found.decisions
    assert decision.recipes == ("aten.native_dropout.default#0:0",)
    assert "1 of them cheaply" in decision.why
    (effect,) = plan_effects(profile, found)
    assert [replay.recipe for replay in effect.replays] == [CHEAP_COST, None]
    assert simulate(profile, found).peak_bytes == found.peak_bytes


def test_explanation_pays_for_the_recipe_and_not_for_the_op() -> None:
    profile = dropout_profile()
    found = plan(profile, 10**6, overrides={"block::aten.add": "recompute"})

    (changed,) = found.changed
    paid = sum(row.seconds for row in changed.rows)
    assert changed.recipes
    assert paid == pytest.approx(simulate(profile, found).extra_seconds)


def test_simulator_follows_the_decision_not_the_profile() -> None:
    profile = dropout_profile()
    found = plan(profile, 10**6, overrides={"block::aten.add": "recompute"})
    without = replace(found, decisions=(replace(found.decisions[0], recipes=()),))

    (effect,) = plan_effects(profile, without)

    assert [replay.recipe for replay in effect.replays] == [None, None]


def test_inexact_recipe_is_named_in_the_plan_that_allows_it() -> None:
    profile = dropout_profile(replace(CHEAP_COST, exact=False))
    overrides = {"block::aten.add": "recompute"}

    refused = plan(profile, 10**6, overrides=overrides)
    allowed = plan(profile, 10**6, overrides=overrides, exact=False)

    assert refused.exact and not refused.decisions[0].recipes
    assert not allowed.exact and allowed.decisions[0].recipes
    assert allowed.extra_seconds < refused.extra_seconds
    assert "rebuilt with other bits: aten.native_dropout.default" in allowed.notes


def test_profile_with_recipes_saves_and_loads(tmp_path) -> None:
    profile = dropout_profile()

    profile.save(tmp_path / "profile.json")

    assert Profile.load(tmp_path / "profile.json") == profile
