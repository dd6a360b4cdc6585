"""Coming from torch.utils.checkpoint: blocks chosen by hand, and then by the budget."""

from shared import assert_equal, train

import leanstep
from leanstep import models

plain = train(*models.build("llama-tiny", batch=4))

# Before: hidden = checkpoint(layer, hidden, use_reentrant=False) in every second layer's place.
model, batch, loss, optimizer = models.build("llama-tiny", batch=4)
by_hand = leanstep.fit(
    model, batch, loss, optimizer=optimizer, budget="100%", overrides={"layers.0": "recompute"}
)
print("by hand:", *(decision.name for decision in by_hand.plan.changed))
assert_equal(plain, train(model, batch, loss, optimizer))
by_hand.remove()

model, batch, loss, optimizer = models.build("llama-tiny", batch=4)
fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="80%")
print(fitted)
assert_equal(plain, train(model, batch, loss, optimizer))
