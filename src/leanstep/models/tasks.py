"""A model, a batch it is called with, and the loss it is trained on.

The data is random: what matters here is how much memory a step takes and whether its numbers stay
the same, not what is learnt. Two ways to carry the targets are in use outside, so both are here:

- Language models take `labels` in the batch and return the loss themselves (as in Transformers).
- Image models return scores, and the loss compares them with targets it holds.

Tensors are drawn on the current default device and then moved, so that a seed gives the same
weights and data on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional

from leanstep.models.catalog import ImageSizes, TextSizes
from leanstep.models.resnet import ResNet, ResNetSizes
from leanstep.models.transformer import (
    GPT2,
    Bert,
    BertSizes,
    GPT2Sizes,
    Llama,
    LlamaSizes,
    Seq2Seq,
    Seq2SeqSizes,
)
from leanstep.models.transformer.ends import IGNORED_LABEL
from leanstep.models.unet import UNet, UNetSizes

Batch = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

MASKED_SHARE = 0.15
NOISE_STEPS = 1000


class Task(NamedTuple):
    """What is trained, on what, towards what."""

    model: nn.Module
    batch: Batch
    loss: Loss


def make_task(sizes: ImageSizes | TextSizes, rows: int, extent: int, device: torch.device) -> Task:
    """Return the model of these sizes with a batch of `rows` and its loss, all on `device`."""
    match sizes:
        case ResNetSizes():
            return classify(sizes, rows, extent, device)
        case UNetSizes():
            return denoise(sizes, rows, extent, device)
        case BertSizes():
            return fill_masks(sizes, rows, extent, device)
        case GPT2Sizes():
            return continue_text(GPT2(sizes), sizes.vocabulary, (rows, extent), device)
        case LlamaSizes():
            return continue_text(Llama(sizes), sizes.vocabulary, (rows, extent), device)
        case Seq2SeqSizes():
            return translate(sizes, rows, extent, device)
        case _ as unknown:
            assert_never(unknown)


def classify(sizes: ResNetSizes, rows: int, side: int, device: torch.device) -> Task:
    """Return image classification; the batch is a tensor of images."""
    model = ResNet(sizes).to(device)
    images = torch.randn(rows, 3, side, side)
    targets = torch.randint(sizes.num_classes, (rows,))
    loss = AgainstTargets(functional.cross_entropy, targets.to(device))
    return Task(model, images.to(device), loss)


def denoise(sizes: UNetSizes, rows: int, side: int, device: torch.device) -> Task:
    """Return noise prediction; the batch is a tuple of noisy images and their time steps."""
    model = UNet(sizes).to(device)
    images, noise = torch.randn(2, rows, sizes.num_channels, side, side)
    times = torch.randint(NOISE_STEPS, (rows,))
    share = (times / NOISE_STEPS)[:, None, None, None]
    noisy = (1 - share).sqrt() * images + share.sqrt() * noise
    loss = AgainstTargets(functional.mse_loss, noise.to(device))
    return Task(model, (noisy.to(device), times.to(device)), loss)


def fill_masks(sizes: BertSizes, rows: int, length: int, device: torch.device) -> Task:
    """Return masked-token prediction; the batch has tokens, segments and labels."""
    model = Bert(sizes).to(device)
    words = torch.randint(sizes.vocabulary, (rows, length))
    is_masked = torch.rand(rows, length) < MASKED_SHARE
    # At least one per row: the mean over no label at all is not a number.
    is_masked[:, 0] = True
    mask_token = sizes.vocabulary - 1
    batch = {
        "tokens": words.masked_fill(is_masked, mask_token),
        "segments": (torch.arange(length) >= length // 2).long().repeat(rows, 1),
        "labels": words.masked_fill(~is_masked, IGNORED_LABEL),
    }
    return Task(model, move(batch, device), own_loss)


def continue_text(
    model: nn.Module, vocabulary: int, shape: tuple[int, int], device: torch.device
) -> Task:
    """Return next-token prediction; the batch has tokens and labels."""
    tokens, labels = text_with_next(vocabulary, shape)
    return Task(model.to(device), move({"tokens": tokens, "labels": labels}, device), own_loss)


def translate(sizes: Seq2SeqSizes, rows: int, length: int, device: torch.device) -> Task:
    """Return sequence-to-sequence prediction; the batch has source, target and labels."""
    model = Seq2Seq(sizes).to(device)
    source = torch.randint(sizes.vocabulary, (rows, length))
    target, labels = text_with_next(sizes.vocabulary, (rows, length))
    batch = {"source": source, "target": target, "labels": labels}
    return Task(model, move(batch, device), own_loss)


def text_with_next(vocabulary: int, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return random tokens, and for each the token after it."""
    rows, length = shape
    text = torch.randint(vocabulary, (rows, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def move(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return the batch on `device`."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


@dataclass(frozen=True, slots=True, eq=False)
class AgainstTargets:
    """A loss that calls the model on the batch and compares its output with fixed targets.

    A batch that was cut or repeated to another number of rows gets targets cut or repeated alike.
    """

    criterion: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of `model` on `batch`."""
        output = call(model, batch)
        return self.criterion(output, match_rows(self.targets, len(output)))


@dataclass(frozen=True, slots=True, eq=False)
class UnderAutocast:
    """A loss computed in mixed precision."""

    loss: Loss
    device_type: str
    dtype: torch.dtype

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of `model` on `batch`."""
        with torch.autocast(self.device_type, self.dtype):
            return self.loss(model, batch)


def match_rows(targets: Tensor, rows: int) -> Tensor:
    """Return the first `rows` targets, starting over when they run out."""
    if rows == len(targets):
        return targets
    return targets[torch.arange(rows, device=targets.device) % len(targets)]


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model itself computes from the labels in the batch."""
    return call(model, batch)


def call(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's output for a tensor, a tuple of arguments or a dict of keywords."""
    output: Tensor
    match batch:
        case dict():
            output = model(**batch)
        case tuple():
            output = model(*batch)
        case _:
            output = model(batch)
    return output
