"""Transformers: BERT, GPT-2, Llama and an encoder-decoder, from shared parts."""

from leanstep.models.transformer.decoder import GPT2, Llama
from leanstep.models.transformer.encoder import Bert
from leanstep.models.transformer.encoder_decoder import Seq2Seq
from leanstep.models.transformer.sizes import BertSizes, GPT2Sizes, LlamaSizes, Seq2SeqSizes

__all__ = [
    "GPT2",
    "Bert",
    "BertSizes",
    "GPT2Sizes",
    "Llama",
    "LlamaSizes",
    "Seq2Seq",
    "Seq2SeqSizes",
]
