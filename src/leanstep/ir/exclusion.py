"""What must not be done to a block, as a dry run on the device found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from leanstep.ir.decision import Engine
from leanstep.ir.graph import Block, block_name
from leanstep.ir.text import some_names


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A block that an engine must not run, and why.

    `children` are the layers of a Sequential that ran as one; none of them is run so again.
    """

    path: str
    children: tuple[str, ...]
    engine: Engine
    reason: str

    @property
    def name(self) -> str:
        """The block as a person reads it."""
        return block_name(self.path, self.children)

    def covers(self, block: Block) -> bool:
        """Whether a block call is meant, or has a part that is."""
        if block.path != self.path:
            return False
        return not self.children or not block.children or bool({*self.children} & {*block.children})


_HOW = {
    Engine.REPLAY: "not replayed",
    Engine.MODULE: "not run twice",
    Engine.INDUCTOR: "not compiled",
}


def left_out(exclusions: Sequence[Exclusion]) -> Iterator[str]:
    """A sentence for each kind of exclusion, naming the blocks."""

    def kind(one: Exclusion) -> tuple[Engine, str]:
        return one.engine, one.reason

    for (engine, reason), alike in groupby(sorted(exclusions, key=kind), key=kind):
        names = some_names([one.name for one in alike])
        yield f"{_HOW[engine]}: {names} ({reason})"
