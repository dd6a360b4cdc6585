"""Sound, several kinds of input at once, time series, diffusion, and leanstep's own models."""

from __future__ import annotations

from typing import Any

import torch

from zoo_models.batches import (
    IMAGE_TOKEN,
    ROWS,
    audio,
    features,
    image_and_text,
    pixels,
    series,
    text,
    waves,
    words,
)
from zoo_models.entry import BODY, DECODER, OMIT, PAIR, SPEECH, TEXT, VISION_TOWER, Entry, entries

AUDIO = entries(
    "audio",
    audio(),
    SPEECH,
    ("wav2vec2", "Wav2Vec2ForCTC"),
    (
        "wav2vec2-layer-norm",
        "Wav2Vec2ForCTC",
        {"feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    ("hubert", "HubertForCTC"),
    ("wavlm", "WavLMForCTC", {"num_buckets": 32, "max_bucket_distance": 64}),
    ("unispeech-sat", "UniSpeechSatForSequenceClassification", audio(spoken=None)),
    ("sew", "SEWForCTC", {"squeeze_factor": 2}),
    ("sew-d", "SEWDForCTC", {"squeeze_factor": 2, "position_buckets": 32}),
    ("data2vec-audio", "Data2VecAudioForCTC", {"conv_pos_kernel_size": 9}),
    ("wav2vec2-conformer", "Wav2Vec2ConformerForCTC", {"conv_depthwise_kernel_size": 7}),
    (
        "wav2vec2-bert",
        "Wav2Vec2BertForCTC",
        features(64, 16, labels=(8,), classes=30),
        {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 7, "add_adapter": False},
    ),
    (
        "whisper",
        "WhisperForConditionalGeneration",
        features(16, 128, labels=(32,), classes=256),
        {
            **PAIR,
            "num_mel_bins": 16,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "dropout": 0.1,
        },
    ),
    (
        "speech-to-text",
        "Speech2TextForConditionalGeneration",
        features(128, 16, labels=(32,), classes=256),
        {
            **PAIR,
            "input_feat_per_channel": 16,
            "conv_channels": 32,
            "max_source_positions": 128,
            "max_target_positions": 64,
        },
    ),
    (
        "ast",
        "ASTForAudioClassification",
        features(96, 16, key="input_values"),
        {
            "max_length": 96,
            "num_mel_bins": 16,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "hidden_dropout_prob": 0.1,
        },
    ),
    (
        "encodec",
        "EncodecModel",
        waves(),
        "audio_values",
        {
            "num_filters": 8,
            "hidden_size": 32,
            "codebook_size": 32,
            "codebook_dim": 32,
            "upsampling_ratios": [4, 2],
            "num_lstm_layers": 1,
        },
    ),
    (
        "dac",
        "DacModel",
        waves(),
        "audio_values",
        {
            "encoder_hidden_size": 16,
            "decoder_hidden_size": 64,
            "downsampling_ratios": [2, 4],
            "upsampling_ratios": [4, 2],
            "codebook_size": 32,
            "codebook_dim": 8,
            "n_codebooks": 2,
            "hidden_size": 64,
        },
    ),
)

CLIP_TEXT = TEXT | {"attention_dropout": 0.1}
TOWERS = {"text_config": CLIP_TEXT, "vision_config": VISION_TOWER, "projection_dim": 32}
LANGUAGE = DECODER | {"model_type": "llama"}

MULTIMODAL = entries(
    "multimodal",
    image_and_text(return_loss=True),
    TOWERS,
    ("clip", "CLIPModel"),
    ("siglip", "SiglipModel"),
    ("chinese-clip", "ChineseCLIPModel"),
    ("altclip", "AltCLIPModel"),
    (
        "groupvit",
        "GroupViTModel",
        image_and_text(side=48, return_loss=True),
        {
            "vision_config": VISION_TOWER
            | {"depths": [2, 1], "num_group_tokens": [8, 0], "num_output_groups": [8, 4]},
            "projection_intermediate_dim": 64,
        },
    ),
    (
        "clipseg",
        "CLIPSegForImageSegmentation",
        image_and_text(labels=lambda: torch.rand(ROWS, 48, 48)),
        {
            "vision_config": VISION_TOWER | {"num_hidden_layers": 4},
            "extract_layers": [0, 1, 2],
            "reduce_dim": 32,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    ("owlvit", "OwlViTModel", image_and_text(return_loss=True)),
    (
        "blip",
        "BlipForConditionalGeneration",
        image_and_text(labels=lambda: words(length=32)),
        {
            "text_config": TEXT | {"encoder_hidden_size": 64, "projection_dim": 32},
            "image_text_hidden_size": 32,
        },
    ),
    (
        "git",
        "GitForCausalLM",
        image_and_text(labels=lambda: words(length=32)),
        {**TEXT, "text_config": OMIT, "vision_config": VISION_TOWER},
    ),
    (
        "vilt",
        "ViltForImageAndTextRetrieval",
        image_and_text(),
        "logits",
        {**TEXT, "image_size": 48, "patch_size": 8},
    ),
    (
        "visual-bert",
        "VisualBertForPreTraining",
        lambda: {
            **text()(),
            "attention_mask": torch.ones(ROWS, 64),
            "visual_attention_mask": torch.ones(ROWS, 16),
            "visual_embeds": torch.randn(ROWS, 16, 32),
            "labels": words(length=80),
        },
        {**TEXT, "visual_embedding_dim": 32},
    ),
    (
        "lxmert",
        "LxmertModel",
        lambda: {
            "input_ids": words(),
            "visual_feats": torch.randn(ROWS, 16, 32),
            "visual_pos": torch.rand(ROWS, 16, 4),
        },
        "language_output",
        {**TEXT, "visual_feat_dim": 32, "l_layers": 2, "r_layers": 2, "x_layers": 2},
    ),
    (
        "layoutlmv3",
        "LayoutLMv3ForTokenClassification",
        lambda: {
            "input_ids": words(length=48),
            "labels": torch.randint(2, (ROWS, 48)),
            "bbox": torch.randint(0, 900, (ROWS, 48, 4)).sort(dim=-1).values,
            "pixel_values": torch.randn(ROWS, 3, 48, 48),
        },
        {
            **TEXT,
            "input_size": 48,
            "patch_size": 12,
            "coordinate_size": 8,
            "shape_size": 16,
            "type_vocab_size": 1,
        },
    ),
    (
        "llava",
        "LlavaForConditionalGeneration",
        image_and_text(image_tokens=36, length=64, labels=lambda: words(length=64)),
        {
            "text_config": LANGUAGE,
            "vision_config": VISION_TOWER | {"model_type": "clip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
        },
    ),
    (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        image_and_text(
            image_tokens=36,
            length=64,
            labels=lambda: words(length=64),
            token_type_ids=lambda: torch.ones(ROWS, 64, dtype=torch.long),
        ),
        {
            "text_config": DECODER | {"model_type": "gemma", "head_dim": 16},
            "vision_config": VISION_TOWER | {"model_type": "siglip_vision_model"},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "projection_dim": 64,
        },
    ),
    (
        "vision-encoder-decoder",
        "VisionEncoderDecoderModel",
        lambda: {**pixels(48)(), "labels": words(length=48)},
        {
            "encoder": VISION_TOWER | {"model_type": "vit"},
            "decoder": TEXT
            | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "text_config": OMIT,
            "vision_config": OMIT,
            "pad_token_id": 0,
        },
    ),
    (
        "pix2struct",
        "Pix2StructForConditionalGeneration",
        lambda: {
            "flattened_patches": torch.rand(ROWS, 48, 2 + 48) * 8 // 1,
            "labels": words(length=32),
        },
        {
            "text_config": TEXT
            | {
                "d_kv": 16,
                "d_ff": 192,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 0,
            },
            "vision_config": BODY
            | {"d_kv": 16, "d_ff": 192, "patch_embed_hidden_size": 48, "seq_len": 48},
        },
    ),
)

SERIES = entries(
    "time series",
    series(),
    {
        "context_length": 64,
        "prediction_length": 16,
        "num_input_channels": 4,
        "d_model": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_length": 4,
        "patch_stride": 4,
    },
    ("patchtst", "PatchTSTForPrediction", {"ffn_dim": 192, "attention_dropout": 0.1}),
    ("patchtsmixer", "PatchTSMixerForPrediction", {"num_layers": 3, "dropout": 0.1}),
    (
        "decision-transformer",
        "DecisionTransformerModel",
        lambda: {
            "states": torch.randn(ROWS, 32, 5),
            "actions": torch.randn(ROWS, 32, 3),
            "rewards": torch.randn(ROWS, 32, 1),
            "returns_to_go": torch.randn(ROWS, 32, 1),
            "timesteps": torch.arange(32).repeat(ROWS, 1),
            "attention_mask": torch.ones(ROWS, 32),
        },
        "action_preds",
        {
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
        },
    ),
)


def noisy(**conditions: Any) -> Any:
    """Latents with a noise level each, and what they are conditioned on."""
    return lambda: {
        "latents": torch.randn(ROWS, 4, 16, 16),
        "times": torch.randint(1000, (ROWS,)),
        **{name: make() for name, make in conditions.items()},
    }


DIFFUSERS = entries(
    "diffusion",
    noisy(),
    {},
    ("text-unet", "TextUNet", noisy(text=lambda: torch.randn(ROWS, 12, 32))),
    ("dit", "DiT", noisy(classes=lambda: torch.randint(10, (ROWS,)))),
)

OWN = [
    Entry(f"leanstep {name}", "leanstep", name, dict, {"dropout": 0.1} | sizes)
    for name, sizes in {
        "bert-tiny": {},
        "gpt2-tiny": {"seq": 64},
        "llama-tiny": {"seq": 64},
        "seq2seq-tiny": {},
        "unet-tiny": {},
        "resnet-tiny": {"dropout": None, "image": 96},
    }.items()
]
