"""Steps whose blocks are random graphs, as unruly as eager code can be.

Ops read one to three earlier values, the block's input among them (a residual connection), and at
times the output of an older block. Some write in place, some have two outputs, some need workspace,
draw random numbers, or must not run again. Autograd saves inputs and outputs at random, and asks
for most of them in backward, in the opposite order or not quite.
"""

import random
from dataclasses import dataclass, field

from leanstep.ir import (
    Block,
    Category,
    Cost,
    Fact,
    Graph,
    ModuleCall,
    Op,
    Phase,
    Profile,
    Save,
    Storage,
    Unpack,
    Value,
)
from leanstep.ir.check import check_blocks, check_graph
from leanstep.testing.chains import KIB, profile_of

PARAMETERS, BATCH, GENERATOR = 0, 1, 2


def dag_profile(
    seed: int,
    *,
    num_blocks: int = 3,
    most_ops: int = 4,
    is_sequential: bool = False,
    is_ordered: bool = True,
) -> Profile:
    """Make a step over a chain of random blocks, from a seed.

    With `is_sequential` the blocks are the children of one Sequential, so that they can run as
    one; without `is_ordered` backward is not quite the opposite of forward.
    """
    step = _Step(random.Random(seed))
    for _ in range(num_blocks):
        step.block(step.draw.randint(1, most_ops))
    step.head()
    step.backward(is_ordered=is_ordered)
    graph, blocks = step.graph(is_sequential=is_sequential)
    check_graph(graph)
    check_blocks(graph, blocks)
    return profile_of(graph, blocks, tuple(step.costs), model="random graph")


@dataclass
class _Life:
    """A storage while the step is put together; its last use and release are not known yet."""

    nbytes: int
    category: Category
    birth: int
    last_use: int
    release: int = 0
    version: int = 0
    is_saved: bool = False


@dataclass
class _Step:
    draw: random.Random
    ops: list[Op] = field(default_factory=list)
    lives: list[_Life] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    # Each save: its value, the op that made it, and its position.
    saved: list[tuple[Value, int, int]] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    unpacks: list[Unpack] = field(default_factory=list)

    def __post_init__(self) -> None:
        for category in (Category.PARAMETER, Category.INPUT, Category.GENERATOR):
            nbytes = 0 if category is Category.GENERATOR else self._nbytes()
            self.lives.append(_Life(nbytes, category, -1, -1))
        self.outputs.append(BATCH)

    def _nbytes(self) -> int:
        return self.draw.randint(1, 100) * KIB

    def block(self, num_ops: int) -> None:
        """Add a block; its input is the output of the one before, at times of an older one too."""
        start, own = len(self.ops), list[int]()
        visible = [self.outputs[-1]]
        if self.draw.random() < 0.2:
            visible.append(self.draw.choice(self.outputs))
        for _ in range(num_ops):
            changeable = [number for number in own if not self.lives[number].is_saved]
            if changeable and self.draw.random() < 0.2:
                self._in_place(self.draw.choice(changeable), visible + own)
            else:
                own.extend(self._new(visible + own))
        for number in own:
            # A local variable of the forward function lives until it returns.
            if self.draw.random() < 0.3:
                self.lives[number].last_use = len(self.ops) - 1
        self.outputs.append(own[-1])
        self.blocks.append((start, len(self.ops)))

    def head(self) -> None:
        """Add an op in no block: the loss."""
        self._new([self.outputs[-1]])

    def _new(self, visible: list[int]) -> list[int]:
        """An op with new outputs."""
        index, count = len(self.ops), self.draw.choice([1, 1, 1, 2])
        born = list(range(len(self.lives), len(self.lives) + count))
        sources = self._sources(visible)
        for number in sources:
            self._save(number, index, index, share=0.5)
        for _ in born:
            self.lives.append(_Life(self._nbytes(), Category.ACTIVATION, index, index))
        self._add(sources, born, sum(self.lives[number].nbytes for number in born))
        for number in born:
            self._save(number, index, index + 1, share=0.4)
        return born

    def _in_place(self, target: int, visible: list[int]) -> None:
        others = [number for number in self._sources(visible) if number != target]
        self._add([target, *others], [], 0, changed=target)
        self._save(target, len(self.ops) - 1, len(self.ops), share=0.4)

    def _sources(self, visible: list[int]) -> list[int]:
        count = min(len(visible), self.draw.randint(1, 3))
        return sorted(set(self.draw.sample(visible, count)))

    def _save(self, number: int, op: int, position: int, *, share: float) -> None:
        if self.draw.random() < share:
            self.lives[number].is_saved = True
            self.saved.append((Value(number, self.lives[number].version), op, position))

    def _add(
        self, sources: list[int], born: list[int], rise_bytes: int, changed: int | None = None
    ) -> None:
        draw, index = self.draw, len(self.ops)
        reads = [PARAMETERS, *sources] if draw.random() < 0.5 else list(sources)
        is_random = draw.random() < 0.08
        changes = [n for n in (changed, GENERATOR if is_random else None) if n is not None]
        reads += [GENERATOR] * is_random
        values = tuple(Value(number, self.lives[number].version) for number in reads)
        for number in changes:
            self.lives[number].version += 1
        writes = tuple(Value(number, self.lives[number].version) for number in [*born, *changes])
        for number in {*reads, *changes}:
            self.lives[number].last_use = index
        workspace = draw.choice([0, 0, draw.randint(1, 40) * KIB])
        facts = [Fact.HOST_READ] * (draw.random() < 0.04) + [Fact.RANDOM] * is_random
        self._op("op", Phase.FORWARD, values, writes, rise_bytes + workspace, tuple(facts))

    def _op(
        self,
        name: str,
        phase: Phase,
        reads: tuple[Value, ...],
        writes: tuple[Value, ...],
        rise_bytes: int,
        facts: tuple[Fact, ...] = (),
    ) -> None:
        seconds = self.draw.choice([1e-6, 1e-3 * self.draw.randint(1, 20)])
        self.costs.append(Cost(f"{name} {len(self.ops)}", seconds))
        source, cost = f"model.py:{len(self.ops)}", len(self.ops)
        self.ops.append(Op(name, phase, -1, source, reads, writes, rise_bytes, cost, facts))

    def backward(self, *, is_ordered: bool) -> None:
        """Add an op for each forward op; it asks for what that one saved."""
        order = list(range(len(self.ops)))[::-1]
        if not is_ordered:
            for place in range(1, len(order)):
                other = self.draw.randrange(max(0, place - 3), place + 1)
                order[place], order[other] = order[other], order[place]
        first, last = len(self.ops), 2 * len(self.ops)
        asked_at = {op: first + place for place, op in enumerate(order)}
        for position in range(first, last):
            self._gradient(position, last)
        for number, (value, op, position) in enumerate(self.saved):
            call = next((i for i, (a, b) in enumerate(self.blocks) if a <= op < b), -1)
            asked = asked_at[op]
            longer = 0 if is_ordered else self.draw.choice([0, 0, self.draw.randint(0, 4)])
            release = min(last, asked + 1 + longer)
            self.saves.append(Save(value, call, position, release))
            self.lives[value.storage].release = max(self.lives[value.storage].release, release)
            if self.draw.random() < 0.9:
                self.unpacks.append(Unpack(number, asked))
        self.unpacks.sort(key=lambda unpack: unpack.position)

    def _gradient(self, position: int, last: int) -> None:
        nbytes = self._nbytes()
        death = min(last - 1, position + self.draw.randint(1, 2))
        before = (Value(len(self.lives) - 1, 0),) if self.ops[-1].phase is Phase.BACKWARD else ()
        number = len(self.lives)
        self.lives.append(_Life(nbytes, Category.TEMPORARY, position, death))
        self._op("op_backward", Phase.BACKWARD, before, (Value(number, 0),), nbytes)

    def graph(self, *, is_sequential: bool) -> tuple[Graph, tuple[Block, ...]]:
        """Put it together."""
        spans, shift = self.blocks, 1 if is_sequential else 0
        calls = [ModuleCall("layers", "Sequential", 0, -1, 0, spans[-1][1])] * shift
        parent = shift - 1
        calls += [
            ModuleCall(f"layers.{place}", "Block", 0, parent, *span)
            for place, span in enumerate(spans)
        ]
        saves = [
            Save(s.value, s.call + shift if s.call >= 0 else -1, s.position, s.release)
            for s in self.saves
        ]
        blocks = [
            Block(
                f"layers.{place}",
                "Block",
                0,
                *span,
                tuple(n for n, save in enumerate(self.saves) if save.call == place),
            )
            for place, span in enumerate(spans)
        ]
        ops = [self._in_its_call(index, op, shift) for index, op in enumerate(self.ops)]
        storages = tuple(self._storage(life) for life in self.lives)
        graph = Graph(tuple(ops), storages, tuple(saves), tuple(self.unpacks), tuple(calls))
        return graph, tuple(blocks)

    def _in_its_call(self, index: int, op: Op, shift: int) -> Op:
        call = next((i + shift for i, (a, b) in enumerate(self.blocks) if a <= index < b), -1)
        return Op(
            op.name,
            op.phase,
            call,
            op.source,
            op.reads,
            op.writes,
            op.rise_bytes,
            op.cost,
            op.facts,
        )

    def _storage(self, life: _Life) -> Storage:
        last = len(self.ops) - 1
        natural = last if life.birth < 0 else life.last_use
        return Storage(
            life.nbytes, life.category, life.birth, max(natural, life.release - 1), natural
        )
