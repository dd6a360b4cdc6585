"""The computation graph of one whole training step, as it ran.

A *position* is a number of ops: something at position 7 happens after op 6 and before op 7. Ops
are numbered in the order they ran, through forward, backward and optimizer. A *storage* is one
allocation; a *value* is a storage at a version, so an in-place op makes the next value of its
storage. Views write nothing and make no value: whoever reads a view reads its storage.
"""

import functools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from leanstep.ir.loss import LossCall


class Phase(StrEnum):
    """The part of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(StrEnum):
    """What a storage is for, as a person would sort the memory of a step."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OTHER = "other"
    GENERATOR = "random generator"


class Fact(StrEnum):
    """What the recorder saw of an op; `rebuild/rerun.py` judges what follows from it."""

    RANDOM = "draws random numbers"
    OWN_GENERATOR = "draws from a generator of its own"
    HOST_READ = "reads a value on the host"
    DYNAMIC_SHAPE = "has a data-dependent output shape"
    COLLECTIVE = "is a collective"
    WRITES_BUFFER = "writes a parameter or buffer"
    NOT_REPLAYABLE = "has arguments that cannot be replayed"


class Value(NamedTuple):
    """A storage at a version: version 0 is what its maker wrote, or what it held at the start."""

    storage: int
    version: int


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an operator.

    `rise_bytes` is how far the allocator's level rose inside the op above its level at the start,
    outputs included. `cost` indexes `Profile.costs`, one entry for each distinct call. `call` is
    the innermost module call it ran in, -1 outside every module.
    """

    name: str
    phase: Phase
    call: int
    source: str
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    rise_bytes: int
    cost: int
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation and its life.

    Live at the start of op p exactly when `birth < p <= death`: `birth` is the op that allocated
    it (-1: there before the step), `death` the last op it lived through. `natural_death` is the
    death it would have had if autograd held nothing. `absences` are the stretches of positions, as
    (start, stop), at which it is emptied: FSDP2 gathers a block's parameters into the same storages
    again and again.
    """

    nbytes: int
    category: Category
    birth: int
    death: int
    natural_death: int
    absences: tuple[tuple[int, int], ...] = ()

    def is_live(self, position: int) -> bool:
        """Whether it takes memory at a position."""
        if not self.birth < position <= self.death:
            return False
        return not any(start <= position < stop for start, stop in self.absences)

    def is_there_at(self, positions: Iterable[int]) -> bool:
        """Whether it is not emptied at any of some positions."""
        return not self.absences or all(
            not start <= position < stop for start, stop in self.absences for position in positions
        )


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that autograd saved for backward.

    Saved at a position in a module call (-1: outside every module), let go at `release`.
    """

    value: Value
    call: int
    position: int
    release: int


class Unpack(NamedTuple):
    """Backward asks for a saved tensor at a position."""

    save: int
    position: int


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: `start` and `stop` are positions; `occurrence` counts its calls.

    Calls without gradients, or made by a checkpoint during backward, have occurrence -1.
    """

    path: str
    class_name: str
    occurrence: int
    parent: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Block:
    """One call of a block: the unit of planning and of replay.

    `children` is empty for a whole module; for a stretch of a Sequential it names the children.
    `saves` indexes `Graph.saves`. `kind` indexes `Profile.kinds` where the call is compiled: it is
    then one op of forward and one of backward.
    """

    path: str
    class_name: str
    occurrence: int
    start: int
    stop: int
    saves: tuple[int, ...]
    children: tuple[str, ...] = ()
    kind: int = -1

    @property
    def is_compiled(self) -> bool:
        """Whether the call runs as compiled code."""
        return self.kind >= 0

    @property
    def name(self) -> str:
        """The path as a person reads it: `layers.3`, `features[0…3]`, `cell (call 2)`."""
        return block_name(self.path, self.children, self.occurrence)


class Columns(NamedTuple):
    """Numbers of all ops and of all storages, to reckon with at once: planning asks often."""

    rises: "array[int]"
    costs: "array[int]"
    births: "array[int]"
    deaths: "array[int]"
    nbytes: "array[int]"


@dataclass(frozen=True)
class Graph:
    """Every op of the step, every storage it touched, everything autograd saved.

    `is_on_host`: the step runs on the CPU, so what an engine keeps there, such as the states of
    random generators, takes memory of the same kind. `loss` is the last cross entropy that could be
    computed by rows.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...]
    unpacks: tuple[Unpack, ...]
    calls: tuple[ModuleCall, ...]
    is_on_host: bool = True
    loss: LossCall | None = None

    def path(self, op: Op) -> str:
        """The module path an op ran in, empty outside every module."""
        return self.calls[op.call].path if op.call >= 0 else ""

    def births(self, index: int) -> tuple[int, ...]:
        """The storages that an op allocated, in the order of its writes."""
        writes = self.ops[index].writes
        return tuple(v.storage for v in writes if self.storages[v.storage].birth == index)

    def is_generator(self, number: int) -> bool:
        """Whether a storage stands for the state of a random generator."""
        return self.storages[number].category is Category.GENERATOR

    @functools.cached_property
    def final_versions(self) -> tuple[int, ...]:
        """The version in which forward and backward leave each storage."""
        versions = [0] * len(self.storages)
        for op in self.ops:
            if op.phase is not Phase.OPTIMIZER:
                for value in op.writes:
                    versions[value.storage] = max(versions[value.storage], value.version)
        return tuple(versions)

    @functools.cached_property
    def columns(self) -> Columns:
        """The numbers of its ops and storages, in their order."""
        return Columns(
            array("q", (op.rise_bytes for op in self.ops)),
            array("q", (op.cost for op in self.ops)),
            array("q", (storage.birth for storage in self.storages)),
            array("q", (storage.death for storage in self.storages)),
            array("q", (storage.nbytes for storage in self.storages)),
        )

    @functools.cached_property
    def saves_per_storage(self) -> Counter[int]:
        """How often autograd saved something of each storage."""
        return Counter(save.value.storage for save in self.saves)

    def keys(self, block: Block) -> Iterator[tuple[int, str]]:
        """Name each op of a block by module, operator and occurrence: stable from run to run.

        Ops that allocate are counted apart from those that do not, which name no storage.
        """
        seen: dict[tuple[str, bool], int] = {}
        for index in range(block.start, block.stop):
            op = self.ops[index]
            name = scoped_name(relative_path(self.path(op), block.path), op.name)
            allocates = any(self.storages[value.storage].birth == index for value in op.writes)
            seen[name, allocates] = seen.get((name, allocates), -1) + 1
            yield index, f"{name}#{seen[name, allocates]}"


def block_name(path: str, children: tuple[str, ...] = (), occurrence: int = 0) -> str:
    """A block call as a person reads it: `layers.3`, `features[0…3]`, `cell (call 2)`."""
    name = path or "the whole model"
    if len(children) == 1:
        name = f"{path}.{children[0]}" if path else children[0]
    elif children:
        name = f"{path}[{children[0]}…{children[-1]}]"
    return f"{name} (call {occurrence})" if occurrence else name


@functools.lru_cache(maxsize=1 << 14)
def relative_path(path: str, block_path: str) -> str:
    """A module's path seen from a block: `attention.query`, or `/shared.norm` for one outside."""
    if path == block_path:
        return ""
    inside = f"{block_path}." if block_path else ""
    return path.removeprefix(inside) if path.startswith(inside) else f"/{path}"


def scoped_name(path: str, operator: str) -> str:
    """An operator as called in a module: `attention.query::aten.addmm.default`."""
    return f"{path}::{operator}" if path else operator
