"""Coming from Hugging Face: one callback in place of gradient_checkpointing=True."""

import tempfile

import torch
from transformers import RobertaConfig, RobertaForSequenceClassification, Trainer, TrainingArguments

from leanstep.integrations.transformers import LeanCallback

tokens = torch.randint(3, 97, (64, 48), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": int(row[0]) % 2} for row in tokens]


def train(callbacks):
    torch.manual_seed(1)
    config = RobertaConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = RobertaForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=4,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        Trainer(model, arguments, train_dataset=ROWS, callbacks=callbacks).train()
    return model


plain = train([])
callback = LeanCallback(budget="80%")
lean = train([callback])

print(callback.lean)
pairs = zip(plain.parameters(), lean.parameters(), strict=True)
if not all(torch.equal(expected, got) for expected, got in pairs):
    raise SystemExit("the trained weights differ")
print("trained weights: equal, bit for bit")
