"""What stands before and after the layers: embeddings, the tied head, the loss on tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from leanstep.models.transformer.sizes import TransformerSizes

IGNORED_LABEL = -100


class Embeddings(nn.Module):
    """Add the embedding of each token to that of its position, then drop out."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.tokens = embedding(sizes.vocabulary, sizes.width)
        self.positions = embedding(sizes.positions, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden rows that the first layer reads."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: Tensor = self.dropout(self.tokens(tokens) + self.positions(places))
        return hidden


def embedding(count: int, width: int) -> nn.Embedding:
    """Return a table with small entries, so that a head tied to it starts near uniform."""
    # Not by nn.Embedding(count, width): it would draw the largest table of the model twice.
    entries = torch.empty(count, width).normal_(std=0.02)
    table: nn.Embedding = nn.Embedding.from_pretrained(entries, freeze=False)
    return table


def tied_head(table: nn.Embedding) -> nn.Linear:
    """Return a linear layer without bias whose weight is the embedding's own parameter."""
    # Made on meta: a weight of its own would be allocated and drawn only to be thrown away.
    head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False, device="meta")
    head.weight = table.weight
    return head


def logits_or_loss(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return the logits, or where labels are given their mean cross entropy."""
    if labels is None:
        return logits
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL
    )


def broadcast_mask(mask: Tensor | None) -> Tensor | None:
    """Return a mask over positions in the shape that attention wants, for all heads and rows."""
    return None if mask is None else mask[:, None, None, :]
