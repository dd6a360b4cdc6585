"""The two feed-forward networks in use: plain with GELU, and gated with SiLU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class FeedForward(nn.Module):
    """Widen, GELU, narrow: the feed-forward of BERT and GPT-2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, inner)
        self.activation = nn.GELU()
        self.narrow = nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the transformed rows of `hidden`."""
        output: Tensor = self.narrow(self.activation(self.widen(hidden)))
        return output


class GatedFeedForward(nn.Module):
    """Widen twice, multiply one by the SiLU of the other, narrow: the feed-forward of Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.widen = nn.Linear(width, inner, bias=False)
        self.narrow = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the transformed rows of `hidden`."""
        output: Tensor = self.narrow(functional.silu(self.gate(hidden)) * self.widen(hidden))
        return output
