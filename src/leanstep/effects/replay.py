"""What it does to the step when values of a block are dropped and replayed."""

from collections.abc import Collection

from leanstep.effects.base import Effect, Replay, Shift, outside_reads, state_bytes
from leanstep.ir import Category, Value
from leanstep.rebuild.block import BlockGraph
from leanstep.rebuild.program import Run, Session
from leanstep.rebuild.rerun import STATISTICS_ARE_OPTIONAL

# Numbers are tensors of 8 bytes while an op runs, outside the recorder's view: a few for a block.
NUMBERS_BYTES = 128


def replay_effect(view: BlockGraph, dropped: Collection[int], *, border_in: bool = False) -> Effect:
    """What it does to the step when a block's storages are dropped and replayed.

    With `border_in` the call runs with hooks even if it drops nothing of its own.
    """
    if not dropped and not border_in:
        return Effect()
    return _ReplayEffect(view, frozenset(dropped)).effect()


class _ReplayEffect:
    """Follow one program through the recorded backward pass."""

    def __init__(self, view: BlockGraph, dropped: frozenset[int]) -> None:
        self.view, self.graph, self.dropped = view, view.graph, dropped
        self.program = view.program(dropped)
        self.borders = view.border_values(dropped)
        self.session = Session(self.program)
        self.shifts: list[Shift] = []
        self.replays: list[Replay] = []
        self.born: dict[int, int] = {}
        self.release: dict[int, int] = {}

    def effect(self) -> Effect:
        """Walk the events of backward in order."""
        self._end_early()
        self._hold_sources()
        for position, value, release in self._events():
            self._answer(position, value, release)
        for storage, start in list(self.born.items()):
            self._end(storage, start, len(self.graph.ops) + 1)
        return Effect(tuple(self.shifts), tuple(self.replays))

    def _end_early(self) -> None:
        for number in self.dropped:
            storage = self.graph.storages[number]
            early = storage.natural_death + 1
            if number in self.borders and self.view.later is not None:
                # The next call holds its arguments to its end.
                early = max(early, self.view.later.stop)
            self._shift(number, early, storage.death + 1, sign=-1)

    def _hold_sources(self) -> None:
        # While a call is recorded, the generator's state and what it reads from outside are held;
        # around each draw the state is looked at.
        block = self.view.block
        draws = any(self.graph.is_generator(number) for number in outside_reads(self.view))
        held = (2 if draws else 1) * state_bytes(self.graph)
        self.shifts.append(Shift(block.start, block.stop, held, Category.GENERATOR))
        for number in outside_reads(self.view):
            self._shift(number, self.graph.storages[number].death + 1, self.view.block.stop)
        until: dict[int, int] = {}
        needed = [(save.value, save.release) for save in self.view.saves]
        # A border lets go of its sources as soon as it is there.
        needed += [(value, self.view.border_request + 1) for value in self.borders.values()]
        for value, release in needed:
            for source in self.program.sources.get(value, ()):
                until[source.storage] = max(until.get(source.storage, 0), release)
        ends = max(until.values(), default=block.stop)
        numbers = NUMBERS_BYTES if self.graph.is_on_host else 0
        self.shifts.append(Shift(block.start, ends, numbers, Category.TEMPORARY))
        statistics = _statistics(self.view)
        for number, release in until.items():
            if self.graph.is_generator(number):
                self._hold_generator(release)
                continue
            death = self.graph.storages[number].death
            if number not in self.view.own_storages:
                death = max(death, self.view.block.stop - 1)
            self._shift(number, death + 1, release)
            if number in statistics:
                nbytes = self.graph.storages[number].nbytes
                self.shifts.append(Shift(block.stop, release, nbytes, Category.TEMPORARY))

    def _hold_generator(self, release: int) -> None:
        state = state_bytes(self.graph)
        held = Shift(self.view.block.stop, release, state, Category.GENERATOR)
        self.shifts.append(held)

    def _events(self) -> list[tuple[int, Value, int]]:
        """What happens to the dropped saves, in order: a request, or being let go unasked.

        Each is a position, a value, and the position where it is let go.
        """
        own = {
            index: self.graph.saves[index]
            for index in self.view.block.saves
            if self.graph.saves[index].value.storage in self.dropped
        }
        requests = [unpack for unpack in self.view.unpacks if unpack.save in own]
        asked = {unpack.save for unpack in requests}
        unasked = [(s.release, s.value, s.release) for i, s in own.items() if i not in asked]
        borders = [
            (self.view.border_request, value, self.view.border_release(number))
            for number, value in self.borders.items()
        ]
        asks = [(u.position, own[u.save].value, own[u.save].release) for u in requests]
        # Sorting is stable: at one position, what is let go comes before what is asked for.
        return sorted(unasked + borders + asks, key=lambda event: event[0])

    def _answer(self, position: int, value: Value, release: int) -> None:
        is_request = position < release
        level, steps = 0, []
        for run in self.session.request(value) if is_request else ():
            steps.append((run.op, level, level + self._rise_bytes(run)))
            level += self._after(run, position)
        for op, live, peak in steps:
            recipe = self.view.recipes[op.index] if op.is_recipe else None
            self.replays.append(Replay(op.index, position, live - level, peak - level, recipe))
        storage = value.storage
        self.release[storage] = max(self.release.get(storage, 0), release)
        if self.session.served(value) and storage in self.born:
            self._end(storage, self.born.pop(storage), self.release.pop(storage))

    def _rise_bytes(self, run: Run) -> int:
        if not run.op.is_recipe:
            return self.graph.ops[run.op.index].rise_bytes + self._draw_bytes(run)
        made = sum(self._nbytes(value.storage) for value in run.op.writes)
        return made + self.view.recipes[run.op.index].workspace_bytes

    def _draw_bytes(self, run: Run) -> int:
        """The copies of the generator's state that are made around a replayed draw."""
        for value in run.op.reads:
            if self.graph.is_generator(value.storage):
                # The first draw also copies the state that the call began with.
                return (2 if value.storage in self.born else 3) * state_bytes(self.graph)
        return 0

    def _after(self, run: Run, position: int) -> int:
        """Count what an op that ran again leaves behind, and what it lets go."""
        change = 0
        for value in run.op.writes:
            is_new = self.graph.storages[value.storage].birth == run.op.index
            if is_new or (
                self.graph.is_generator(value.storage) and value.storage not in self.born
            ):
                change += self._nbytes(value.storage)
                if value.storage in self.born:
                    # Built anew because its contents had moved past what is asked for.
                    change -= self._nbytes(value.storage)
                    self._end(value.storage, self.born[value.storage], position)
                self.born[value.storage] = position
        for storage in run.frees:
            # Autograd may still hold it for a node that has asked already.
            start, stop = self.born.pop(storage), max(position, self.release.pop(storage, 0))
            change -= self._nbytes(storage) if stop == position else 0
            self._end(storage, start, stop)
        return change

    def _nbytes(self, storage: int) -> int:
        if self.graph.is_generator(storage):
            return state_bytes(self.graph)
        return self.graph.storages[storage].nbytes

    def _end(self, storage: int, start: int, stop: int) -> None:
        self._shift(storage, start, stop)

    def _shift(self, number: int, start: int, stop: int, sign: int = 1) -> None:
        nbytes = self._nbytes(number)
        if start < stop and nbytes:
            category = self.graph.storages[number].category
            self.shifts.append(Shift(start, stop, sign * nbytes, category, number))


def _statistics(view: BlockGraph) -> set[int]:
    """The running statistics that a call reads; the engine starts replays from copies of them."""
    return {
        value.storage
        for op in view.graph.ops[view.block.start : view.block.stop]
        if op.name in STATISTICS_ARE_OPTIONAL
        for value in op.reads
        if view.graph.storages[value.storage].category is Category.BUFFER
    }
