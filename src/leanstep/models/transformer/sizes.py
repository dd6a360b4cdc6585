"""The numbers that tell one Transformer from another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSizes:
    """Sizes that every Transformer has; `inner` is the width inside a feed-forward."""

    width: int
    depth: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    dropout: float = 0.1


class BertSizes(TransformerSizes):
    """Sizes of a BERT encoder."""


class GPT2Sizes(TransformerSizes):
    """Sizes of a GPT-2 decoder."""


class Seq2SeqSizes(TransformerSizes):
    """Sizes of an encoder-decoder; `depth` counts the layers of each half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSizes(TransformerSizes):
    """Sizes of a Llama decoder; each key and value head serves `heads // key_heads` queries.

    `is_tied`: the scores come from the table of tokens, not from a matrix of their own.
    """

    key_heads: int
    rotary_base: float = 500_000.0
    is_tied: bool = True
