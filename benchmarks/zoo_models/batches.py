"""Random batches for the zoo: what matters is how a step runs, not what is learnt.

Each function returns a maker, so that a batch is drawn when its model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Maker = Callable[[], dict[str, Any]]

ROWS = 4
LENGTH = 64
WORDS = 256
# Below this, tokens have a meaning of their own: padding, start, end, mask, image.
FIRST_WORD = 8


def words(rows: int = ROWS, length: int = LENGTH, most: int = WORDS) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(FIRST_WORD, most, (rows, length))


def text(length: int = LENGTH, labels: int | None = None, most: int = WORDS) -> Maker:
    """Tokens with a label each: the token itself, or one of a few classes."""

    def make() -> dict[str, Any]:
        tokens = words(length=length, most=most)
        targets = tokens if labels is None else torch.randint(labels, tokens.shape)
        return {"input_ids": tokens, "labels": targets.clone()}

    return make


def tokens_to_text(length: int = LENGTH) -> Maker:
    """Tokens of a source, and those of a target as labels."""
    return lambda: {
        "input_ids": words(length=length),
        "attention_mask": torch.ones(ROWS, length, dtype=torch.long),
        "labels": words(length=48),
    }


def words_in_boxes() -> Maker:
    """Tokens that stand somewhere on a page."""

    def make() -> dict[str, Any]:
        corners = torch.randint(0, 400, (ROWS, LENGTH, 2))
        return {**text()(), "bbox": torch.cat([corners, corners + 50], dim=-1)}

    return make


def pixels(side: int, rows: int = ROWS) -> Maker:
    """Images alone."""
    return lambda: {"pixel_values": torch.randn(rows, 3, side, side)}


def images(side: int = 48, rows: int = ROWS, key: str = "labels") -> Maker:
    """Images with a class each."""
    return lambda: {**pixels(side, rows)(), key: torch.randint(2, (rows,))}


def dense(labels: int = 0, side: int = 64) -> Maker:
    """Images with a class for every pixel, or a depth."""

    def make() -> dict[str, Any]:
        shape = (ROWS, side, side)
        targets = torch.randint(labels, shape) if labels else torch.rand(shape) + 0.5
        return {**pixels(side)(), "labels": targets}

    return make


def video(frames: int = 4, side: int = 32) -> Maker:
    """Short videos with a class each."""
    return lambda: {
        "pixel_values": torch.randn(ROWS, frames, 3, side, side),
        "labels": torch.randint(2, (ROWS,)),
    }


def audio(samples: int = 4000, spoken: int | None = 8, key: str = "input_values") -> Maker:
    """Recordings with the letters spoken, or a class each."""

    def make() -> dict[str, Any]:
        if spoken is None:
            return {key: torch.randn(ROWS, samples), "labels": torch.randint(2, (ROWS,))}
        return {key: torch.randn(ROWS, samples), "labels": torch.randint(1, 30, (ROWS, spoken))}

    return make


def waves(samples: int = 2048, key: str = "input_values") -> Maker:
    """Recordings of one channel, without labels."""
    return lambda: {key: torch.randn(2, 1, samples)}


def features(
    *shape: int, key: str = "input_features", labels: tuple[int, ...] = (), classes: int = 2
) -> Maker:
    """Spectrograms or other real numbers, with classes where asked."""

    def make() -> dict[str, Any]:
        batch: dict[str, Any] = {key: torch.randn(ROWS, *shape)}
        if classes:
            batch["labels"] = torch.randint(FIRST_WORD * bool(labels), classes, (ROWS, *labels))
        return batch

    return make


def image_and_text(side: int = 48, image_tokens: int = 0, length: int = 32, **extra: Any) -> Maker:
    """Images with a text each; the first tokens stand for the image where there are such tokens."""

    def make() -> dict[str, Any]:
        tokens = words(length=length)
        tokens[:, :image_tokens] = IMAGE_TOKEN
        batch: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "pixel_values": torch.randn(ROWS, 3, side, side),
        }
        made = {name: part() if callable(part) else part for name, part in extra.items()}
        return batch | made

    return make


IMAGE_TOKEN = 5


def series(length: int = 64, channels: int = 4, ahead: int = 16, **keys: str) -> Maker:
    """Several series over time, and how they go on."""
    past = keys.get("past", "past_values")
    future = keys.get("future", "future_values")
    return lambda: {
        past: torch.randn(ROWS, length, channels),
        future: torch.randn(ROWS, ahead, channels),
    }
