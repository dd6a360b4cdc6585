"""What the profiler found out about one training step on one device."""

from dataclasses import dataclass, field, replace

from leanstep.ir.check import check_blocks, check_graph
from leanstep.ir.codec import Saved
from leanstep.ir.decision import Engine
from leanstep.ir.exclusion import Exclusion
from leanstep.ir.form import Kind
from leanstep.ir.graph import Block, Graph
from leanstep.ir.identity import Identity
from leanstep.ir.notebook import html_card, html_lines, html_table
from leanstep.ir.text import table
from leanstep.units import format_bytes, format_seconds

# The CPU time of a replayed op, and of a planned call of a block with all that it saves, in units
# of the time that issuing one op of the untouched step takes. As measured beside an H200 by
# `benchmarks/replay_overhead.py --device cuda`, on BERT's layers with 28 saves each.
_REPLAY_IN_OPS = 5.5
_CALL_IN_OPS = 50.0

# The same of a value that waits on the host, there and back, with what launches take longer while
# it is copied. From steps with and without such, by turns (`docs/benchmarks.md`).
_COPY_IN_OPS = 30.0


@dataclass(frozen=True, slots=True)
class RecipeCost:
    """What a cheap replay of an op call (`rebuild/recipes.py`) costs, as a dry run has found.

    `exact` says that it gave the op's own bits; `workspace_bytes` is what it needs while it runs,
    on top of the output that it rebuilds.
    """

    seconds: float
    exact: bool
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one distinct op call costs: seconds alone on the device, warm, median of several.

    `signature` is the operator's name; two calls that differ in shapes share it. `recipe` is its
    cheap replay, where there is one and it ran.
    """

    signature: str
    seconds: float
    recipe: RecipeCost | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The way between device and host: bytes a second each way, and the host memory there is."""

    to_host: float
    from_host: float
    host_bytes: int


@dataclass(frozen=True, slots=True)
class Profile(Saved):
    """The recorded step with its blocks and measured costs.

    `step_seconds` is the untouched step's time on the device. `other_bytes` is what else was
    allocated there and stays; `slack_bytes` what the allocator was seen to need beyond the ops'
    account (its rounding, what is allocated outside every op). `gradients_kept` says that
    gradients were alive at the step's start. `marks` are the modules that the user wants kept or
    recomputed, by path. `company` says who else drops activations of the step, or compiles parts of
    it. `estimated` says that nothing was measured: the step was imagined for a device that was not
    there. `exclusions` are the blocks that an engine must not run. Where the untouched step does
    not fit on its device (`fits_device`), its time is the sum over its ops. `link` is there where
    activations can be moved to host memory while the device computes. `issue_seconds` is the time
    the CPU takes to issue the step, where the device waits for it, or was seen to wait in a planned
    one; else 0. `copy_seconds` is what each value that waits on the host adds to the step, which is
    the CPU's time for it: 0 where forward leaves the CPU time to spare. With `is_compiled` the
    untouched step is the one with every block compiled in the compiler's own form; `kinds` are the
    kinds of these blocks. `whole_loss` says why the loss cannot be computed in chunks, where that
    was tried.
    """

    graph: Graph = field(repr=False)
    blocks: tuple[Block, ...] = field(repr=False)
    costs: tuple[Cost, ...] = field(repr=False)
    step_seconds: float
    other_bytes: int
    peak_bytes: int
    device: str
    torch_version: str
    model: Identity
    slack_bytes: int = 0
    gradients_kept: bool = False
    marks: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    company: tuple[str, ...] = ()
    estimated: bool = False
    exclusions: tuple[Exclusion, ...] = ()
    fits_device: bool = True
    link: Link | None = None
    issue_seconds: float = 0.0
    copy_seconds: float = 0.0
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    is_compiled: bool = False
    whole_loss: str = ""

    @property
    def launch_seconds(self) -> float:
        """The least time that an op takes that runs again: the CPU's, where the device waits."""
        return _REPLAY_IN_OPS * self._seconds_an_op

    @property
    def call_seconds(self) -> float:
        """What the engine itself takes for a call of a block, beside the ops that run again."""
        return _CALL_IN_OPS * self._seconds_an_op

    @property
    def _seconds_an_op(self) -> float:
        return self.issue_seconds / max(1, len(self.graph.ops))

    def waiting_for_cpu(self, issue_seconds: float) -> "Profile":
        """The same of a step in which the device waits for the CPU all the time."""
        copy_seconds = self.copy_seconds_at(issue_seconds)
        return replace(self, issue_seconds=issue_seconds, copy_seconds=copy_seconds)

    def copy_seconds_at(self, issue_seconds: float) -> float:
        """The CPU's time for a value that waits on the host, if it issues the step in so long."""
        return _COPY_IN_OPS * issue_seconds / max(1, len(self.graph.ops))

    def seconds(self, op_index: int) -> float:
        """The measured seconds of one op."""
        return self.costs[self.graph.ops[op_index].cost].seconds

    def excludes(self, block: Block, engine: Engine) -> bool:
        """Whether an engine must not run a block call."""
        return any(one.engine is engine and one.covers(block) for one in self.exclusions)

    def __str__(self) -> str:
        """What a person wants to know first: the peak, the time, and where they come from."""
        lines = [self._title, "", *table(self._rows, left=(0, 1)), "", *self.notes]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        rows = [("", ""), *self._rows]
        return html_card(self._title, html_table(rows, left=(0, 1)), html_lines(self.notes))

    @property
    def _title(self) -> str:
        device = f"{self.device} (estimated)" if self.estimated else self.device
        return f"{self.model} · {device} · torch {self.torch_version}"

    @property
    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("peak memory", format_bytes(self.peak_bytes)),
            ("step time", format_seconds(self.step_seconds)),
            ("recorded", f"{len(self.graph.ops)} ops, {len(self.blocks)} block calls"),
        ]

    def check(self) -> None:
        """Raise unless the graph and its blocks obey their rules."""
        check_graph(self.graph)
        check_blocks(self.graph, self.blocks)
