"""The schedule of replays: what runs when backward asks, in which order, and what goes when."""

import pytest

from leanstep.ir import Value
from leanstep.rebuild.program import Rerun, Run, Session, UnreachableError, build_program

INPUT = Value(0, 0)


def op(index: int, reads: list[Value], *writes: Value) -> Rerun:
    return Rerun(index, tuple(reads), writes)


def first(storage: int) -> Value:
    return Value(storage, 0)


def session_of(
    ops: list[Rerun], wanted: list[Value], available: tuple[Value, ...] = (INPUT,)
) -> Session:
    counts = {value: wanted.count(value) for value in wanted}
    return Session(build_program(ops, counts, frozenset(available)))


def indices(runs: list[Run]) -> list[int]:
    return [run.op.index for run in runs]


def frees(runs: list[Run]) -> dict[int, tuple[int, ...]]:
    return {run.op.index: run.frees for run in runs if run.frees}


CHAIN = [
    op(0, [INPUT], first(1)),
    op(1, [first(1)], first(2)),
    op(2, [first(2)], first(3)),
]

# Op 1 reads storage 1 before op 2 overwrites it.
READ_THEN_OVERWRITTEN = [
    op(0, [INPUT], first(1)),
    op(1, [first(1)], first(2)),
    op(2, [first(1)], Value(1, 1)),
]

GENERATOR = 9
DRAWS = [
    op(0, [INPUT, Value(GENERATOR, 0)], first(1), Value(GENERATOR, 1)),
    op(1, [INPUT, Value(GENERATOR, 1)], first(2), Value(GENERATOR, 2)),
    op(2, [INPUT, Value(GENERATOR, 2)], first(3), Value(GENERATOR, 3)),
]
WITH_GENERATOR = (INPUT, Value(GENERATOR, 0))


def test_only_the_ops_a_request_needs_run_and_only_then() -> None:
    session = session_of(CHAIN, [first(2), first(3)])

    assert indices(session.request(first(2))) == [0, 1]
    assert indices(session.request(first(3))) == [2]


def test_no_op_runs_twice_for_two_requests() -> None:
    ops = [*CHAIN, op(3, [first(2)], first(4))]
    session = session_of(ops, [first(3), first(4), first(2)])

    ran = [index for n in (4, 3, 2) for index in indices(session.request(first(n)))]

    assert sorted(ran) == [0, 1, 2, 3]


def test_an_op_that_nobody_needs_never_runs() -> None:
    session = session_of(CHAIN, [first(2)])

    assert list(session.program.reruns) == [0, 1]


def test_kept_values_are_where_rebuilding_starts() -> None:
    session = session_of(CHAIN, [first(3)], available=(INPUT, first(2)))

    assert session.program.sources == {first(3): frozenset({first(2)})}
    assert indices(session.request(first(3))) == [2]


def test_a_rebuilt_value_goes_after_its_last_reader_and_the_asked_one_when_served() -> None:
    session = session_of(CHAIN, [first(3)])

    runs = session.request(first(3))

    assert frees(runs) == {1: (1,), 2: (2,)}
    assert session.served(first(3))
    assert not session.present


def test_a_rebuilt_value_that_a_later_request_needs_stays() -> None:
    session = session_of(CHAIN, [first(2), first(3)])

    assert frees(session.request(first(2))) == {1: (1,)}
    assert not session.served(first(2)), "op 2 still reads it"
    assert frees(session.request(first(3))) == {2: (2,)}
    assert session.served(first(3))


def test_a_value_saved_twice_stays_until_it_is_served_twice() -> None:
    session = session_of(CHAIN, [first(1), first(1)])

    assert indices(session.request(first(1))) == [0]
    assert not session.served(first(1))
    assert indices(session.request(first(1))) == []
    assert session.served(first(1))


def test_an_output_that_nobody_asks_for_goes_at_once() -> None:
    ops = [op(0, [INPUT], first(1), first(2))]
    session = session_of(ops, [first(1)])

    assert frees(session.request(first(1))) == {0: (2,)}


def test_the_reader_of_an_old_version_runs_before_its_writer() -> None:
    overwritten = Value(1, 1)
    session = session_of(READ_THEN_OVERWRITTEN, [overwritten, first(2)])

    assert indices(session.request(overwritten)) == [0, 1, 2]
    assert indices(session.request(first(2))) == []


def test_what_that_reader_starts_from_is_needed_as_long_as_its_writer() -> None:
    other = first(5)
    ops = [*READ_THEN_OVERWRITTEN]
    ops[1] = op(1, [first(1), other], first(2))
    program = build_program(ops, {Value(1, 1): 1, first(2): 1}, frozenset([INPUT, other]))

    assert program.sources[Value(1, 1)] == {INPUT, other}
    assert program.needs == {INPUT: 2, other: 2}


def test_an_in_place_op_waits_when_the_old_version_is_asked_for_first() -> None:
    overwritten = Value(1, 1)
    session = session_of(READ_THEN_OVERWRITTEN, [overwritten, first(2)])

    assert indices(session.request(first(2))) == [0, 1]
    assert indices(session.request(overwritten)) == [2]


def test_a_chain_of_in_place_ops_runs_in_order_on_one_storage() -> None:
    ops = [
        op(0, [], first(1)),
        op(1, [first(1)], Value(1, 1)),
        op(2, [Value(1, 1), INPUT], Value(1, 2)),
        op(3, [Value(1, 2)], first(2)),
    ]
    session = session_of(ops, [first(2)])

    runs = session.request(first(2))

    assert indices(runs) == [0, 1, 2, 3]
    assert frees(runs) == {3: (1,)}


def test_a_version_that_was_overwritten_is_built_anew() -> None:
    overwritten = Value(1, 1)
    session = session_of(READ_THEN_OVERWRITTEN[::2], [overwritten, first(1)])

    assert indices(session.request(overwritten)) == [0, 2]
    assert indices(session.request(first(1))) == [0]


def test_a_later_draw_runs_after_the_earlier_ones() -> None:
    session = session_of(DRAWS, [first(3)], WITH_GENERATOR)

    assert indices(session.request(first(3))) == [0, 1, 2]


def test_draws_asked_for_in_order_run_one_by_one() -> None:
    session = session_of(DRAWS, [first(1), first(2), first(3)], WITH_GENERATOR)

    assert [indices(session.request(first(n))) for n in (1, 2, 3)] == [[0], [1], [2]]


def test_draws_asked_for_in_the_order_of_backward_run_once() -> None:
    session = session_of(DRAWS, [first(1), first(2), first(3)], WITH_GENERATOR)

    assert [indices(session.request(first(n))) for n in (3, 2, 1)] == [[0, 1, 2], [], []]


@pytest.mark.parametrize("ops", [CHAIN, READ_THEN_OVERWRITTEN, DRAWS])
def test_a_second_backward_rebuilds_what_the_first_one_let_go(ops: list[Rerun]) -> None:
    wanted = ops[-1].writes[0]
    session = session_of(ops, [wanted], WITH_GENERATOR)
    rounds = []

    for _ in range(3):
        rounds.append(session.request(wanted))
        assert session.served(wanted)

    assert indices(rounds[0]) == indices(rounds[1]) == indices(rounds[2])
    assert frees(rounds[0]) == frees(rounds[1]) == frees(rounds[2])


def test_what_no_op_makes_and_nobody_keeps_is_unreachable() -> None:
    with pytest.raises(UnreachableError, match="storage 0, version 0, is gone"):
        build_program(CHAIN, {first(3): 1}, frozenset())


def test_an_op_that_must_not_run_again_makes_what_follows_unreachable() -> None:
    without_the_middle = [CHAIN[0], CHAIN[2]]

    with pytest.raises(UnreachableError, match="storage 2"):
        build_program(without_the_middle, {first(3): 1}, frozenset({INPUT}))


def test_a_version_that_the_kept_storage_has_left_behind_is_not_there() -> None:
    ops = [op(1, [first(1)], first(2))]

    with pytest.raises(UnreachableError, match="storage 1, version 0"):
        build_program(ops, {first(2): 1}, frozenset({Value(1, 1)}))
