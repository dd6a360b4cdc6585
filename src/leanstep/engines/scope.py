"""Where in the model an op runs: the module that names it in a plan."""

import sys
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType

import torch

from leanstep.ir.graph import block_name, relative_path
from leanstep.torch_private.modules import MODULE_CALL_CODE


class ModulePaths:
    """The path of each module of a model, as the recorder of steps writes it.

    `evaluating` are the modules that were in evaluation mode when the plan was made.
    """

    def __init__(self, model: torch.nn.Module, evaluating: Collection[str]) -> None:
        # Weak: a plan in force shall not keep a module alive that the user replaces. By id: this is
        # looked up for every op that is recorded.
        # What torch.jit made is named in no recording.
        self._paths = {
            id(module): (weakref.ref(module), path)
            for path, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        self._evaluating = frozenset(evaluating)

    def path(self, module: torch.nn.Module) -> str | None:
        """The path of a module, if it was there when the plan was applied."""
        reference, path = self._paths.get(id(module), (None, None))
        return path if reference is not None and reference() is module else None

    def here(self) -> str | None:
        """The path of the innermost module that is being called on this thread.

        Read off the interpreter's frames: hooks would change the modules, and cost more.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is MODULE_CALL_CODE:
                path = self.path(frame.f_locals["self"])
                if path is not None:
                    return path
            frame = frame.f_back
        return None

    def was_evaluating(self, path: str) -> bool:
        """Whether a module was in evaluation mode when the plan was made."""
        return path in self._evaluating

    def is_planned_mode(self, module: torch.nn.Module) -> bool:
        """Whether a module and all inside it train or evaluate as they did for the plan."""
        modules = module.modules()
        return all(m.training != (self.path(m) in self._evaluating) for m in modules)


@dataclass(frozen=True)
class Scope:
    """One block, and the module paths seen from it.

    `is_checked`: the plan is known to be for this model.
    """

    paths: ModulePaths
    block_path: str
    children: tuple[str, ...] = ()
    is_checked: bool = False

    @property
    def name(self) -> str:
        """The block as a person reads it."""
        return block_name(self.block_path, self.children)

    @property
    def was_evaluating(self) -> bool:
        """Whether the block was in evaluation mode when the plan was made."""
        return self.paths.was_evaluating(self.block_path)

    def here(self) -> str:
        """The path inside the block of the module that is being called."""
        path = self.paths.here()
        return "" if path is None else relative_path(path, self.block_path)

    def is_planned_mode(self, module: torch.nn.Module) -> bool:
        """Whether the block trains or evaluates as it did for the plan."""
        return self.paths.is_planned_mode(module)
