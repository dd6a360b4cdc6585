"""BERT: a bidirectional post-norm encoder that learns to fill in masked tokens.

Token, position and segment embeddings are summed and normalised; the head transforms the hidden
rows once more and scores them against the token embedding itself, plus a bias. The next-sentence
task and its pooler are left out, as most who pre-train today do.

Paper: Devlin et al., BERT, 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from leanstep.models.transformer.ends import broadcast_mask, embedding, logits_or_loss
from leanstep.models.transformer.layers import PostNormLayer
from leanstep.models.transformer.sizes import BertSizes


class Bert(nn.Module):
    """Score every token at every position; with `labels`, return the mean cross entropy."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(sizes)
        self.layers = nn.ModuleList(PostNormLayer(sizes) for _ in range(sizes.depth))
        self.head = MaskedTokenHead(self.embeddings.tokens)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or the loss where `labels` are given; `mask` is true for real tokens."""
        hidden = self.embeddings(tokens, segments)
        mask = broadcast_mask(mask)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return logits_or_loss(self.head(hidden), labels)


class BertEmbeddings(nn.Module):
    """Sum the embeddings of token, position and segment; normalise and drop out."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.tokens = embedding(sizes.vocabulary, sizes.width)
        self.positions = embedding(sizes.positions, sizes.width)
        self.segments = embedding(2, sizes.width)
        self.norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the hidden rows that the first layer reads; without segments all are the first."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        segments = torch.zeros_like(tokens) if segments is None else segments
        total = self.tokens(tokens) + self.positions(places) + self.segments(segments)
        hidden: Tensor = self.dropout(self.norm(total))
        return hidden


class MaskedTokenHead(nn.Module):
    """Transform the hidden rows and score them against the token embedding."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(table.embedding_dim, table.embedding_dim)
        self.norm = nn.LayerNorm(table.embedding_dim, eps=1e-12)
        self.weight = table.weight
        self.bias = nn.Parameter(torch.zeros(table.num_embeddings))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden`."""
        hidden = self.norm(functional.gelu(self.transform(hidden)))
        return functional.linear(hidden, self.weight, self.bias)
