"""GPT-2 and Llama: causal decoders that learn to predict the next token.

`labels[t]` is the token after `tokens[t]`. The caller shifts the labels, once; shifting the logits
instead would copy the largest activation of the step.

Both tie the head to the token embedding. Llama differs from GPT-2 in its norm (RMSNorm), its
positions (rotary), its keys and values (one head for several queries), its feed-forward (gated)
and in having no biases.

Papers: Radford et al., Language Models are Unsupervised Multitask Learners, 2019; Touvron et al.,
Llama, 2023. Dropout in Llama is ours: the published model has none (`dropout=0.0`).
"""

from __future__ import annotations

from torch import Tensor, nn

from leanstep.models.transformer.attention import SelfAttention
from leanstep.models.transformer.ends import Embeddings, embedding, logits_or_loss, tied_head
from leanstep.models.transformer.feedforward import GatedFeedForward
from leanstep.models.transformer.layers import PreNormLayer, plain_layer
from leanstep.models.transformer.rotary import RotaryTables
from leanstep.models.transformer.sizes import GPT2Sizes, LlamaSizes


class GPT2(nn.Module):
    """Score the token after each position; with `labels`, return the mean cross entropy."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes)
        self.layers = nn.ModuleList(plain_layer(sizes, is_causal=True) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = tied_head(self.embeddings.tokens)

    def forward(self, tokens: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """Return logits, or the loss where `labels` are given."""
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return logits_or_loss(self.head(self.norm(hidden)), labels)


class Llama(nn.Module):
    """Score the token after each position; with `labels`, return the mean cross entropy."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.tokens = embedding(sizes.vocabulary, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        head_width = sizes.width // sizes.heads
        self.rotary = RotaryTables(sizes.positions, head_width, sizes.rotary_base)
        self.layers = nn.ModuleList(llama_layer(sizes) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = (
            tied_head(self.tokens)
            if sizes.is_tied
            else nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        )

    def forward(self, tokens: Tensor, *, labels: Tensor | None = None) -> Tensor:
        """Return logits, or the loss where `labels` are given."""
        hidden = self.dropout(self.tokens(tokens))
        rotary = self.rotary(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, rotary=rotary)
        return logits_or_loss(self.head(self.norm(hidden)), labels)


def llama_layer(sizes: LlamaSizes) -> PreNormLayer:
    """Return a pre-norm layer with RMSNorm, grouped key heads and a gated feed-forward."""
    attention = SelfAttention(
        sizes.width,
        sizes.heads,
        key_heads=sizes.key_heads,
        dropout=sizes.dropout,
        bias=False,
        is_causal=True,
    )
    return PreNormLayer(
        attention,
        GatedFeedForward(sizes.width, sizes.inner),
        lambda: nn.RMSNorm(sizes.width, eps=1e-5),
        sizes.dropout,
    )
