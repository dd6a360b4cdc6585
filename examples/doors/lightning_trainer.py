"""Lightning: one callback."""

import tempfile

import lightning.pytorch as host
import torch

from leanstep import models
from leanstep.integrations.lightning import LeanCallback


class Module(host.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.rows, self.loss, _ = models.build("gpt2-tiny", batch=8)

    def training_step(self, batch, _):
        return self.loss(self.model, self.rows)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(callbacks):
    module = Module()
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        trainer = host.Trainer(
            accelerator="cpu",
            max_steps=4,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, torch.utils.data.DataLoader(range(8), batch_size=1))
    return module


plain = train([])
callback = LeanCallback(budget="70%")
lean = train([callback])

print(callback.lean)
pairs = zip(plain.parameters(), lean.parameters(), strict=True)
if not all(torch.equal(expected, got) for expected, got in pairs):
    raise SystemExit("the trained weights differ")
print("trained weights: equal, bit for bit")
