"""Who else is at work in a step: checkpoints in the model's own code, and compiled functions.

Read off the interpreter's frames while the step is recorded. A model that checkpoints by itself is
planned as it runs, and the profile says so. Compiled code inside a block is refused: a planned
block runs uncompiled, which would be another program than the one the user has.
"""

import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch.utils.checkpoint

from leanstep.eager import is_compiled_call
from leanstep.errors import InputError
from leanstep.ir import Block
from leanstep.recorder.source import is_torchs, source_of
from leanstep.torch_private.stance import is_compiler_on

_CHECKPOINT = torch.utils.checkpoint.__name__


def is_torchs_own(function: Any) -> bool:
    """Whether a function that goes by a name of torch is torch's, not put there by others."""
    code = getattr(function, "__code__", None)
    return code is not None and is_torchs(code.co_filename)


def full_name(function: Any) -> str:
    """A function with the module it comes from."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


class Company:
    """What was seen: where each kind of company was called from, and at which ops.

    A step that is recorded while it runs may be inside of compiled code as a whole (`is_inside`):
    that is compiled around the planned blocks, as a model is that was compiled after `fit`.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        # Asked before the step is recorded: there the compiler steps aside.
        self._compiles = is_compiler_on()
        function = torch.utils.checkpoint.checkpoint
        self._replaced = None if is_torchs_own(function) else function
        self._replacement = getattr(function, "__code__", None)
        self.checkpoints: dict[str, None] = {}
        self.replaced: dict[str, None] = {}
        self.compiled: dict[int, str] = {}
        self.scripted: dict[str, None] = {}
        self._around: dict[int, str] = {}
        if is_inside and self._compiles:
            above = (f for f, _ in traceback.walk_stack(sys._getframe(1)) if is_compiled_call(f))
            self._around = {id(frame): source_of(frame) for frame in above}

    def see(self, op_index: int) -> None:
        """Look at the frames above an op of forward."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._replaced is not None and frame.f_code is self._replacement:
                self.replaced[source_of(frame.f_back)] = None
            elif frame.f_code.co_name == "checkpoint":
                name = frame.f_globals.get("__name__", "")
                # DeepSpeed's, say, goes by this name too; others may mean something else by it.
                if "checkpoint" in name:
                    self.checkpoints[f"{name}.checkpoint at {source_of(frame.f_back)}"] = None
            elif self._compiles and is_compiled_call(frame) and id(frame) not in self._around:
                self.compiled[op_index] = source_of(frame)
            frame = frame.f_back

    def notes(self, blocks: Iterable[Block]) -> Iterator[str]:
        """What a plan says of it, in sentences.

        Raises:
            InputError: the plan would not be of the program that the user runs.
        """
        if self.replaced:
            assert self._replaced is not None
            raise InputError(
                f"{_CHECKPOINT}.checkpoint was replaced by {full_name(self._replaced)}, and the "
                f"model calls it ({_first(self.replaced)}): leanstep does not know what that keeps "
                "and cannot switch it off from outside; put torch's own back, or switch the "
                "model's checkpointing off"
            )
        for block in blocks:
            if inside := [s for op, s in self.compiled.items() if block.start <= op < block.stop]:
                raise InputError(
                    f"{block.name} runs code that torch.compile has compiled ({inside[0]}), and a "
                    "planned block runs uncompiled: take the torch.compile away, or call "
                    'torch.compiler.set_stance("force_eager") before fit'
                )
        if self.checkpoints:
            yield (
                f"the model checkpoints by itself ({_first(self.checkpoints)}): what that drops "
                "and runs again is part of the step that was recorded"
            )
        if self.scripted:
            outermost = [p for p in self.scripted if p.rpartition(".")[0] not in self.scripted]
            yield (
                f"modules made by torch.jit ({_first(outermost)}) are not planned by themselves: "
                "their ops belong to what calls them"
            )
        if self._around:
            yield (
                f"the model is compiled as a whole ({_first(self._around.values())}): planned "
                'blocks run uncompiled inside of it; leanstep.fit(..., engine="inductor") compiles '
                "the blocks themselves"
            )
        if self.compiled:
            yield (
                f"code outside of the blocks is compiled ({_first(self.compiled.values())}): its "
                "memory and time were recorded as if it were not"
            )


def _first(places: Iterable[str]) -> str:
    different = list(dict.fromkeys(places))
    more = len(different) - 1
    return f"{different[0]} and {more} more" if more else different[0]
