"""Any loop: one line. The first step is recorded as it runs, the second runs by the plan."""

from shared import assert_equal, train

import leanstep
from leanstep import models

plain = train(*models.build("gpt2-tiny", batch=8))

model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
lean = leanstep.lean(model, optimizer, budget="70%")  # the line
losses = train(model, batch, loss, optimizer)

print(lean)
assert_equal(plain, losses)
