"""A cross entropy that is computed some rows at a time."""

from dataclasses import dataclass

# The op that has the rows of scores, and a label for each.
LOSS_OP = "aten.nll_loss_forward.default"


@dataclass(frozen=True, slots=True)
class LossCall:
    """The cross entropy of a recorded step, as it was called: with how many rows, on which storage.

    Autocast may cast the logits inside, so what its first op reads can be another one.
    """

    num_rows: int
    logits: int


@dataclass(frozen=True, slots=True)
class LossInChunks:
    """The loss of a step, `num_rows` rows at a time, forward and backward.

    `path` is the module whose forward computes it. What a chunk needs is gone before the next one,
    so that the scores (`aten._log_softmax`) and their gradient never exist as a whole: they are
    computed again in backward, which takes `extra_seconds`.
    """

    path: str
    num_rows: int
    freed_bytes: int
    extra_seconds: float
