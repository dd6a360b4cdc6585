"""Any program of ops, in place or not, rebuilds the right contents and leaves nothing behind."""

import random

import pytest

from leanstep.ir import Value
from leanstep.rebuild.program import Rerun, Run, Session, build_program

hypothesis = pytest.importorskip("hypothesis")

seeds = hypothesis.strategies.integers(min_value=0, max_value=2**32)

SOURCES = (Value(0, 0), Value(1, 0))


def random_ops(draw: random.Random) -> list[Rerun]:
    """Ops that make new storages, overwrite old ones, or draw from a generator (storage 1)."""
    current = dict(SOURCES)
    ops = []
    for index in range(draw.randint(1, 9)):
        readable = [Value(s, v) for s, v in current.items() if s != 1]
        reads = set(draw.sample(readable, min(len(readable), draw.randint(1, 3))))
        writes = []
        if draw.random() < 0.3:
            reads.add(Value(1, current[1]))
            current[1] += 1
            writes.append(Value(1, current[1]))
        own = sorted(value.storage for value in reads if value.storage > 1)
        if own and draw.random() < 0.4:
            target = draw.choice(own)
            current[target] += 1
        else:
            target = len(current)
            current[target] = 0
        # The generator comes last, as the recorder writes it.
        writes.insert(0, Value(target, current[target]))
        ops.append(Rerun(index, tuple(sorted(reads)), tuple(writes)))
    return ops


def contents_of(ops: list[Rerun]) -> dict[Value, object]:
    """What the forward pass wrote: each value as the tree of what it was made from."""
    contents: dict[Value, object] = {value: str(value) for value in SOURCES}
    for op in ops:
        made = tuple(contents[value] for value in op.reads)
        contents.update((value, (op.index, value.storage, made)) for value in op.writes)
    return contents


class Memory:
    """Run a schedule on storages that hold one version each."""

    def __init__(self, session: Session, truth: dict[Value, object]) -> None:
        self.session, self.truth = session, truth
        self.storages: dict[int, tuple[int, object]] = {}
        self.ran: list[int] = []

    def read(self, value: Value) -> object:
        if value in self.session.program.all_sources:
            return self.truth[value]
        version, content = self.storages[value.storage]
        assert version == value.version, f"storage {value.storage} has moved on"
        return content

    def run(self, run: Run) -> None:
        self.ran.append(run.op.index)
        made = tuple(self.read(value) for value in run.op.reads)
        for value in run.op.writes:
            content = (run.op.index, value.storage, made)
            self.storages[value.storage] = (value.version, content)
        for storage in run.frees:
            del self.storages[storage]

    def ask(self, value: Value) -> None:
        for run in self.session.request(value):
            self.run(run)
        assert self.read(value) == self.truth[value]
        if self.session.served(value):
            del self.storages[value.storage]


def made_for(draw: random.Random, ops: list[Rerun]) -> tuple[Memory, list[Value]]:
    """Drop some storages that the ops make, and list what autograd saved of them."""
    final = {value.storage: value.version for op in ops for value in op.writes}
    storages = sorted(final.keys() - {0, 1})
    dropped = set(draw.sample(storages, draw.randint(1, len(storages)))) if storages else set()
    saved = [v for op in ops for v in op.writes if v.storage in dropped and draw.random() < 0.7]
    saved += [value for value in saved if draw.random() < 0.2]
    kept = {Value(s, v) for s, v in final.items() if s > 1 and s not in dropped}
    counts = {value: saved.count(value) for value in saved}
    program = build_program(ops, counts, frozenset({*SOURCES, *kept}))
    return Memory(Session(program), contents_of(ops)), saved


@hypothesis.given(seeds)
@hypothesis.settings(max_examples=400)
def test_every_request_in_any_order_gets_the_contents_of_forward(seed: int) -> None:
    draw = random.Random(seed)
    memory, saved = made_for(draw, random_ops(draw))
    draw.shuffle(saved)

    for value in saved:
        memory.ask(value)

    assert not memory.storages
    assert not memory.session.present


@hypothesis.given(seeds)
@hypothesis.settings(max_examples=200)
def test_a_second_backward_gets_the_same_contents(seed: int) -> None:
    draw = random.Random(seed)
    memory, saved = made_for(draw, random_ops(draw))

    for value in [*reversed(saved), *reversed(saved)]:
        memory.ask(value)


@hypothesis.given(seeds)
@hypothesis.settings(max_examples=200)
def test_where_nothing_is_overwritten_no_op_runs_twice(seed: int) -> None:
    draw = random.Random(seed)
    ops = random_ops(draw)
    hypothesis.assume(all(v.version == 0 for op in ops for v in op.writes if v.storage != 1))
    memory, saved = made_for(draw, ops)

    for value in reversed(saved):
        memory.ask(value)

    assert len(memory.ran) == len(set(memory.ran))
