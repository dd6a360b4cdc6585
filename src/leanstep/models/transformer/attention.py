"""Multi-head attention through `scaled_dot_product_attention`.

Self-attention projects queries, keys and values with one matrix and takes views of the result, as
GPT-2 does: the three share one storage, and it lives as long as the longest-lived of them.
Cross-attention projects queries from the decoder, and keys and values from the encoder's output.

Dropout of the attention weights happens inside the kernel. So it draws random numbers there, and
only while training.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from leanstep.models.transformer.rotary import Rotary, rotate


class SelfAttention(nn.Module):
    """Let every position read the others, or with `is_causal` only those before it."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.group = heads // (key_heads or heads)
        self.dropout = dropout
        self.is_causal = is_causal
        key_width = (key_heads or heads) * self.head_width
        self.widths = [width, key_width, key_width]
        self.project = nn.Linear(width, sum(self.widths), bias=bias)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(
        self, hidden: Tensor, *, mask: Tensor | None = None, rotary: Rotary | None = None
    ) -> Tensor:
        """Return the attended rows; `mask` is true where a position may be read."""
        parts = self.project(hidden).split(self.widths, dim=-1)
        query, key, value = (split_heads(part, self.head_width) for part in parts)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        attended = functional.scaled_dot_product_attention(
            query,
            repeat_heads(key, self.group),
            repeat_heads(value, self.group),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
        )
        output: Tensor = self.output(merge_heads(attended))
        return output


class CrossAttention(nn.Module):
    """Let every position of one sequence read all positions of another."""

    def __init__(self, width: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return what the rows of `hidden` read in `memory`, where `mask` is true."""
        parts = (self.query(hidden), *self.key_value(memory).chunk(2, dim=-1))
        query, key, value = (split_heads(part, self.head_width) for part in parts)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout
        )
        output: Tensor = self.output(merge_heads(attended))
        return output


def split_heads(hidden: Tensor, head_width: int) -> Tensor:
    """Return a view of (batch, sequence, width) as (batch, head, sequence, head width)."""
    heads: Tensor = hidden.unflatten(-1, (-1, head_width))
    return heads.transpose(1, 2)


def merge_heads(attended: Tensor) -> Tensor:
    """Return (batch, head, sequence, head width) as (batch, sequence, width)."""
    return attended.transpose(1, 2).flatten(2)


def repeat_heads(hidden: Tensor, group: int) -> Tensor:
    """Return every head `group` times in a row."""
    # Not enable_gqa=True: in float32 on CUDA no fused kernel takes it (torch 2.11), and the
    # fallback stores the attention matrix: 2176 MiB where this needs 97, at Llama's 2048 tokens.
    return hidden if group == 1 else hidden.repeat_interleave(group, dim=1)
