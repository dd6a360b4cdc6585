"""Accelerate: the same line, before or after prepare."""

import torch
from accelerate import Accelerator

import leanstep
from leanstep import models


def train(is_lean):
    model, batch, loss, optimizer = models.build("llama-tiny", batch=4)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    lean = leanstep.lean(model, optimizer, budget="80%") if is_lean else None  # the line
    torch.manual_seed(7)
    losses = []
    for _ in range(4):
        value = loss(model, batch)
        accelerator.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses, lean


plain, _ = train(False)
losses, lean = train(True)
print(lean)
if plain != losses:
    raise SystemExit(f"the numbers differ: {plain} and {losses}")
print("losses: equal, bit for bit")
