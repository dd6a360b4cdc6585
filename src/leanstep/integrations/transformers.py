"""Hugging Face's Trainer: one callback.

    Trainer(..., callbacks=[LeanCallback(budget="16GiB")])

The first optimizer step is recorded with every block recomputed, and the plan is in force from the
second on (`leanstep.lean`). Nothing is wrapped and nothing is run apart, so it makes no difference
what the Trainer has put around the model by then (DDP, mixed precision, PEFT). Checkpointing that
is on (`gradient_checkpointing=True`, `model.gradient_checkpointing_enable()`) is taken over.
"""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

import leanstep


class LeanCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Let the Trainer's model train inside a memory budget, with the same numbers.

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
        self.lean: Any = None
        self._wishes: dict[str, Any] = {
            "budget": budget,
            "solver": solver,
            "overrides": overrides,
            "chunks": chunks,
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first step: model and optimizer are there, and nothing has run."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.lean is not None and self.lean.model is model and self.lean.plan is not None:
            return
        if self.lean is not None:
            self.lean.remove()
        self.lean = leanstep.lean(model, optimizer, takeover=True, **self._wishes)
