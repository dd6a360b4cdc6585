"""Rotary position embedding: turn queries and keys by an angle that grows with the position.

The tables of cosines and sines depend on the position alone. The stack of layers holds them once
and hands them to each layer as an argument: a tensor that a block reads although it is neither
its parameter nor made by the block before it.

Paper: Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]


class RotaryTables(nn.Module):
    """Hold the cosines and sines of every position; `tables(length)` gives the first rows."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, positions: int, head_width: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(positions), frequencies).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, length: int) -> Rotary:
        """Return the tables of the first `length` positions."""
        return self.cosine[:length], self.sine[:length]


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Return `heads` (batch, head, sequence, head width) turned by their positions."""
    cosine, sine = rotary
    first, second = heads.chunk(2, dim=-1)
    turned = heads * cosine + torch.cat([-second, first], dim=-1) * sine
    # Under autocast the tables are float32 and would promote; attention wants one dtype for all.
    return turned.type_as(heads)
