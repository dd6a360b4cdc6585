"""Coming from DeepSpeed: what `activation_checkpointing` asks for, without calls in the model.

There: {"activation_checkpointing": {"number_checkpoints": 2, "cpu_checkpointing": true}}, and every
block of the model goes through deepspeed.checkpointing.checkpoint.
"""

from shared import assert_equal, train

import leanstep
from leanstep import models
from leanstep.solvers.uniform import Uniform

plain = train(*models.build("gpt2-tiny", batch=8))

# number_checkpoints: so many segments, each of which keeps its input.
model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
cut = leanstep.fit(
    model, batch, loss, optimizer=optimizer, budget="100%", solver=Uniform(2), offload=False
)
print(f"{len(cut.plan.changed)} blocks recomputed, peak {cut.plan.peak_bytes} bytes")
assert_equal(plain, train(model, batch, loss, optimizer))

# cpu_checkpointing: on a GPU, what the link can carry goes to pinned host memory by itself.
model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="70%")
print(fitted)
assert_equal(plain, train(model, batch, loss, optimizer))
