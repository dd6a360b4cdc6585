"""A recorded step with some calls made one op forward and one backward, without torch."""

import pytest

from leanstep import planner
from leanstep.condense import condense
from leanstep.errors import BudgetError, InputError
from leanstep.ir import Engine, Form, Kind, Profile
from leanstep.ir.form import without_beaten
from leanstep.simulator import plan_effects, simulate
from leanstep.testing.chains import KIB, Layer, chain_profile


def form(name, kept, forward, backward, seconds=2e-3, **others):
    return Form(
        name=f"Block/{name}",
        kept=(name,),
        kept_bytes=kept,
        forward_rise_bytes=forward,
        backward_rise_bytes=backward,
        forward_seconds=seconds / 2,
        backward_seconds=seconds / 2,
        **others,
    )


KIND = Kind(
    "Block",
    (
        form("everything", 8 * KIB, 10 * KIB, 3 * KIB),
        form("half", 4 * KIB, 8 * KIB, 6 * KIB, 3e-3),
        form("nothing", 0, 7 * KIB, 9 * KIB, 4e-3),
    ),
)


def eager(number=3):
    return chain_profile([[Layer(4 * KIB), Layer(4 * KIB)] for _ in range(number)])


def compiled(number=3, kind=KIND, which=None):
    known = eager(number)
    return condense(known, dict.fromkeys(range(number) if which is None else which, 0), [kind])


def test_each_call_is_one_op_forward_and_one_backward():
    profile = compiled()

    ops = [op for op in profile.graph.ops if op.name == "compiled.Block"]

    assert len(ops) == 6
    assert [block.stop - block.start for block in profile.blocks] == [1, 1, 1]
    assert all(block.is_compiled for block in profile.blocks)
    assert len(profile.graph.ops) < len(eager().graph.ops)


def test_the_rises_and_times_are_those_of_the_unplanned_form():
    profile = compiled()

    forward, backward = (
        [i for i, op in enumerate(profile.graph.ops) if op.name == "compiled.Block"][place]
        for place in (0, -1)
    )

    assert profile.graph.ops[forward].rise_bytes == KIND.unplanned.forward_rise_bytes
    assert profile.graph.ops[backward].rise_bytes == KIND.unplanned.backward_rise_bytes
    assert profile.seconds(forward) == KIND.unplanned.forward_seconds


def test_what_a_call_keeps_lives_from_its_forward_to_its_backward():
    profile = compiled()

    kept = [profile.graph.saves[block.saves[0]].value.storage for block in profile.blocks]

    for number, block in zip(kept, profile.blocks, strict=True):
        storage = profile.graph.storages[number]
        assert storage.nbytes == KIND.unplanned.kept_bytes
        assert storage.birth == block.start
        assert profile.graph.ops[storage.death].name == "compiled.Block"


def test_outputs_live_as_long_as_the_next_call_holds_its_arguments():
    holding = compiled()
    kinds = [Kind("Block", tuple(form(f"{n}", n, n, n, holds_arguments=False) for n in (2, 1)))]
    free = condense(eager(), dict.fromkeys(range(3), 0), kinds)

    def longest(profile):
        output = [s for s in profile.graph.storages if s.birth == profile.blocks[0].start]
        return max(s.death for s in output if s.nbytes == 4 * KIB)

    assert longest(holding) > holding.blocks[-1].stop
    assert longest(free) <= free.blocks[1].stop


def test_a_form_that_holds_its_arguments_holds_them_until_backward():
    first = form("first", 4 * KIB, KIB, KIB, holds_arguments=False)
    other = form("other", 0, KIB, KIB, 5e-3, holds_arguments=True)
    profile = compiled(kind=Kind("Block", (first, other)))
    forced = {"layers.2": "recompute"}

    plan = planner.plan(profile, 1 << 40, overrides=forced)

    (effect,) = [e for e in plan_effects(profile, plan) if e.shifts]
    held = [s for s in effect.shifts if s.nbytes > 0]
    assert [s.nbytes for s in held] == [4 * KIB]
    assert held[0].storage >= 0
    assert held[0].stop > profile.blocks[2].stop


def test_calls_that_are_not_compiled_stay_as_they_were():
    profile = compiled(which=[0, 2])

    assert [block.is_compiled for block in profile.blocks] == [True, False, True]
    assert profile.blocks[1].stop - profile.blocks[1].start == 2
    assert len(profile.blocks[1].saves) == 2


def test_a_plan_adds_up_what_its_forms_do():
    profile = compiled()
    peak = simulate(profile).peak_bytes
    profile = Profile(
        **{name: getattr(profile, name) for name in profile.__slots__ if name != "peak_bytes"},
        peak_bytes=peak,
    )

    plan = planner.plan(profile, peak - 4 * KIB)

    assert plan.peak_bytes == simulate(profile, plan).peak_bytes <= peak - 4 * KIB
    assert {decision.engine for decision in plan.decisions} == {Engine.INDUCTOR}
    by_name = {f.name: f for f in KIND.forms}
    added = sum(by_name[d.form].seconds - KIND.unplanned.seconds for d in plan.decisions)
    assert simulate(profile, plan).extra_seconds == pytest.approx(added)
    assert plan.extra_seconds == pytest.approx(added, rel=0.01)


def test_a_form_that_is_faster_than_the_unplanned_one_is_taken_and_counts():
    quick = form("quick", 4 * KIB, 8 * KIB, 6 * KIB, 1.5e-3)
    profile = compiled(kind=Kind("Block", (*KIND.forms, quick)))

    plan = planner.plan(profile, 1 << 40)
    unplanned = planner.plan(profile, 1 << 40, solver="keep_all")

    assert {decision.form for decision in plan.decisions} == {"Block/quick"}
    assert plan.extra_seconds == pytest.approx(-1.5e-3, rel=0.01)
    assert plan.gap == 0
    assert {decision.form for decision in unplanned.decisions} == {"Block/everything"}
    assert unplanned.extra_seconds == 0
    points = planner.frontier(profile, solvers=["optimal"], points=2).points
    assert min(p.extra_seconds for p in points) == pytest.approx(-1.5e-3, rel=0.01)
    assert all(p.bound_seconds <= p.extra_seconds for p in points)


def test_a_floor_that_is_named_can_be_asked_for():
    profile = compiled()
    with pytest.raises(BudgetError) as caught:
        planner.plan(profile, 1)

    assert planner.plan(profile, caught.value.floor_bytes).peak_bytes <= caught.value.floor_bytes


def test_forms_with_other_bits_are_options_only_where_that_is_allowed():
    kind = Kind("Block", (KIND.forms[0], form("rough", 0, 1, 1, exact=False)))
    profile = compiled(kind=kind)
    lowest = planner.plan(profile, 1 << 40, exact=False, solver="keep_all").peak_bytes

    with pytest.raises(BudgetError):
        planner.plan(profile, lowest - 1)

    assert planner.plan(profile, lowest - 1, exact=False).decisions[0].form == "Block/rough"


def test_an_eager_profile_is_not_planned_for_compiled_blocks():
    with pytest.raises(InputError, match="profile with engine='inductor'"):
        planner.plan(eager(), engine="inductor")


def test_beaten_forms_go_and_the_first_stays():
    first = form("first", 9 * KIB, 9 * KIB, 9 * KIB, 9e-3)
    good, bad = form("good", 4 * KIB, 1, 1, 1e-3), form("bad", 5 * KIB, 1, 1, 2e-3)

    assert without_beaten([first, bad, good]) == (first, good)
