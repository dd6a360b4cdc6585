"""Coming from torch.compile's activation_memory_budget: a share of what, and what it is in bytes.

There, 0.5 is half of the saved activations; the peak follows by itself, not always downwards.
"""

from shared import assert_equal, train

import leanstep
from leanstep import models

plain = train(*models.build("gpt2-tiny", batch=8))
model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)

profile = leanstep.profile(model, batch, loss, optimizer=optimizer)
line = leanstep.simulate(profile)
saved = sum(nbytes for category, nbytes in line.at_peak if category == "activation")
print(f"peak {profile.peak_bytes} bytes, of which {saved} are activations")

budget = profile.peak_bytes - saved // 2
fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget=budget)
print(fitted)
assert_equal(plain, train(model, batch, loss, optimizer))
