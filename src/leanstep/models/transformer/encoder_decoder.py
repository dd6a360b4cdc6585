"""A sequence-to-sequence Transformer: an encoder, and a decoder that reads its output.

Sized like T5, with one token embedding for source, target and head; pre-norm and learned positions
as in most other encoder-decoders. Every decoder layer reads the same encoder output, so that
tensor lives through the whole decoder and its gradient is a sum over all its layers.

Papers: Vaswani et al., Attention Is All You Need, 2017; Raffel et al., T5, 2020.
"""

from __future__ import annotations

from torch import Tensor, nn

from leanstep.models.transformer.ends import Embeddings, broadcast_mask, logits_or_loss, tied_head
from leanstep.models.transformer.layers import CrossLayer, plain_layer
from leanstep.models.transformer.sizes import Seq2SeqSizes


class Seq2Seq(nn.Module):
    """Score the next target token; with `labels`, return the mean cross entropy."""

    def __init__(self, sizes: Seq2SeqSizes) -> None:
        super().__init__()
        self.embeddings = Embeddings(sizes)
        self.encoder = EncoderStack(sizes)
        self.decoder = DecoderStack(sizes)
        self.head = tied_head(self.embeddings.tokens)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return logits, or the loss where `labels` are given; `mask` is true for real sources."""
        mask = broadcast_mask(mask)
        memory = self.encoder(self.embeddings(source), mask)
        hidden = self.decoder(self.embeddings(target), memory, mask)
        return logits_or_loss(self.head(hidden), labels)


class EncoderStack(nn.Module):
    """Bidirectional pre-norm layers and a last norm."""

    def __init__(self, sizes: Seq2SeqSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(plain_layer(sizes, is_causal=False) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the memory that the decoder reads."""
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        memory: Tensor = self.norm(hidden)
        return memory


class DecoderStack(nn.Module):
    """Causal pre-norm layers with cross-attention and a last norm."""

    def __init__(self, sizes: Seq2SeqSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden rows that the head scores."""
        for layer in self.layers:
            hidden = layer(hidden, memory, mask)
        output: Tensor = self.norm(hidden)
        return output
