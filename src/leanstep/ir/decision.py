"""What happens to one block call, op by op."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from leanstep.ir.graph import block_name

# A call of a step: the block's path, which of its calls, and the children of a Sequential.
Place = tuple[str, int, tuple[str, ...]]


class Engine(StrEnum):
    """How a block is run."""

    UNTOUCHED = "untouched"
    REPLAY = "replay"
    MODULE = "module"
    INDUCTOR = "inductor"


class OpRow(NamedTuple):
    """One op of a block call: the bytes of it that are kept and dropped, and what comes of it.

    `name` is that of the storages' keys (`attention.query::aten.addmm.default#0`), `seconds` the
    time it takes to run it again. `peak_freed_bytes` is how much less of its outputs is live where
    the planned step has its peak, `unplanned_peak_freed_bytes` where the untouched one had it.
    `host_bytes`, of those kept, wait in host memory; said in an explanation only.
    """

    name: str
    source: str
    kept_bytes: int
    dropped_bytes: int
    seconds: float
    peak_freed_bytes: int
    unplanned_peak_freed_bytes: int
    host_bytes: int = 0


# The key of an offloaded storage that is not the call's own: its largest input.
INPUT = "input"


class Offload(NamedTuple):
    """One kept storage of a call that waits in host memory between forward and backward.

    The `key` is that of a storage the call made, or `INPUT`. It is gone from the device when the
    call `release` places after its own has ended (0: its own), and on its way back when backward
    comes to the call `fetch` places after its own.
    """

    key: str
    nbytes: int
    release: int
    fetch: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one block call.

    `drop` names the storages that autograd shall not hold, each by the op that allocated it (its
    module inside the block, operator, how often that ran there before) and its place among that
    op's new storages: `attention.query::aten.addmm.default#0:0`. Under `module` everything inside
    is dropped and `drop` is empty. `recipes` names, in the same way, what comes back by a cheap
    replay instead of its op. `why` is for people. `rows` are the ops that autograd saves from
    or that run again. The bytes freed are those of `OpRow`, and what the engine holds for itself
    (random state, inputs that would be gone) counts against them.

    An output that the next call saves, the border between the two, may be dropped too if the next
    decision says `border_in`: that call then runs with hooks (`replay`) even if it drops nothing
    itself, and its first request in backward brings the border back.

    `offload` names kept storages that wait in host memory.

    Under `inductor` the call is compiled, and `form` names one of the plan's forms.
    """

    path: str
    occurrence: int
    children: tuple[str, ...]
    engine: Engine
    drop: tuple[str, ...]
    kept_bytes: int
    dropped_bytes: int
    extra_seconds: float
    why: str
    rows: tuple[OpRow, ...] = field(default=(), repr=False)
    peak_freed_bytes: int = 0
    unplanned_peak_freed_bytes: int = 0
    recipes: tuple[str, ...] = ()
    border_in: bool = False
    offload: tuple[Offload, ...] = ()
    form: str = ""

    @property
    def place(self) -> Place:
        """Which call it is about."""
        return self.path, self.occurrence, self.children

    @property
    def host_bytes(self) -> int:
        """What waits in host memory between forward and backward, the call's input included."""
        return sum(entry.nbytes for entry in self.offload)

    @property
    def host_bytes_by_op(self) -> dict[str, int]:
        """The same by the name of the op that made them, as in `rows`; its input by `INPUT`."""
        found: dict[str, int] = {}
        for entry in self.offload:
            op = entry.key if entry.key == INPUT else entry.key.rpartition(":")[0]
            found[op] = found.get(op, 0) + entry.nbytes
        return found

    @property
    def own_host_bytes(self) -> int:
        """The same without its input."""
        return sum(entry.nbytes for entry in self.offload if entry.key != INPUT)

    @property
    def resident_bytes(self) -> int:
        """What the call made, is kept, and stays on the device."""
        return 0 if self.engine is Engine.MODULE else max(0, self.kept_bytes - self.own_host_bytes)

    @property
    def takes_border(self) -> bool:
        """Whether the call gets its input in backward from the call before."""
        return self.border_in and self.engine is Engine.REPLAY

    @property
    def name(self) -> str:
        """The block call as a person reads it."""
        return block_name(self.path, self.children, self.occurrence)
