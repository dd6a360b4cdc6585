"""Coming from checkpoint_sequential: the same cut in place, and the number found."""

import torch
from shared import assert_equal, train
from torch import nn

import leanstep


def make():
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers)
    batch = torch.randn(512, 64)
    return model, batch, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), 0.1)


plain = train(*make())

# Before: checkpoint_sequential(model, 4, batch, use_reentrant=False), in place of model(batch).
model, batch, loss, optimizer = make()
cut = leanstep.segments(model, 4)
assert_equal(plain, train(model, batch, loss, optimizer))
cut.remove()

cut = leanstep.segments(model, "auto", batch=batch, loss=loss, optimizer=optimizer, budget="70%")
print(f"70 % of the memory: {cut.count} segments, predicted peak {cut.peak_bytes} bytes")
