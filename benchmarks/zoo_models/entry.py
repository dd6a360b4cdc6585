"""What an entry of the zoo is, and the sizes that entries share.

An entry names a model class of `transformers` and what its configuration is built from; nothing is
downloaded, weights are random. Layers are few and narrow, batches large enough that activations
outweigh the parameters, as in training at full size. Dropout stays on. Configurations keep their
defaults otherwise: caches, fused attention and tied weights are as a user would have them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from leanstep import models
from zoo_models.diffusion import DIFFUSION

Batch = dict[str, Any] | tuple[torch.Tensor, ...] | torch.Tensor


class MissingError(Exception):
    """The installed transformers has no such architecture."""


@dataclass(frozen=True)
class Entry:
    """One architecture; `output` names what is trained where the model returns no loss."""

    name: str
    family: str
    model: str
    batch: Callable[[], Batch]
    config: dict[str, Any] = field(default_factory=dict)
    output: str = "loss"

    def build(self) -> tuple[torch.nn.Module, Batch, Callable[..., torch.Tensor]]:
        """Return the model in training mode, a batch and the loss; draws from torch's generator."""
        if self.family == "leanstep":
            built = models.build(self.model, **self.config)
            return built.model, built.batch, built.loss
        if self.model in DIFFUSION:
            return DIFFUSION[self.model](**self.config).train(), self.batch(), self.loss
        import transformers

        kind = getattr(transformers, self.model, None)
        if kind is None:
            raise MissingError(f"not in this transformers ({transformers.__version__})")
        config = kind.config_class(**self.config)
        return kind(config).train(), self.batch(), self.loss

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the model's own loss, or the mean square of one of its outputs."""
        output = model(**batch)
        if isinstance(output, torch.Tensor):
            return output.square().mean()
        found = output[self.output]
        return found if found.dim() == 0 else found.square().mean()


# In an entry of its own: a shared field that this configuration does not take.
OMIT = object()

# What most Transformers call their sizes; a configuration that has no such field ignores it.
BODY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 160,
}
WORDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = BODY | WORDS
# Newer decoders have no dropout but this one.
DECODER = TEXT | {"num_key_value_heads": 2, "attention_dropout": 0.1}
EXPERTS = DECODER | {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4}
PAIR = WORDS | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 192,
    "decoder_ffn_dim": 192,
    "max_position_embeddings": 160,
    "decoder_start_token_id": 1,
    # A step that skips layers at random has no one peak to plan for.
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5 = WORDS | {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 192,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
IMAGE = BODY | {
    "image_size": 48,
    "patch_size": 6,
    "num_channels": 3,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
SPEECH = BODY | {
    "vocab_size": 32,
    "conv_dim": (32, 32, 32),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "classifier_proj_size": 32,
    # By default the masked spans may be longer than so short a recording.
    "mask_time_length": 4,
    "mask_feature_length": 4,
}
VISION_TOWER = BODY | {"image_size": 48, "patch_size": 8, "attention_dropout": 0.1}


def entries(
    family: str, batch: Callable[[], Batch], shared: dict[str, Any], *rows: tuple[Any, ...]
) -> list[Entry]:
    """Entries that differ in a few fields from what they share: (name, class, fields...)."""
    made = []
    for name, model, *rest in rows:
        own = next((part for part in rest if isinstance(part, dict)), {})
        own_batch = next((part for part in rest if callable(part)), batch)
        output = next((part for part in rest if isinstance(part, str)), "loss")
        config = {key: value for key, value in {**shared, **own}.items() if value is not OMIT}
        made.append(Entry(name, family, model, own_batch, config, output))
    return made
