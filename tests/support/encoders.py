"""A language model small enough for tests, whose peak is in its loss."""

import torch
from torch import nn
from torch.nn import functional


class Encoder(nn.Module):
    """Blocks that can be planned, and a loss."""

    def __init__(self, words=1024):
        super().__init__()
        self.words = nn.Embedding(words, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(32, words)

    def forward(self, tokens, labels):
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def encoding(words=1024):
    torch.manual_seed(7)
    model = Encoder(words)
    tokens = torch.randint(words, (8, 64))
    return model, {"tokens": tokens, "labels": tokens.roll(1, 1)}
