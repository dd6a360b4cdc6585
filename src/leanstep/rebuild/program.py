"""Which ops run again when backward asks for a dropped value, and how long each result stays.

The simulator and the replay engine both follow this one schedule, so what is predicted is what
happens. Ops run again as late as possible: when a dropped value is first asked for, just the ops
it needs and that have not run yet run in the order of the forward pass; a result stays while a
later op of the program or a later request needs it.

An in-place op moves its storage to the next version. So before it runs, everything that reads
the version it overwrites must have run; and a storage that has moved past a version that is asked
for again is built anew. The generator of random numbers is one more storage that every draw
moves to its next version: this is what makes draws replay in order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

from leanstep.errors import LeanstepError
from leanstep.ir.graph import Value


class UnreachableError(LeanstepError):
    """A value cannot be rebuilt from what is kept."""


class Kept(Protocol):
    """What a replay may start from: can be asked about a value, not listed."""

    def __contains__(self, value: object, /) -> bool:
        """Whether a value is there, unchanged, until backward."""
        ...


@dataclass(frozen=True, slots=True)
class Rerun:
    """An op that may run again: its index in the recording, what it reads and writes.

    With `siblings` it is a cheap replay of the op: it writes one of the op's outputs, and reads
    others of them, the siblings, among its reads.
    """

    index: int
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    siblings: tuple[Value, ...] = ()

    @property
    def is_recipe(self) -> bool:
        """Whether a cheap replay runs instead of the op."""
        return bool(self.siblings)


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that may have to run again for one block call.

    `wanted` are the dropped values with the number of saves of each, `sources` the kept values
    that rebuilding each of them starts from; `needs` counts the saves that each of these is for.
    `uses` counts the readers of each rebuilt storage.
    """

    reruns: Mapping[int, Rerun]
    makers: Mapping[Value, int]
    readers: Mapping[Value, tuple[int, ...]]
    wanted: Mapping[Value, int]
    sources: Mapping[Value, frozenset[Value]]
    all_sources: frozenset[Value]
    needs: Mapping[Value, int]
    uses: Mapping[int, int]
    known: "_Known" = field(default_factory=lambda: _Known(), compare=False, repr=False)


def build_program(
    ops: Sequence[Rerun],
    wanted: Mapping[Value, int],
    available: Kept,
    recipes: Sequence[Rerun] = (),
) -> Program:
    """Find the ops that rebuild every wanted value from the available ones.

    A recipe runs instead of its op where its siblings are all available and nothing else of the op
    is needed.
    """
    makers = {value: op for op in ops for value in op.writes}
    cheap = [r for r in recipes if all(sibling in available for sibling in r.siblings)]
    chosen = _needed(wanted, makers, cheap, available)
    while both := {index for index, is_recipe in chosen if is_recipe and (index, False) in chosen}:
        cheap = [recipe for recipe in cheap if recipe.index not in both]
        chosen = _needed(wanted, makers, cheap, available)
    reruns = {index: chosen[index, is_recipe] for index, is_recipe in sorted(chosen)}
    made = {value: op for op in reruns.values() for value in op.writes}
    starts = _sources(reruns, made, available)
    sources = {
        value: frozenset([value]) if value in available else starts[made[value].index]
        for value in wanted
    }
    all_sources = frozenset[Value]().union(*sources.values())
    return Program(
        reruns=reruns,
        makers={value: index for index, op in reruns.items() for value in op.writes},
        readers=_readers(reruns.values()),
        wanted=dict(wanted),
        sources=sources,
        all_sources=all_sources,
        needs=_needs(wanted, sources),
        uses=_uses(reruns.values(), wanted, all_sources),
    )


# Ops and recipes that rebuild something, by index and whether it is the recipe.
_Chosen = dict[tuple[int, bool], Rerun]


def can_rebuild(value: Value, makers: Mapping[Value, Rerun], available: Kept) -> bool:
    """Whether a value can be rebuilt from the available ones."""
    try:
        _needed([value], makers, (), available)
    except UnreachableError:
        return False
    return True


def _needed(
    wanted: Iterable[Value],
    makers: Mapping[Value, Rerun],
    cheap: Sequence[Rerun],
    available: Kept,
) -> _Chosen:
    """The ops, or the recipes in their place, that rebuild some values."""
    if cheap:
        makers = {**makers, **{recipe.writes[0]: recipe for recipe in cheap}}
    chosen: _Chosen = {}
    pending = [value for value in wanted if value not in available]
    while pending:
        value = pending.pop()
        op = makers.get(value)
        if op is None:
            raise UnreachableError(f"storage {value.storage}, version {value.version}, is gone")
        if (op.index, op.is_recipe) not in chosen:
            chosen[op.index, op.is_recipe] = op
            pending.extend(read for read in op.reads if read not in available)
    return chosen


def _sources(
    reruns: Mapping[int, Rerun], makers: Mapping[Value, Rerun], available: Kept
) -> dict[int, frozenset[Value]]:
    """For each op, given in order, the available values that it and what it needs start from.

    So do the readers of what an in-place op overwrites, which run before it, asked for or not.
    """
    starts: dict[int, frozenset[Value]] = {}
    readers = _readers(reruns.values())
    for index, op in reruns.items():
        own = frozenset(read for read in op.reads if read in available)
        made = [makers[read].index for read in op.reads if read not in own]
        first = [*made, *_readers_before(op, readers)]
        starts[index] = own.union(*(starts[before] for before in first))
    return starts


def _readers_before(op: Rerun, readers: Mapping[Value, tuple[int, ...]]) -> list[int]:
    """The ops that read a version that an in-place op ends."""
    written = {value.storage for value in op.writes}
    ended = (value for value in op.reads if value.storage in written)
    return [reader for value in ended for reader in readers[value] if reader < op.index]


def _readers(reruns: Iterable[Rerun]) -> dict[Value, tuple[int, ...]]:
    readers: dict[Value, list[int]] = {}
    for op in reruns:
        for value in op.reads:
            readers.setdefault(value, []).append(op.index)
    return {value: tuple(indices) for value, indices in readers.items()}


def _needs(
    wanted: Mapping[Value, int], sources: Mapping[Value, frozenset[Value]]
) -> dict[Value, int]:
    needs: dict[Value, int] = {}
    for value, count in wanted.items():
        for source in sources[value]:
            needs[source] = needs.get(source, 0) + count
    return needs


def _uses(
    reruns: Iterable[Rerun], wanted: Mapping[Value, int], sources: Collection[Value]
) -> dict[int, int]:
    uses: dict[int, int] = {}
    for op in reruns:
        for storage in _rebuilt(op.reads, sources):
            uses[storage] = uses.get(storage, 0) + 1
    for value, count in wanted.items():
        uses[value.storage] = uses.get(value.storage, 0) + count
    return uses


def _rebuilt(reads: Iterable[Value], sources: Collection[Value]) -> set[int]:
    """The storages among the reads that are rebuilt rather than kept."""
    return {value.storage for value in reads if value not in sources}


@dataclass(frozen=True, slots=True)
class Run:
    """One op to run now, and the rebuilt storages to let go right after it."""

    op: Rerun
    frees: tuple[int, ...]


class Session:
    """One program during one backward pass: what to run when, and what may go.

    The schedule depends only on what was asked for so far, and backward asks in the same order
    from step to step. So every answer is kept with the program, in a tree of events; the state
    behind the answers is worked out only when an event is new.
    """

    __slots__ = ("_events", "_known", "_state", "program")

    def __init__(self, program: Program) -> None:
        self.program = program
        self._events: list[tuple[_Kind, Value]] = []
        self._known: _Known | None = program.known
        self._state: _State | None = None

    @property
    def present(self) -> dict[int, int]:
        """The rebuilt storages, each with its version."""
        return self._caught_up().present

    def request(self, value: Value) -> Sequence[Run]:
        """Say which ops must run now so that the value is there, in order."""
        return cast(Sequence[Run], self._answer("request", value))

    def served(self, value: Value) -> bool:
        """Count one save of the value as answered; say whether its storage may go now."""
        return bool(self._answer("served", value))

    def served_again(self, value: Value) -> bool:
        """A save that was answered before was answered again; say whether its storage may go."""
        return bool(self._answer("served_again", value))

    def _answer(self, kind: "_Kind", value: Value) -> object:
        event = (kind, value)
        found = None if self._known is None else self._known.after.get(event)
        if found is None:
            answer = getattr(self._caught_up(), kind)(value)
            found = (answer, _Known() if len(self._events) < _MOST_EVENTS else None)
            if self._known is not None:
                self._known.after[event] = found
        elif self._state is not None:
            getattr(self._state, kind)(value)
        self._events.append(event)
        answer, self._known = found
        return answer

    def _caught_up(self) -> "_State":
        if self._state is None:
            self._state = _State(self.program)
            for kind, value in self._events:
                getattr(self._state, kind)(value)
        return self._state


_Kind = Literal["request", "served", "served_again"]

# Beyond this many events answers are no longer kept: a graph that is kept and run for ever.
_MOST_EVENTS = 10_000


class _Known:
    """What was answered after the events that lead here, and where each next event leads."""

    __slots__ = ("after",)

    def __init__(self) -> None:
        self.after: dict[tuple[_Kind, Value], tuple[object, _Known | None]] = {}


class _State:
    """Which storages are rebuilt, to which version, and how often each is still needed."""

    __slots__ = ("done", "present", "program", "uses")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.present: dict[int, int] = {}
        self.uses = dict(program.uses)
        self.done: set[int] = set()

    def request(self, value: Value) -> list[Run]:
        """Say which ops must run now so that the value is there, in order."""
        order = self._missing(value)
        while clobbered := self._clobbered(order):
            for storage in clobbered:
                del self.present[storage]
            order = self._missing(value)
        last_reader: dict[int, int] = {value.storage: len(order)}
        for place, index in enumerate(order):
            for storage in _rebuilt(self.program.reruns[index].reads, self.program.all_sources):
                last_reader[storage] = max(place, last_reader.get(storage, 0))
        return [self._run(place, index, last_reader) for place, index in enumerate(order)]

    def served(self, value: Value) -> bool:
        """Count one save of the value as answered; say whether its storage may go now."""
        self.uses[value.storage] -= 1
        if self.uses[value.storage] > 0:
            return False
        return self.present.pop(value.storage, None) is not None

    def served_again(self, value: Value) -> bool:
        """The same for a save that had been answered before: it is not counted twice."""
        if self.uses[value.storage] > 0:
            return False
        return self.present.pop(value.storage, None) is not None

    def _missing(self, value: Value) -> list[int]:
        """The ops not yet run that the value needs, in forward order."""
        program, missing, pending = self.program, set[int](), [value]
        while pending:
            wanted = pending.pop()
            if (
                wanted in program.all_sources
                or self.present.get(wanted.storage) == wanted.version
                or program.makers[wanted] in missing
            ):
                continue
            op = program.reruns[program.makers[wanted]]
            missing.add(op.index)
            pending.extend(op.reads)
            pending.extend(self._before_overwriting(op))
        return sorted(missing)

    def _clobbered(self, order: list[int]) -> set[int]:
        """The storages that these ops would take back to an earlier version than they have."""
        return {
            value.storage
            for index in order
            for value in self.program.reruns[index].writes
            if value.version <= self.present.get(value.storage, -1)
        }

    def _before_overwriting(self, op: Rerun) -> list[Value]:
        """What still has to be made from the versions that an in-place op is about to end."""
        return [
            self.program.reruns[reader].writes[0]
            for reader in _readers_before(op, self.program.readers)
            if reader not in self.done
        ]

    def _run(self, place: int, index: int, last_reader: Mapping[int, int]) -> Run:
        op = self.program.reruns[index]
        self.done.add(index)
        for value in op.writes:
            self.present[value.storage] = value.version
        touched = _rebuilt(op.reads, self.program.all_sources)
        for storage in touched:
            self.uses[storage] -= 1
        touched.update(value.storage for value in op.writes)
        frees = [
            storage
            for storage in sorted(touched)
            if self.uses.get(storage, 0) <= 0 and last_reader.get(storage, -1) <= place
        ]
        for storage in frees:
            del self.present[storage]
        return Run(op, tuple(frees))
