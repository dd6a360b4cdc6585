"""Turn the profile of an eager step into that of the step with compiled blocks.

Where a block call is compiled, its ops of forward become one op, and its ops of backward another;
what was born and died inside is gone, and one storage stands for all that the compiled forward
hands over to backward. The rest stays as it was recorded. The result is an ordinary profile.

Ops of a call's backward are those between the first and the last that autograd ran for it. Where
the backward passes of two calls interleave, or a call has none, the call cannot be told apart from
the rest of the step and stays eager.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from leanstep.ir import (
    Block,
    Category,
    Cost,
    Engine,
    Exclusion,
    Graph,
    Kind,
    LossCall,
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

UNTELLABLE = "its backward pass cannot be told apart from the rest of the step's"


@dataclass(frozen=True, slots=True)
class _Span:
    """The ops of one compiled call, each a range: forward, and backward."""

    block: Block
    kind: Kind
    forward: range
    backward: range


def condense(profile: Profile, kind_of: Mapping[int, int], kinds: Sequence[Kind]) -> Profile:
    """The profile with some blocks compiled: `kind_of` gives the kind of a block's number."""
    spans, untold = _spans(profile, kind_of, kinds)
    work = _Condenser(profile, spans, kinds)
    graph, blocks = work.graph(), tuple(work.blocks())
    check_graph(graph)
    check_blocks(graph, blocks)
    exclusions = [
        Exclusion(block.path, block.children, Engine.INDUCTOR, UNTELLABLE) for block in untold
    ]
    return replace(
        profile,
        graph=graph,
        blocks=blocks,
        costs=(*profile.costs, *work.costs()),
        kinds=tuple(kinds),
        is_compiled=True,
        # Compiled code issues its kernels in no time.
        issue_seconds=0.0,
        copy_seconds=0.0,
        exclusions=(*profile.exclusions, *dict.fromkeys(exclusions)),
    )


def _spans(
    profile: Profile, kind_of: Mapping[int, int], kinds: Sequence[Kind]
) -> tuple[dict[int, _Span], list[Block]]:
    """The ops of each compiled call by its number, and the calls that must stay eager."""
    graph = profile.graph
    found = {}
    untold = []
    for number, kind in kind_of.items():
        block = profile.blocks[number]
        backward = _backward_ops(graph, block)
        if backward and block.start < block.stop:
            forward = range(block.start, block.stop)
            found[number] = _Span(block, kinds[kind], forward, backward)
        else:
            untold.append(block)
    order = sorted(found, key=lambda number: found[number].backward.start)
    for before, after in itertools.pairwise(order):
        if found[before].backward.stop > found[after].backward.start:
            untold += [found[before].block, found[after].block]
    names = {(block.path, block.occurrence, block.children) for block in untold}
    told = {
        number: span
        for number, span in found.items()
        if (span.block.path, span.block.occurrence, span.block.children) not in names
    }
    return told, untold


def _backward_ops(graph: Graph, block: Block) -> range:
    """From the first to the last op of backward that belongs to a call."""
    own = set(block.saves)
    inside = {
        index
        for index, call in enumerate(graph.calls)
        if block.start <= call.start and call.stop <= block.stop and _is_in(call.path, block)
    }
    places = [
        index
        for index, op in enumerate(graph.ops)
        if op.phase is Phase.BACKWARD and op.call in inside
    ]
    # Not where saves are let go: what nobody asks for may live to the end of the step.
    asked = {unpack.position for unpack in graph.unpacks if unpack.save in own}
    places += [
        place
        for place in asked
        if place < len(graph.ops) and graph.ops[place].phase is Phase.BACKWARD
    ]
    return range(min(places), max(places) + 1) if places else range(0)


def _is_in(path: str, block: Block) -> bool:
    prefix = f"{block.path}." if block.path else ""
    if block.children:
        owners = [f"{prefix}{child}" for child in block.children]
        return any(path == owner or path.startswith(f"{owner}.") for owner in owners)
    return path == block.path or path.startswith(prefix)


class _Condenser:
    """Make the new graph: every op, storage, save and call gets its new number."""

    def __init__(self, profile: Profile, spans: dict[int, _Span], kinds: Sequence[Kind]) -> None:
        self.profile, self.old, self.spans, self.kinds = profile, profile.graph, spans, kinds
        self.new_op = self._number_ops()
        self.owner = self._owners()
        self.writers = self._writers()
        self.dropped_saves = {index for span in spans.values() for index in span.block.saves}
        self.seen_outside = self._seen_outside()
        self.deaths = self._deaths()
        self.new_storage = self._number_storages()

    def graph(self) -> Graph:
        """The condensed graph."""
        kept = [self._kept_storage(span) for span in self.spans.values()]
        saves, unpacks = self._saves_and_unpacks()
        return Graph(
            ops=tuple(self._ops()),
            storages=(*self._storages(), *kept),
            saves=saves,
            unpacks=unpacks,
            calls=tuple(self._calls()),
            is_on_host=self.profile.graph.is_on_host,
            loss=self._loss(),
        )

    def _loss(self) -> LossCall | None:
        loss = self.old.loss
        number = None if loss is None else self.new_storage.get(loss.logits)
        return None if loss is None or number is None else replace(loss, logits=number)

    def costs(self) -> Iterable[Cost]:
        """What forward and backward of each compiled kind take, unplanned; two for each kind."""
        for kind in self.kinds:
            yield Cost(f"{kind.name} forward", kind.unplanned.forward_seconds)
            yield Cost(f"{kind.name} backward", kind.unplanned.backward_seconds)

    def blocks(self) -> Iterable[Block]:
        """The blocks at their new places."""
        for number, block in enumerate(self.profile.blocks):
            span = self.spans.get(number)
            start = self.new_op[block.start]
            if span is None:
                saves = tuple(self.new_save[index] for index in block.saves)
                yield replace(block, start=start, stop=self._ceil(block.stop), saves=saves)
            else:
                saves = (self.own_save[number],)
                kind = self.kinds.index(span.kind)
                yield replace(block, start=start, stop=start + 1, saves=saves, kind=kind)

    def _number_ops(self) -> list[int]:
        """For each op the number of the one that stands for it; at the end, how many there are."""
        inner = set[int]()
        for span in self.spans.values():
            for ops in (span.forward, span.backward):
                inner.update(ops[1:])
        numbers, count = [], 0
        for index in range(len(self.old.ops)):
            count += index not in inner
            numbers.append(count - 1)
        return [*numbers, count]

    def _owners(self) -> dict[int, tuple[int, Phase]]:
        """For each old op inside a compiled call, the call's number and the phase."""
        found = {}
        for number, span in self.spans.items():
            found.update(dict.fromkeys(span.forward, (number, Phase.FORWARD)))
            found.update(dict.fromkeys(span.backward, (number, Phase.BACKWARD)))
        return found

    def _writers(self) -> list[list[int]]:
        """For each storage the old ops that wrote its versions, -1 for what was there before."""
        writers = [[-1] if storage.birth < 0 else [] for storage in self.old.storages]
        for index, op in enumerate(self.old.ops):
            for value in op.writes:
                writers[value.storage].append(index)
        return writers

    def _version(self, value: Value) -> int:
        """The version of a value when all writes of one op count as one."""
        writers = self.writers[value.storage][: value.version + 1]
        return len({self._new(writer) for writer in writers}) - 1

    def _new(self, op: int) -> int:
        return self.new_op[op] if op >= 0 else -1

    def _ceil(self, position: int) -> int:
        """The position behind all that happens before an old one."""
        return self.new_op[position - 1] + 1 if position else 0

    def _deaths(self) -> list[int]:
        """The last op that each storage lives through.

        Autograd holds less than in the eager step: what compiled calls save is theirs alone, but
        for arguments and outputs.
        """
        deaths = [self._new(storage.natural_death) for storage in self.old.storages]

        def held(number: int, last: int) -> None:
            deaths[number] = max(deaths[number], last)

        for index, save in enumerate(self.old.saves):
            if index not in self.dropped_saves:
                held(save.value.storage, self._ceil(save.release) - 1)
        for span in self.spans.values():
            form = span.kind.unplanned
            touched = {v.storage for i in span.forward for v in self.old.ops[i].reads}
            touched.update(v.storage for i in span.forward for v in self.old.ops[i].writes)
            for number in touched & self.seen_outside:
                is_own = self.old.storages[number].birth >= span.forward.start
                if form.holds_outputs if is_own else form.holds_arguments:
                    held(number, self._new(span.backward.start))
        return deaths

    def _number_storages(self) -> dict[int, int]:
        """The storages that are still there, by their old numbers."""
        numbers: dict[int, int] = {}
        for number, storage in enumerate(self.old.storages):
            owner = self.owner.get(storage.birth)
            if owner is not None:
                is_inner = self.deaths[number] <= self._new(storage.birth)
                if owner[1] is Phase.FORWARD:
                    is_inner = number not in self.seen_outside
                if is_inner:
                    continue
            numbers[number] = len(numbers)
        return numbers

    def _seen_outside(self) -> set[int]:
        """The storages that are not made inside compiled calls, and the outputs of these.

        Outputs are what others read or save. What only its own backward reads is no output, however
        long it lives (autocast holds its casts of weights to its own end).
        """
        found = {
            i for i, storage in enumerate(self.old.storages) if storage.birth not in self.owner
        }
        for index, op in enumerate(self.old.ops):
            here = self.owner.get(index, (-1, op.phase))[0]
            for value in op.reads:
                maker = self.owner.get(self.old.storages[value.storage].birth)
                if maker is not None and maker[1] is Phase.FORWARD and maker[0] != here:
                    found.add(value.storage)
        for index, save in enumerate(self.old.saves):
            if index not in self.dropped_saves:
                found.add(save.value.storage)
        return found

    def _storages(self) -> Iterable[Storage]:
        for number in self.new_storage:
            storage = self.old.storages[number]
            death = self.deaths[number]
            birth = self._new(storage.birth)
            natural = min(death, self._new(storage.natural_death))
            yield replace(
                storage,
                birth=birth,
                death=max(birth, death),
                natural_death=max(birth, natural),
            )

    def _kept_storage(self, span: _Span) -> Storage:
        forward, backward = self._new(span.forward.start), self._new(span.backward.start)
        nbytes = span.kind.unplanned.kept_bytes
        return Storage(nbytes, Category.ACTIVATION, forward, backward, forward)

    def _kept_value(self, number: int) -> Value:
        return Value(len(self.new_storage) + list(self.spans).index(number), 0)

    def _ops(self) -> Iterable[Op]:
        done = set()
        for index, op in enumerate(self.old.ops):
            owner = self.owner.get(index)
            if owner is None:
                reads = self._values(op.reads, self._new(index), is_read=True)
                writes = self._values(op.writes, self._new(index), is_read=False)
                yield replace(op, reads=reads, writes=writes)
            elif owner not in done:
                done.add(owner)
                yield self._condensed(*owner)

    def _condensed(self, number: int, phase: Phase) -> Op:
        span, is_forward = self.spans[number], phase is Phase.FORWARD
        form, ops = span.kind.unplanned, span.forward if is_forward else span.backward
        place = self._new(ops.start)
        reads = [value for index in ops for value in self.old.ops[index].reads]
        writes = [value for index in ops for value in self.old.ops[index].writes]
        own = (self._kept_value(number),)
        facts = dict.fromkeys(fact for index in ops for fact in self.old.ops[index].facts)
        cost = len(self.profile.costs) + 2 * self.kinds.index(span.kind) + (not is_forward)
        return Op(
            name=f"compiled.{span.block.class_name}",
            phase=phase,
            call=self._call(span),
            source="",
            reads=self._values(reads, place, is_read=True) + (() if is_forward else own),
            writes=self._values(writes, place, is_read=False) + (own if is_forward else ()),
            rise_bytes=form.forward_rise_bytes if is_forward else form.backward_rise_bytes,
            cost=cost,
            facts=tuple(facts),
        )

    def _values(self, values: Iterable[Value], op: int, *, is_read: bool) -> tuple[Value, ...]:
        """Values by their new numbers; what an op makes for itself, it does not read."""
        found: dict[Value, None] = {}
        for value in values:
            if value.storage not in self.new_storage:
                continue
            writer = self._new(self.writers[value.storage][value.version])
            if is_read and (writer == op or self.deaths[value.storage] < op):
                continue
            found[Value(self.new_storage[value.storage], self._version(value))] = None
        return tuple(found)

    def _saves_and_unpacks(self) -> tuple[tuple[Save, ...], tuple[Unpack, ...]]:
        rows: list[tuple[int, int, Save]] = []
        for index, save in enumerate(self.old.saves):
            if index in self.dropped_saves or save.value.storage not in self.new_storage:
                continue
            value = Value(self.new_storage[save.value.storage], self._version(save.value))
            position, release = self._ceil(save.position), self._ceil(save.release)
            rows.append((position, index, Save(value, save.call, position, release)))
        for number, span in self.spans.items():
            position = self._new(span.forward.start) + 1
            release = self._new(span.backward.start) + 1
            own = Save(self._kept_value(number), self._call(span), position, release)
            rows.append((position, len(self.old.saves) + number, own))
        rows.sort(key=lambda row: row[:2])
        places = {index: place for place, (_, index, _) in enumerate(rows)}
        self.new_save = {i: p for i, p in places.items() if i < len(self.old.saves)}
        self.own_save = {n: places[len(self.old.saves) + n] for n in self.spans}
        asked = [
            Unpack(self.new_save[unpack.save], self.new_op[unpack.position])
            for unpack in self.old.unpacks
            if unpack.save in self.new_save
        ]
        asked += [
            Unpack(self.own_save[number], self._new(span.backward.start))
            for number, span in self.spans.items()
        ]
        asked.sort(key=lambda unpack: unpack.position)
        return tuple(row[2] for row in rows), tuple(asked)

    def _calls(self) -> Iterable[ModuleCall]:
        for call in self.old.calls:
            start = self.new_op[call.start]
            yield replace(call, start=start, stop=max(start, self._ceil(call.stop)))

    def _call(self, span: _Span) -> int:
        """The call of the block itself, or of the first of its children."""
        index = self.old.ops[span.forward.start].call
        calls = self.old.calls
        while index >= 0 and calls[index].path != span.block.path and calls[index].parent >= 0:
            parent = calls[calls[index].parent]
            if not span.forward.start <= parent.start <= parent.stop <= span.forward.stop:
                break
            index = calls[index].parent
        return index
