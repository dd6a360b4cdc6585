"""What the examples have in common: a comparison with the model that leanstep never saw."""

import torch


def train(model, batch, loss, optimizer, steps=4):
    """A training loop that does not know of leanstep; returns the losses."""
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def assert_equal(plain, lean):
    """Bit for bit, or the example fails."""
    if plain != lean:
        raise SystemExit(f"the numbers differ: {plain} and {lean}")
    print("losses, untouched against leanstep: equal, bit for bit")
