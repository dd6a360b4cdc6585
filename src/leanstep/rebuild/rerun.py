"""Which ops may run a second time, judged by what was recorded of them."""

from collections.abc import Collection, Iterable

from leanstep.ir import Fact, Op, Value
from leanstep.rebuild.program import Rerun

# Rerun without their running statistics: the output has the same bits, and nothing is written.
STATISTICS_ARE_OPTIONAL = (
    "aten.native_batch_norm.default",
    "aten.cudnn_batch_norm.default",
    "aten.miopen_batch_norm.default",
)

# Their output is memory as it was found. Who reads that before an op has written it reads what code
# that torch does not see (a Triton kernel, NumPy) has put there.
UNWRITTEN = ("aten.empty", "aten.new_empty")

# The outputs of such ops stay what they were: a second run may differ, or must not happen.
NEVER_RERUN = frozenset(
    {
        Fact.OWN_GENERATOR,
        Fact.COLLECTIVE,
        Fact.DYNAMIC_SHAPE,
        Fact.HOST_READ,
        Fact.NOT_REPLAYABLE,
    }
)


def rerun(index: int, op: Op) -> Rerun | None:
    """An op as it would run again, or None where it must not."""
    if NEVER_RERUN.intersection(op.facts):
        return None
    if Fact.WRITES_BUFFER not in op.facts:
        return Rerun(index, op.reads, op.writes)
    if op.name not in STATISTICS_ARE_OPTIONAL:
        return None
    written = {value.storage for value in op.writes if value.version > 0}
    return Rerun(
        index,
        tuple(value for value in op.reads if value.storage not in written),
        tuple(value for value in op.writes if value.storage not in written),
    )


def reads_unwritten(
    reads: Iterable[Value], writes: Iterable[Value], unwritten: Collection[Value]
) -> bool:
    """Whether an op reads memory that no op has written, and does not write it itself."""
    written = {value.storage for value in writes}
    return any(value in unwritten and value.storage not in written for value in reads)
