"""The three layers that the Transformers here are stacks of.

They differ in where they normalise. Post-norm (BERT) normalises the sum, so the residual stream
passes through every norm; pre-norm (GPT-2, Llama) normalises each branch's input and leaves the
stream alone. A cross layer is a pre-norm layer with a second attention, over an encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from leanstep.models.transformer.attention import CrossAttention, SelfAttention
from leanstep.models.transformer.feedforward import FeedForward
from leanstep.models.transformer.rotary import Rotary
from leanstep.models.transformer.sizes import TransformerSizes


class PostNormLayer(nn.Module):
    """Attend, add, normalise; feed forward, add, normalise."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.attention = SelfAttention(sizes.width, sizes.heads, dropout=sizes.dropout)
        self.attention_norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.feedforward = FeedForward(sizes.width, sizes.inner)
        self.feedforward_norm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the next hidden rows; `mask` is true where a position may be read."""
        attended = self.dropout(self.attention(hidden, mask=mask))
        hidden = self.attention_norm(hidden + attended)
        output: Tensor = self.feedforward_norm(hidden + self.dropout(self.feedforward(hidden)))
        return output


class PreNormLayer(nn.Module):
    """Normalise, attend, add; normalise, feed forward, add.

    The attention and the feed-forward come from outside: with LayerNorm and GELU this is GPT-2's
    layer, with RMSNorm, rotary positions and a gate it is Llama's.
    """

    def __init__(
        self,
        attention: SelfAttention,
        feedforward: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.feedforward_norm = make_norm()
        self.feedforward = feedforward
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, hidden: Tensor, *, mask: Tensor | None = None, rotary: Rotary | None = None
    ) -> Tensor:
        """Return the next hidden rows; positions are turned by `rotary` if it is given."""
        attended = self.attention(self.attention_norm(hidden), mask=mask, rotary=rotary)
        hidden = hidden + self.dropout(attended)
        output: Tensor = hidden + self.dropout(self.feedforward(self.feedforward_norm(hidden)))
        return output


class CrossLayer(nn.Module):
    """A causal pre-norm layer that also reads the output of an encoder."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        width, heads, dropout = sizes.width, sizes.heads, sizes.dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, dropout=dropout, is_causal=True)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = CrossAttention(width, heads, dropout=dropout)
        self.feedforward_norm = nn.LayerNorm(width)
        self.feedforward = FeedForward(width, sizes.inner)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the next hidden rows; `mask` is true where `memory` may be read."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        crossed = self.cross_attention(self.cross_norm(hidden), memory, mask=mask)
        hidden = hidden + self.dropout(crossed)
        output: Tensor = hidden + self.dropout(self.feedforward(self.feedforward_norm(hidden)))
        return output


def plain_layer(sizes: TransformerSizes, *, is_causal: bool) -> PreNormLayer:
    """Return a pre-norm layer with LayerNorm and GELU."""
    width, dropout = sizes.width, sizes.dropout
    return PreNormLayer(
        SelfAttention(width, sizes.heads, dropout=dropout, is_causal=is_causal),
        FeedForward(width, sizes.inner),
        lambda: nn.LayerNorm(width),
        dropout,
    )
