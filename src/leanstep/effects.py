"""What one decision about a block does to the step.

*Shifts*: a storage lives shorter, or is held longer, or lives again from a position of backward
on. *Replays*: ops inserted before a backward op, with a level of their own. An effect is computed
for its block alone, from the recorded step and the schedule that the engine follows.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from leanstep.blockgraph import STATISTICS_ARE_OPTIONAL, BlockGraph
from leanstep.errors import PlanError
from leanstep.ir import Category, Decision, Engine, Form, Graph, Offload, Profile, RecipeCost, Value
from leanstep.ir.decision import INPUT
from leanstep.ir.graph import Fact, Op
from leanstep.rebuild import Run, Session

# A call with such an op may read and write other buffers than the recorded one.
_VARIES = frozenset((Fact.HOST_READ, Fact.DYNAMIC_SHAPE))

# The state of torch's CPU generator, held for a block whose draws are replayed.
GENERATOR_BYTES = 5056

# Numbers are tensors of 8 bytes while an op runs, outside the recorder's view: a few for a block.
NUMBERS_BYTES = 128


@dataclass(frozen=True, slots=True)
class Shift:
    """`nbytes` more (or less) are live at the start of every op p with start <= p < stop.

    They are those of a storage, or (-1) something that the engine holds for itself.
    """

    start: int
    stop: int
    nbytes: int
    category: Category
    storage: int = -1


@dataclass(frozen=True, slots=True)
class Replay:
    """An op run again before op `position`, by a recipe where there is one.

    `live_bytes` and `peak_bytes` are relative to the level at the start of op `position`.
    """

    op: int
    position: int
    live_bytes: int
    peak_bytes: int
    recipe: RecipeCost | None = None

    def seconds(self, profile: Profile) -> float:
        """The time it takes: on the device, or to issue it where the device waits for the CPU."""
        seconds = profile.seconds(self.op) if self.recipe is None else self.recipe.seconds
        return max(seconds, profile.launch_seconds)


@dataclass(frozen=True, slots=True)
class Effect:
    """What one decision does to the step.

    `added_seconds` is what the block's own ops take longer, beside the replays.
    """

    shifts: tuple[Shift, ...] = ()
    replays: tuple[Replay, ...] = ()
    added_seconds: float = 0.0

    def seconds(self, profile: Profile) -> float:
        """What it adds to the step: the time of all that runs again, and of the call's own work."""
        if not self.shifts and not self.replays:
            return self.added_seconds
        replayed = sum(replay.seconds(profile) for replay in self.replays)
        return self.added_seconds + replayed + profile.call_seconds


def decision_effect(profile: Profile, view: BlockGraph, decision: Decision) -> Effect:
    """What one decision does."""
    match decision.engine:
        case Engine.UNTOUCHED:
            return Effect()
        case Engine.REPLAY:
            dropped = view.storages_named(decision.drop)
            has_hooks = decision.border_in or bool(decision.offload)
            return replay_effect(view, dropped, border_in=has_hooks)
        case Engine.MODULE:
            return module_effect(view)
        case Engine.INDUCTOR:
            return form_effect(view, *_forms(profile, view, decision))


def _forms(profile: Profile, view: BlockGraph, decision: Decision) -> tuple[Form, Form]:
    """The unplanned form of a call and the one that a decision names."""
    kind = profile.kinds[view.block.kind] if view.block.is_compiled else None
    form = None if kind is None else kind.form(decision.form)
    if kind is None or form is None:
        raise PlanError(f"{view.block.name} cannot be compiled in the form {decision.form!r}")
    return kind.unplanned, form


def form_effect(view: BlockGraph, unplanned: Form, form: Form) -> Effect:
    """What it does to the step when a compiled call runs in another form than the unplanned one.

    The graph has the call's forward and backward as one op each, with the rises of the unplanned
    form, and one storage for all that this form keeps.
    """
    if form == unplanned:
        return Effect()
    (save,), (unpack,), forward = view.saves, view.unpacks, view.block.start
    backward, number = unpack.position, save.value.storage
    kept = form.kept_bytes - unplanned.kept_bytes
    shifts = (
        _rise_shift(forward, form.forward_rise_bytes - unplanned.forward_rise_bytes),
        Shift(forward + 1, backward + 1, kept, Category.ACTIVATION, number),
        _rise_shift(backward, form.backward_rise_bytes - unplanned.backward_rise_bytes),
    )
    held = set[int]()
    if form.holds_arguments and not unplanned.holds_arguments:
        held.update(value.storage for value in view.graph.ops[forward].reads)
    if form.holds_outputs and not unplanned.holds_outputs:
        held.update(value.storage for value in view.graph.ops[forward].writes)
    return Effect(
        (*shifts, *_held_longer(view, held, backward)),
        added_seconds=form.seconds - unplanned.seconds,
    )


def _held_longer(view: BlockGraph, numbers: Collection[int], backward: int) -> Iterator[Shift]:
    """What would be gone before a call's backward, and is held until then."""
    for number in sorted(numbers):
        storage = view.graph.storages[number]
        if storage.death < backward:
            yield Shift(storage.death + 1, backward + 1, storage.nbytes, storage.category, number)


def _rise_shift(op: int, nbytes: int) -> Shift:
    return Shift(op, op + 1, nbytes, Category.TEMPORARY)


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
        held = (2 if draws else 1) * _state_bytes(self.graph)
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
        state = _state_bytes(self.graph)
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
                return (2 if value.storage in self.born else 3) * _state_bytes(self.graph)
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
            return _state_bytes(self.graph)
        return self.graph.storages[storage].nbytes

    def _end(self, storage: int, start: int, stop: int) -> None:
        self._shift(storage, start, stop)

    def _shift(self, number: int, start: int, stop: int, sign: int = 1) -> None:
        nbytes = self._nbytes(number)
        if start < stop and nbytes:
            category = self.graph.storages[number].category
            self.shifts.append(Shift(start, stop, sign * nbytes, category, number))


def offload_shifts(
    views: Sequence[BlockGraph], place: int, entries: Iterable[Offload]
) -> Iterator[Shift]:
    """What it does to the step when kept storages of one call wait in host memory."""
    own = views[place]
    for entry in entries:
        gone = views[place + entry.release].block.stop
        number = _offloaded(own, entry)
        if entry.key == INPUT or not own.block.is_compiled:
            gone = max(gone, own.graph.storages[number].natural_death + 1)
        back = backward_entry(views, place + entry.fetch)
        if gone < back:
            yield Shift(gone, back, -entry.nbytes, own.graph.storages[number].category, number)


def _offloaded(view: BlockGraph, entry: Offload) -> int:
    """The storage that an entry is about."""
    if entry.key == INPUT:
        if view.input is None:
            raise PlanError(f"{view.block.name} has no input that can be told from the others")
        return view.input
    if view.block.is_compiled:
        # One storage stands for all that compiled code keeps.
        return view.saves[0].value.storage
    (number,) = view.storages_named([entry.key])
    return number


def backward_entry(views: Sequence[BlockGraph], place: int) -> int:
    """The position where backward comes to a call: when the calls after it are through."""
    first = views[place].first_request
    through = (view.last_release for view in views[place + 1 :])
    return max((position for position in through if position <= first), default=first)


def module_effect(view: BlockGraph) -> Effect:
    """What it does to the step when a whole block runs again at its first request."""
    graph, block = view.graph, view.block
    if not view.saves:
        return Effect()
    first = min(
        (unpack.position for unpack in view.unpacks),
        default=len(graph.ops),
    )
    # Checkpointing stops early: nothing after the last save runs again.
    last = max(save.position for save in view.saves)
    shifts = _module_shifts(view, first, last)
    held = {save.value.storage for save in view.saves}
    level, steps = 0, []
    for index in range(block.start, last):
        op = graph.ops[index]
        steps.append((index, level, level + op.rise_bytes))
        level += sum(graph.storages[s].nbytes for s in graph.births(index))
        level -= _natural_ends(view, index, held)
    # What was neither saved nor dead when the run stops goes with its frames.
    end = sum(
        graph.storages[s].nbytes for s in held if block.start <= graph.storages[s].birth < last
    )
    copies = _written_bytes(view, statistics=True) + 2 * _state_bytes(graph)
    return Effect(
        shifts,
        tuple(
            Replay(index, first, live - end + copies, peak - end + copies)
            for index, live, peak in steps
        ),
    )


def _module_shifts(view: BlockGraph, first: int, last: int) -> tuple[Shift, ...]:
    graph, block = view.graph, view.block
    release: dict[int, int] = {}
    for save in view.saves:
        release[save.value.storage] = max(release.get(save.value.storage, 0), save.release)
    shifts = []
    for number, until in release.items():
        storage = graph.storages[number]
        if number in view.own_storages:
            if number in view.saved:
                early, late = storage.natural_death + 1, storage.death + 1
                shifts.append(Shift(early, late, -storage.nbytes, storage.category, number))
            shifts.append(Shift(first, until, storage.nbytes, storage.category, number))
    ends = max(release.values())
    shifts.append(Shift(block.start, ends, _state_bytes(graph), Category.GENERATOR))
    copies = _written_bytes(view, statistics=False)
    shifts.append(Shift(block.start, ends, copies, Category.TEMPORARY))
    for number in outside_reads(view):
        storage = graph.storages[number]
        held = Shift(storage.death + 1, ends, storage.nbytes, storage.category, number)
        shifts.append(held)
    return tuple(shift for shift in shifts if shift.start < shift.stop and shift.nbytes)


def _state_bytes(graph: Graph) -> int:
    """What a state of the CPU's generator takes of the memory that is planned."""
    return GENERATOR_BYTES if graph.is_on_host else 0


def outside_reads(view: BlockGraph) -> set[int]:
    """The storages a block call reads that were there before it."""
    block = view.block
    reads = {
        value.storage
        for index in range(block.start, block.stop)
        for value in view.graph.ops[index].reads
    }
    return reads - view.own_storages


def _natural_ends(view: BlockGraph, index: int, held: set[int]) -> int:
    """The bytes that go after an op of the second run, had autograd held nothing of them."""
    storages = view.graph.storages
    return sum(
        storages[number].nbytes
        for number in view.own_storages
        if number not in held and storages[number].natural_death == index
    )


def _written_bytes(view: BlockGraph, *, statistics: bool) -> int:
    """The copies of the buffers that forward writes.

    To put back after a second run, with the statistics of batch norm; and to start it from, without
    those that nothing reads.
    """
    ops = view.graph.ops[view.block.start : view.block.stop]
    statistics = statistics or any(_VARIES.intersection(op.facts) for op in ops)
    read = {value.storage for op in ops for value in op.reads if not _is_statistic(op, value)}
    written = {
        value.storage
        for op in ops
        for value in op.writes
        if view.graph.storages[value.storage].category is Category.BUFFER
        if statistics or value.storage in read or not _is_statistic(op, value)
    }
    return sum(view.graph.storages[number].nbytes for number in written)


def _statistics(view: BlockGraph) -> set[int]:
    """The running statistics that a call reads; the engine starts replays from copies of them."""
    return {
        value.storage
        for op in view.graph.ops[view.block.start : view.block.stop]
        if op.name in STATISTICS_ARE_OPTIONAL
        for value in op.reads
        if view.graph.storages[value.storage].category is Category.BUFFER
    }


def _is_statistic(op: Op, value: Value) -> bool:
    """Whether an op writes a storage that does not change what else it computes."""
    is_written = any(written.storage == value.storage for written in op.writes)
    return is_written and op.name in STATISTICS_ARE_OPTIONAL
