"""Dropping the output between two block calls: when it may go, when it comes back, its cost."""

from dataclasses import replace

import pytest

from leanstep.effects import Effect, replay_effect
from leanstep.errors import PlanError
from leanstep.ir import Category, Decision, Engine, Fact, Graph, Identity, Plan, Profile, Value
from leanstep.rebuild.block import BlockGraph, views_of
from leanstep.simulator import base_levels, shifted, simulate
from leanstep.testing import Layer, chain_profile
from leanstep.testing.chains import KIB

# Layers 0 to 5 in blocks of two, layer 6 the head. Layer i reads storage i + 1 and makes i + 2; its
# backward is op 13 - i and asks for what it read.
LAYERS = [[Layer(n * KIB), Layer((n + 1) * KIB)] for n in (1, 3, 5)]
FIRST_BORDER, SECOND_BORDER = 3, 5
INPUT_OF_SECOND_LAYER = 2


def views(profile: Profile) -> tuple[BlockGraph, ...]:
    return views_of(profile.graph, profile.blocks)


def levels(profile: Profile, effect: Effect) -> list[int]:
    """How many bytes more or less are live at each op."""
    before = base_levels(profile)
    return (shifted(before, effect.shifts) - before).tolist()


def with_op(graph: Graph, index: int, **changes: object) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **changes)
    return replace(graph, ops=tuple(ops))


def test_the_border_is_what_the_next_call_saves() -> None:
    first, second, last = views(chain_profile(LAYERS))

    assert first.borders == (FIRST_BORDER,)
    assert second.borders == (SECOND_BORDER,)
    assert last.borders == (), "the head is in no block"


def test_a_call_seen_alone_has_no_borders() -> None:
    profile = chain_profile(LAYERS)

    alone = BlockGraph(profile.graph, profile.blocks[0])

    assert alone.borders == ()
    assert alone.candidates == views(profile)[0].candidates


def test_calls_are_paired_in_the_order_of_the_step() -> None:
    profile = chain_profile(LAYERS)
    shuffled = profile.blocks[::-1]

    last, second, first = views_of(profile.graph, shuffled)

    assert (first.later, second.later, last.later) == (second.block, last.block, None)


def test_an_output_that_must_not_be_made_again_is_no_border() -> None:
    layers = [[Layer(KIB), Layer(KIB, facts=(Fact.HOST_READ,))], [Layer(KIB), Layer(KIB)]]

    assert views(chain_profile(layers))[0].borders == ()


def test_an_output_that_a_third_call_reads_is_no_border() -> None:
    profile = chain_profile(LAYERS)
    reads = (*profile.graph.ops[4].reads, Value(FIRST_BORDER, 0))
    graph = with_op(profile.graph, 4, reads=reads)

    assert views_of(graph, profile.blocks)[0].borders == ()


def test_an_output_that_is_saved_outside_the_two_calls_is_no_border() -> None:
    profile = chain_profile(LAYERS)
    saves = list(profile.graph.saves)
    saves[6] = replace(saves[6], value=Value(FIRST_BORDER, 0))

    assert views_of(replace(profile.graph, saves=tuple(saves)), profile.blocks)[0].borders == ()


def test_an_output_that_outlives_forward_by_itself_is_no_border() -> None:
    profile = chain_profile(LAYERS)
    storages = list(profile.graph.storages)
    storages[FIRST_BORDER] = replace(storages[FIRST_BORDER], natural_death=11)
    graph = replace(profile.graph, storages=tuple(storages))

    assert views_of(graph, profile.blocks)[0].borders == ()


def test_without_a_request_in_backward_nothing_brings_the_border_back() -> None:
    profile = chain_profile(LAYERS)
    later = set(profile.blocks[1].saves)
    unpacks = tuple(unpack for unpack in profile.graph.unpacks if unpack.save not in later)

    assert views_of(replace(profile.graph, unpacks=unpacks), profile.blocks)[0].borders == ()


def test_a_border_lives_from_the_next_calls_first_request_to_its_last_use() -> None:
    profile = chain_profile(LAYERS)
    first = views(profile)[0]

    effect = replay_effect(first, {FIRST_BORDER})

    # Its call ends at op 4; backward asks for layer 3's input at op 10, for the border at op 11.
    own = tuple(shift for shift in effect.shifts if shift.category is Category.ACTIVATION)
    changes = levels(profile, Effect(own))
    assert [place for place, change in enumerate(changes) if change] == list(range(4, 10))
    assert set(changes[4:10]) == {-2 * KIB}
    assert [(replay.op, replay.position) for replay in effect.replays] == [(1, 10)]


def test_a_border_is_rebuilt_from_the_input_only_if_what_is_between_is_dropped() -> None:
    _, second, _ = views(chain_profile(LAYERS))
    inside = FIRST_BORDER + 1

    assert second.reads_input_early({SECOND_BORDER}) == frozenset()
    assert second.reads_input_early({SECOND_BORDER, inside}) == {FIRST_BORDER}
    assert second.reads_input_early({inside}) == frozenset()


def test_what_rebuilding_the_border_made_stays_for_the_calls_own_requests() -> None:
    first = views(chain_profile(LAYERS))[0]

    effect = replay_effect(first, {FIRST_BORDER, INPUT_OF_SECOND_LAYER})

    assert [(replay.op, replay.position) for replay in effect.replays] == [(0, 10), (1, 10)]


def test_a_call_that_only_takes_a_border_costs_what_its_hooks_hold() -> None:
    second = views(chain_profile(LAYERS))[1]

    assert replay_effect(second, ()) == Effect()
    taken = replay_effect(second, (), border_in=True)
    assert taken.shifts
    assert not taken.replays


def make_plan(profile: Profile, *drops: set[int]) -> Plan:
    decisions = []
    takes = False
    for view, dropped in zip(views(profile), drops, strict=True):
        keys = tuple(view.storage_key(number) for number in sorted(dropped))
        engine = Engine.REPLAY if keys or takes else Engine.UNTOUCHED
        decisions.append(
            Decision(view.block.path, 0, (), engine, keys, 0, 0, 0.0, "", border_in=takes)
        )
        takes = bool(dropped.intersection(view.borders))
    return Plan("test", 0, 0, 0, 0, 1.0, 0.0, 0.0, tuple(decisions), Identity(""), "")


def test_the_effects_of_two_borders_add_up() -> None:
    profile = chain_profile(LAYERS)
    both = make_plan(profile, {FIRST_BORDER}, {SECOND_BORDER}, set())

    line = simulate(profile, both)

    replayed = [profile.seconds(op) for op in (1, 3)]
    assert line.extra_seconds == pytest.approx(sum(replayed))
    assert line.peak_bytes < simulate(profile).peak_bytes


def test_a_border_rebuilt_from_one_that_is_gone_is_refused() -> None:
    profile = chain_profile(LAYERS)
    inside = FIRST_BORDER + 1

    with pytest.raises(PlanError, match="before it is there"):
        simulate(profile, make_plan(profile, {FIRST_BORDER}, {inside, SECOND_BORDER}, set()))


def test_a_dropped_output_that_the_next_call_does_not_take_is_refused() -> None:
    profile = chain_profile(LAYERS)
    plan = make_plan(profile, {FIRST_BORDER}, set(), set())
    decisions = tuple(replace(decision, border_in=False) for decision in plan.decisions)

    with pytest.raises(PlanError, match="border_in"):
        simulate(profile, replace(plan, decisions=decisions))
