"""Every rule of a well-formed graph, broken once."""

from dataclasses import replace

import pytest

from leanstep.errors import GraphError
from leanstep.ir import (
    Block,
    Category,
    Graph,
    ModuleCall,
    Op,
    Phase,
    Save,
    Storage,
    Unpack,
    Value,
)
from leanstep.ir.check import check_blocks, check_graph
from leanstep.testing import random_profile

# x → linear → relu_ (in place, saved) → loss → backward reads what was saved.
WEIGHT, INPUT, HIDDEN, LOSS, GRADIENT = range(5)


def op(name: str, phase: Phase, reads: list[Value], writes: list[Value]) -> Op:
    return Op(name, phase, 0, "model.py:1", tuple(reads), tuple(writes), 8, 0)


GRAPH = Graph(
    ops=(
        op("linear", Phase.FORWARD, [Value(WEIGHT, 0), Value(INPUT, 0)], [Value(HIDDEN, 0)]),
        op("relu_", Phase.FORWARD, [Value(HIDDEN, 0)], [Value(HIDDEN, 1)]),
        op("mean", Phase.FORWARD, [Value(HIDDEN, 1)], [Value(LOSS, 0)]),
        op("relu_backward", Phase.BACKWARD, [Value(HIDDEN, 1)], [Value(GRADIENT, 0)]),
    ),
    storages=(
        Storage(8, Category.PARAMETER, -1, 4, 4),
        Storage(8, Category.INPUT, -1, 4, 4),
        Storage(8, Category.ACTIVATION, 0, 3, 2),
        Storage(4, Category.TEMPORARY, 2, 2, 2),
        Storage(8, Category.GRADIENT, 3, 4, 4),
    ),
    saves=(Save(Value(INPUT, 0), 1, 0, 4), Save(Value(HIDDEN, 1), 0, 2, 4)),
    unpacks=(Unpack(1, 3), Unpack(0, 4)),
    calls=(ModuleCall("", "Net", 0, -1, 0, 2), ModuleCall("layer", "Linear", 0, 0, 0, 1)),
)
BLOCK = Block("", "Net", 0, 0, 2, (0, 1))


def with_item(graph: Graph, part: str, index: int, **changes: object) -> Graph:
    """The graph with one of its ops, storages, saves or calls changed."""
    items = list(getattr(graph, part))
    items[index] = replace(items[index], **changes)
    return replace(graph, **{part: tuple(items)})


BROKEN = {
    "reads before it is written": (
        with_item(GRAPH, "ops", 1, reads=(Value(HIDDEN, 1),)),
        r"relu_ \(op 1, model.py:1\) reads version 1 of storage 2 before it is written",
    ),
    "reads an unknown storage": (
        with_item(GRAPH, "ops", 1, reads=(Value(77, 0),)),
        "reads version 0 of storage 77, which does not exist",
    ),
    "reads an old version": (
        with_item(GRAPH, "ops", 2, reads=(Value(HIDDEN, 0),)),
        "mean .* after it is overwritten",
    ),
    "reads after death": (
        with_item(GRAPH, "ops", 3, reads=(Value(LOSS, 0),)),
        "relu_backward .* after it is gone",
    ),
    "writes a second time": (
        with_item(GRAPH, "ops", 1, writes=(Value(HIDDEN, 0),)),
        "writes version 0 of storage 2 a second time",
    ),
    "skips a version": (
        with_item(GRAPH, "ops", 1, writes=(Value(HIDDEN, 2),)),
        "but version 1 is next",
    ),
    "makes what is born elsewhere": (
        with_item(GRAPH, "storages", LOSS, birth=1),
        "which is born at op 1",
    ),
    "is made by nobody": (
        with_item(GRAPH, "ops", 3, writes=()),
        "storage 4 is not among what op 3 writes",
    ),
    "dies before it could": (
        with_item(GRAPH, "storages", HIDDEN, natural_death=4),
        "storage 2 is born at op 0, could go after op 4 and goes after op 3 of 4",
    ),
    "dies before it is born": (with_item(GRAPH, "storages", LOSS, death=1), "storage 3 is born"),
    "dies after the step": (with_item(GRAPH, "storages", WEIGHT, death=9), "storage 0 is born"),
    "has negative bytes": (with_item(GRAPH, "storages", WEIGHT, nbytes=-1), "has -1 bytes"),
    "falls": (with_item(GRAPH, "ops", 0, rise_bytes=-1), "op 0 .* rises by -1 bytes"),
    "has no name": (with_item(GRAPH, "ops", 0, name=""), "op 0"),
    "runs nowhere": (with_item(GRAPH, "ops", 0, call=5), "runs in call 5, which does not exist"),
    "is saved before it is made": (
        with_item(GRAPH, "saves", 1, position=1),
        "save 1 holds version 1 of storage 2, not there at 1",
    ),
    "is saved after it is overwritten": (
        with_item(GRAPH, "saves", 1, value=Value(HIDDEN, 0)),
        "save 1 holds version 0 of storage 2, not there at 2",
    ),
    "is saved out of order": (
        replace(GRAPH, saves=GRAPH.saves[::-1]),
        "save 1 is made at 0 and let go at 4, after one at 2",
    ),
    "is let go before it is saved": (with_item(GRAPH, "saves", 1, release=1), "let go at 1"),
    "is held after it is gone": (
        with_item(GRAPH, "storages", HIDDEN, death=2),
        "after it is gone",
    ),
    "is never let go": (with_item(GRAPH, "saves", 1, release=-1), "let go at -1"),
    "is saved nowhere": (with_item(GRAPH, "saves", 1, call=9), "made in call 9"),
    "is asked for unsaved": (replace(GRAPH, unpacks=(Unpack(7, 3),)), "save 7 is asked for"),
    "is asked for late": (
        replace(with_item(GRAPH, "saves", 1, release=3), unpacks=(Unpack(1, 4),)),
        "save 1, held from 2 to 3, is asked for at 4",
    ),
    "is asked for out of order": (
        replace(GRAPH, unpacks=GRAPH.unpacks[::-1]),
        "save 1, .* after a request at 4",
    ),
    "is called outside its parent": (
        with_item(GRAPH, "calls", 1, stop=3),
        r"call 1 \(layer\) spans ops 0 to 3, its parent 0 to 2",
    ),
    "never returns": (with_item(GRAPH, "calls", 0, stop=-1), "spans ops 0 to -1"),
    "is its own parent": (with_item(GRAPH, "calls", 1, parent=1), "is inside call 1"),
    "is miscounted": (with_item(GRAPH, "calls", 1, occurrence=1), "is numbered 1"),
}


def test_a_call_without_gradients_is_not_counted() -> None:
    check_graph(with_item(GRAPH, "calls", 1, occurrence=-1))


def test_a_well_formed_graph_passes() -> None:
    check_graph(GRAPH)
    check_blocks(GRAPH, [BLOCK])


@pytest.mark.parametrize("seed", range(20))
def test_the_shipped_fakes_are_well_formed(seed: int) -> None:
    profile = random_profile(seed)

    check_graph(profile.graph)
    check_blocks(profile.graph, profile.blocks)


@pytest.mark.parametrize(("graph", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_graph_is_refused_where_something(graph: Graph, rule: str) -> None:
    with pytest.raises(GraphError, match=rule):
        check_graph(graph)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"stop": 9}, "spans ops 0 to 9"),
        ({"start": 3}, "spans ops 3 to 2"),
        ({"saves": (4,)}, "holds save 4, which does not exist"),
        ({"start": 1}, "holds save 0, made outside of it"),
    ],
)
def test_a_block_is_refused_where_it_is_no_stretch_of_the_step(
    changes: dict[str, object], rule: str
) -> None:
    with pytest.raises(GraphError, match=rule):
        check_blocks(GRAPH, [replace(BLOCK, **changes)])
