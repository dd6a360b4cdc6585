"""Lightning's Trainer: one callback.

    Trainer(..., callbacks=[LeanCallback(budget="16GiB")])

Lightning calls `training_step`, not the module, and inside `optimizer.step()`; so the callback says
when a step begins and when its forward ends. The rest is `leanstep.lean`. Works with the packages
`lightning` and `pytorch_lightning`, for modules that are optimized automatically by one optimizer.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import leanstep

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _host() -> Any:
    """The package that the user has loaded, else the first that is installed."""
    for name in _NAMES:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return importlib.import_module(_NAMES[0])
    except ModuleNotFoundError:
        return importlib.import_module(_NAMES[1])


class LeanCallback(_host().Callback):  # type: ignore[misc]
    """Let a LightningModule train inside a memory budget, with the same numbers.

    The arguments are those of `leanstep.lean`. `lean` is what that returned, once training has
    begun: print it, or read its `profile` and `plan`; `lean.remove()` undoes it.
    """

    def __init__(
        self,
        budget: str | int = "60%",
        *,
        solver: str = "auto",
        overrides: Mapping[str, str] | None = None,
        chunks: bool = True,
    ) -> None:
        super().__init__()
        self.lean: Any = None
        self._wishes: dict[str, Any] = {
            "budget": budget,
            "solver": solver,
            "overrides": overrides,
            "chunks": chunks,
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the first step: the optimizers are there."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise leanstep.LeanstepError(
                "LeanCallback is for modules that Lightning optimizes by itself with one "
                "optimizer: call leanstep.lean(self.model, optimizer, budget=...) in "
                "on_train_start of yours"
            )
        if self.lean is not None:
            self.lean.remove()
        (optimizer,) = trainer.optimizers
        self.lean = leanstep.lean(pl_module, optimizer, takeover=True, **self._wishes)
        self.lean.watch(optimizer, takeover=True, calls=False)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that a step begins."""
        self.lean.begin_step(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Note that its forward has ended."""
        self.lean.end_forward()
