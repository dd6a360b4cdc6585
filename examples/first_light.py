"""Fit two models under part of their memory, train them, undo it: what `make demo` runs.

Everything printed is measured in this run.
"""

import torch
from rich.console import Console

import leanstep
from leanstep import models

STEPS = 5
SETTINGS = {
    "gpt2-mini": ("60%", {"batch": 4, "seq": 256}),
    "resnet-tiny": ("80%", {"batch": 64, "image": 96, "optimizer": "sgd"}),
}


def train(model, batch, loss, optimizer):
    """The user's own loop; it does not know whether the model is fitted."""
    torch.manual_seed(7)
    losses = []
    for _ in range(STEPS):
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(value.item())
    return losses


def main():
    """Run the demo on models that take seconds on two cores."""
    console = Console(highlight=False)
    for name, (budget, size) in SETTINGS.items():
        console.rule(f"{name}: {', '.join(f'{key} {value}' for key, value in size.items())}")
        plain = train(*models.build(name, **size))
        model, batch, loss, optimizer = models.build(name, **size)

        fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)
        print(fitted)

        lean = train(model, batch, loss, optimizer)
        fitted.remove()
        verdict = "equal, bit for bit" if plain == lean else "DIFFERENT"
        print(f"\n{STEPS} training steps, losses untouched against fitted: {verdict}")
        print("  " + "  ".join(f"{value:.6f}" for value in lean))


if __name__ == "__main__":
    main()
