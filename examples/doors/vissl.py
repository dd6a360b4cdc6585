"""Coming from VISSL: the same YAML file; and the number of splits found from a budget."""

import tempfile
from pathlib import Path

from shared import assert_equal, train

import leanstep
from leanstep import models

SIZE = {"batch": 16, "image": 64, "optimizer": "sgd"}

plain = train(*models.build("resnet-tiny", **SIZE))

model, batch, loss, optimizer = models.build("resnet-tiny", **SIZE)
fitted = leanstep.from_config(
    model, Path(__file__).with_name("vissl.yaml"), batch=batch, loss=loss, optimizer=optimizer
)
print(fitted)
assert_equal(plain, train(model, batch, loss, optimizer))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "leanstep.yaml")
    path.write_text("splits: auto\nbudget: 90%\n")
    model, batch, loss, optimizer = models.build("resnet-tiny", **SIZE)
    found = leanstep.from_config(model, path, batch=batch, loss=loss, optimizer=optimizer)
print(f"\nsplits: auto recomputes {len(found.plan.changed)} stretches for 90 % of the memory")
