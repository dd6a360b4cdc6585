"""The loop that a user has, for demos: it does not know whether the model is fitted."""

import torch

from leanstep.models.build import Built
from leanstep.stages import stage


def train(built: Built, *, steps: int = 5, seed: int = 7) -> list[float]:
    """Train for a few steps, with draws from `seed`, and return the losses."""
    model, batch, loss, optimizer = built
    with stage("training"), torch.random.fork_rng():
        torch.manual_seed(seed)
        losses = []
        for _ in range(steps):
            value = loss(model, batch)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(value.item())
    return losses
