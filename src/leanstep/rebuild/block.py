"""One block call seen alone: what autograd holds for it, what may be dropped, what rebuilds it."""

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from leanstep.errors import PlanError
from leanstep.ir import (
    Block,
    Category,
    Graph,
    RecipeCost,
    Save,
    Unpack,
    Value,
)
from leanstep.rebuild.program import Program, Rerun, build_program, can_rebuild
from leanstep.rebuild.recipes import cheap_rerun
from leanstep.rebuild.rerun import UNWRITTEN, reads_unwritten, rerun


class BlockGraph:
    """The part of a step's graph that belongs to one block call.

    `recipes` are the ops whose cheap replay may be used, by index. `later` is the next block call
    of the step: the border between the two, an output of this call that the next one reads, can be
    dropped too. `read_elsewhere` are the storages that a third call reads.
    """

    def __init__(
        self,
        graph: Graph,
        block: Block,
        recipes: Mapping[int, RecipeCost] | None = None,
        *,
        later: Block | None = None,
        read_elsewhere: frozenset[int] = frozenset(),
    ) -> None:
        self.graph, self.block, self.later = graph, block, later
        self.recipes = recipes or {}
        self._read_elsewhere = read_elsewhere
        self._alone: dict[int, Program] = {}

    def with_recipes(self, recipes: Mapping[int, RecipeCost]) -> "BlockGraph":
        """The same call where some cheap replays may be used."""
        elsewhere = self._read_elsewhere
        return BlockGraph(
            self.graph, self.block, recipes, later=self.later, read_elsewhere=elsewhere
        )

    def without_border(self) -> "BlockGraph":
        """The same call where its output stays."""
        return BlockGraph(self.graph, self.block, self.recipes)

    @functools.cached_property
    def saves(self) -> tuple[Save, ...]:
        """The tensors autograd saved inside the call."""
        return tuple(self.graph.saves[index] for index in self.block.saves)

    @functools.cached_property
    def unpacks(self) -> tuple[Unpack, ...]:
        """What backward asks for of these, in its order."""
        own = set(self.block.saves)
        return tuple(unpack for unpack in self.graph.unpacks if unpack.save in own)

    @functools.cached_property
    def requests(self) -> tuple[int, ...]:
        """The positions at which backward asks for what the call saved, so that ops run again."""
        return tuple(unpack.position for unpack in self.unpacks)

    @functools.cached_property
    def reruns(self) -> tuple[Rerun, ...]:
        """The ops of the call that may run a second time."""
        ops = range(self.block.start, self.block.stop)
        found = filter(None, (rerun(index, self.graph.ops[index]) for index in ops))
        return tuple(
            op for op in found if not reads_unwritten(op.reads, op.writes, self._unwritten)
        )

    @functools.cached_property
    def _unwritten(self) -> frozenset[Value]:
        """What ops of the call have allocated and not written."""
        return frozenset(
            value
            for op in self.graph.ops[self.block.start : self.block.stop]
            if op.name.startswith(UNWRITTEN)
            for value in op.writes
            if self.graph.storages[value.storage].nbytes
        )

    @functools.cached_property
    def cheap_reruns(self) -> tuple[Rerun, ...]:
        """The cheap replays that may stand for some of them."""
        ops = (op for op in self.reruns if op.index in self.recipes)
        found = (cheap_rerun(self.graph, self.graph.ops[op.index], op) for op in ops)
        return tuple(filter(None, found))

    @functools.cached_property
    def own_storages(self) -> frozenset[int]:
        """The storages that were allocated inside the call."""
        return frozenset(self.births)

    @functools.cached_property
    def births(self) -> tuple[int, ...]:
        """The same in the order of their allocation."""
        ops = range(self.block.start, self.block.stop)
        return tuple(s for index in ops for s in self.graph.births(index))

    @functools.cached_property
    def saved(self) -> dict[int, Value]:
        """The storages that autograd saved here and nowhere else, with the value saved."""
        inside = Counter(save.value.storage for save in self.saves)
        everywhere = self.graph.saves_per_storage
        return {
            save.value.storage: save.value
            for save in self.saves
            if save.value.storage in self.own_storages
            and inside[save.value.storage] == everywhere[save.value.storage]
            and save.value.storage not in self._asked_inside
        }

    @functools.cached_property
    def _asked_inside(self) -> frozenset[int]:
        """The storages that a backward pass inside the call asks for: replay starts after it."""
        return frozenset(
            self.graph.saves[unpack.save].value.storage
            for unpack in self.graph.unpacks
            if unpack.position < self.block.stop
        )

    @functools.cached_property
    def candidates(self) -> tuple[int, ...]:
        """The storages that can be dropped: rebuilt from the rest when backward asks."""
        return tuple(sorted(s for s in self.settled if self._can_rebuild(s)))

    @functools.cached_property
    def settled(self) -> tuple[int, ...]:
        """The storages saved here alone, and as they are in the end.

        What is written after a save (by the op that saved it, or through `data`) autograd wants as
        it is in the end.
        """
        final = self.graph.final_versions
        return tuple(
            storage
            for storage in self.saved
            if all(save.value.version == final[storage] for save in self._saves_of[storage])
        )

    def _can_rebuild(self, storage: int) -> bool:
        available = self.available([storage])
        values = {save.value for save in self._saves_of.get(storage, ())}
        return self._unwritten.isdisjoint(values) and all(
            can_rebuild(value, self.makers, available) for value in values
        )

    @functools.cached_property
    def _saves_of(self) -> dict[int, list[Save]]:
        found: dict[int, list[Save]] = {}
        for save in self.saves:
            found.setdefault(save.value.storage, []).append(save)
        return found

    @functools.cached_property
    def makers(self) -> dict[Value, Rerun]:
        """The op that may run again to make each value."""
        return {value: op for op in self.reruns for value in op.writes}

    @functools.cached_property
    def input(self) -> int | None:
        """The largest storage that the call is given, where it can be told by its size."""
        ops = self.graph.ops[self.block.start : self.block.stop]
        reads = {value for op in ops for value in op.reads}
        given = {v.storage for v in reads if v.storage not in self.own_storages}
        sizes = Counter(self.graph.storages[number].nbytes for number in given)
        made = [number for number in given if self.graph.storages[number].birth >= 0]
        largest = max(made, key=lambda number: self.graph.storages[number].nbytes, default=None)
        if largest is None or sizes[self.graph.storages[largest].nbytes] > 1:
            return None
        is_settled = all(v == self._final(largest) for v in reads if v.storage == largest)
        return largest if is_settled else None

    @functools.cached_property
    def saves_input(self) -> bool:
        """Whether autograd saves the input here."""
        return any(save.value.storage == self.input for save in self.saves)

    def shares_input(self, views: Sequence["BlockGraph"]) -> bool:
        """Whether another call holds or reads the input, beside the one that made it."""
        own = sum(save.value.storage == self.input for save in self.saves)
        if own != (0 if self.input is None else self.graph.saves_per_storage[self.input]):
            return True
        return any(
            self.input in view.read
            for view in views
            if view.block != self.block and self.input not in view.own_storages
        )

    @functools.cached_property
    def read(self) -> frozenset[int]:
        """The storages that ops of the call read."""
        return frozenset(value.storage for value in self._read_by(self.block))

    @functools.cached_property
    def first_request(self) -> int:
        """The position where backward first asks for something of the call."""
        return min((unpack.position for unpack in self.unpacks), default=len(self.graph.ops))

    @functools.cached_property
    def first_release(self) -> int:
        """The position where autograd first lets go of something of the call."""
        return min((save.release for save in self.saves), default=0)

    @functools.cached_property
    def last_release(self) -> int:
        """The position where autograd has let go of everything of the call."""
        return max((save.release for save in self.saves), default=self.block.stop)

    @functools.cached_property
    def reads_what_changes(self) -> bool:
        """Whether the call reads something that another writes before backward: not to be rerun.

        What it writes itself can be put back.
        """
        final = self.graph.final_versions
        ops = self.graph.ops[self.block.start : self.block.stop]
        own = self.own_storages.union(value.storage for op in ops for value in op.writes)
        return any(
            value.version != final[value.storage]
            for op in ops
            for value in op.reads
            if value.storage not in own and not self.graph.is_generator(value.storage)
        )

    def alone(self, storage: int) -> Program:
        """What runs again when one storage is dropped and nothing else; worked out once."""
        if storage not in self._alone:
            self._alone[storage] = self.program([storage])
        return self._alone[storage]

    @functools.cached_property
    def borders(self) -> tuple[int, ...]:
        """The outputs that the next call needs and that can be dropped.

        Backward rebuilds such a one when it first asks for anything that the next call saved.
        """
        later = self.later
        if later is None or self.border_request < later.stop:
            return ()
        # FSDP2 gathers the parameters of this call when its own backward begins, not before.
        read = (self.graph.storages[value.storage] for value in self._read_by(self.block))
        if not all(storage.is_there_at([self.border_request]) for storage in read):
            return ()
        found = {value.storage: value for value in self._saved_by(later) + self._read_by(later)}
        return tuple(sorted(s for s, value in found.items() if self._is_border(value)))

    @functools.cached_property
    def border_request(self) -> int:
        """The position where backward first asks for something that the next call saved."""
        own = set(() if self.later is None else self.later.saves)
        return next((u.position for u in self.graph.unpacks if u.save in own), -1)

    def border_release(self, storage: int) -> int:
        """The position until which the next call holds a rebuilt border."""
        assert self.later is not None
        if any(save.value.storage == storage for save in self.saves):
            # Its recorded life says nothing about how long the next call's replays start from it.
            return max(self.graph.saves[index].release for index in self.later.saves)
        return max(self.graph.storages[storage].death, self.border_request) + 1

    def reads_input_early(self, dropped: Collection[int]) -> frozenset[int]:
        """The activations of earlier calls that rebuilding the dropped borders starts from.

        They are needed before backward asks for anything that this call saved: the border before
        this call, if it is among them, is not there yet if it was dropped too.
        """
        sources = self.program(dropped).sources
        return frozenset(
            source.storage
            for value in self.border_values(dropped).values()
            for source in sources[value]
            if source.storage not in self.own_storages
            and self.graph.storages[source.storage].category is Category.ACTIVATION
        )

    def _saved_by(self, block: Block) -> list[Value]:
        return [self.graph.saves[index].value for index in block.saves]

    def _read_by(self, block: Block) -> list[Value]:
        ops = self.graph.ops[block.start : block.stop]
        return [value for op in ops for value in op.reads]

    def _is_border(self, value: Value) -> bool:
        assert self.later is not None
        number = value.storage
        if number not in self.own_storages or number in self._asked_inside:
            return False
        near = [v for v in self._saved_by(self.block) + self._saved_by(self.later) if v == value]
        return (
            value == self._final(number)
            and value not in self._unwritten
            # Every save of it, and all of them as it is in the end.
            and 0 < len(near) == self.graph.saves_per_storage[number]
            and number not in self._read_elsewhere
            and self.graph.storages[number].natural_death < self.border_request
            and can_rebuild(value, self.makers, self.available([number]))
        )

    def _final(self, storage: int) -> Value:
        return Value(storage, self.graph.final_versions[storage])

    def program(self, dropped: Collection[int]) -> Program:
        """What runs again when these storages are dropped; a border is asked for once more."""
        return self._program(dropped, self.border_values(dropped).values())

    def border_values(self, dropped: Collection[int]) -> dict[int, Value]:
        """The borders among the dropped storages, as the next call needs them."""
        return {s: self._final(s) for s in self.borders if s in dropped}

    def _program(self, dropped: Collection[int], borders: Collection[Value]) -> Program:
        wanted = Counter(save.value for save in self.saves if save.value.storage in dropped)
        wanted.update(borders)
        return build_program(self.reruns, wanted, self.available(dropped), self.cheap_reruns)

    def available(self, dropped: Collection[int]) -> "Available":
        """The values that are still there in backward, unchanged."""
        return Available(self, frozenset(dropped))

    @functools.cached_property
    def first_draw(self) -> int:
        """The version of the generator when the call begins: its state is kept from there."""
        for index in range(self.block.start, self.block.stop):
            for value in self.graph.ops[index].reads:
                if self.graph.is_generator(value.storage):
                    return value.version
        return -1

    def storage_key(self, storage: int) -> str:
        """Name a storage by the op that allocated it: stable from run to run."""
        return self._storage_keys[storage]

    def storages_named(self, keys: Collection[str]) -> frozenset[int]:
        """The storages with these names; one that is missing belongs to another model."""
        named = {key: storage for storage, key in self._storage_keys.items()}
        if missing := sorted(set(keys) - set(named)):
            raise PlanError(f"{self.block.name} makes no value {missing[0]}")
        return frozenset(named[key] for key in keys)

    @functools.cached_property
    def _storage_keys(self) -> dict[int, str]:
        keys = {}
        for index, op_key in self.graph.keys(self.block):
            for place, storage in enumerate(self.graph.births(index)):
                keys[storage] = f"{op_key}:{place}"
        return keys


def views_of(graph: Graph, blocks: Sequence[Block]) -> tuple[BlockGraph, ...]:
    """Every block call with its neighbour: the call that comes next in the step."""
    order = sorted(range(len(blocks)), key=lambda place: blocks[place].start)
    followers = {place: blocks[after] for place, after in itertools.pairwise(order)}
    elsewhere = _read_elsewhere(graph, [blocks[place] for place in order])
    return tuple(
        BlockGraph(graph, block, later=followers.get(place), read_elsewhere=elsewhere)
        for place, block in enumerate(blocks)
    )


def _read_elsewhere(graph: Graph, blocks: Sequence[Block]) -> frozenset[int]:
    """The storages that a call reads although neither it nor the call before made them."""
    return frozenset(
        value.storage
        for before, block in itertools.pairwise([None, *blocks])
        if block is not None
        for op in graph.ops[block.start : block.stop]
        for value in op.reads
        if graph.storages[value.storage].birth < (before or block).start
    )


class Available:
    """The values a replay may start from: kept ones of the call, and stable ones from outside."""

    def __init__(self, view: BlockGraph, dropped: frozenset[int]) -> None:
        self._view, self._dropped = view, dropped

    def __contains__(self, value: object) -> bool:
        """Whether a value is there, unchanged, until backward."""
        assert isinstance(value, Value)
        view = self._view
        if value.storage in self._dropped:
            return False
        if value.storage in view.own_storages:
            return view.saved.get(value.storage) == value and self._is_final(value)
        if view.graph.is_generator(value.storage):
            return value.version == view.first_draw
        return self._is_final(value)

    def _is_final(self, value: Value) -> bool:
        graph = self._view.graph
        is_there = graph.storages[value.storage].is_there_at(self._view.requests)
        return is_there and graph.final_versions[value.storage] == value.version
