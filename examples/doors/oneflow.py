"""Coming from OneFlow: a mark on a module; two in a row, as in its guide, and layers of BERT.

There: `self.module.to(GraphModule).activation_checkpointing = True`.
"""

import torch
from shared import assert_equal, train
from torch import nn

import leanstep
from leanstep import models


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
        self.second = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))

    def forward(self, x):
        return self.second(self.first(x))


def make():
    torch.manual_seed(0)
    model = TwoParts()
    batch = torch.randn(256, 64)
    return model, batch, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), 0.1)


plain = train(*make())
model, batch, loss, optimizer = make()
leanstep.recompute(model.first)
leanstep.recompute(model.second)
lean = leanstep.lean(model, optimizer, budget="100%")
assert_equal(plain, train(model, batch, loss, optimizer))
print("recomputed:", *(decision.name for decision in lean.plan.changed))

plain = train(*models.build("bert-tiny"))
model, batch, loss, optimizer = models.build("bert-tiny")
for layer in model.layers:
    leanstep.recompute(layer)
fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="100%")
print(fitted)
assert_equal(plain, train(model, batch, loss, optimizer))
