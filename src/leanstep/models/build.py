"""One call from a name to everything a training step needs.

model, batch, loss, optimizer = leanstep.models.build("bert-base", batch=8)
loss(model, batch).backward()
optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from leanstep.errors import InputError, unknown_name
from leanstep.models.catalog import CATALOG, Entry, ImageSizes, TextSizes
from leanstep.models.resnet import ResNetSizes
from leanstep.models.tasks import Batch, Loss, UnderAutocast, make_task
from leanstep.models.transformer import LlamaSizes
from leanstep.models.unet import UNetSizes

OPTIMIZERS = ("adamw", "sgd")
AUTOCASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Built(NamedTuple):
    """What one training step needs; unpacks as model, batch, loss, optimizer."""

    model: nn.Module
    batch: Batch
    loss: Loss
    optimizer: torch.optim.Optimizer


def build(
    name: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    image: int | None = None,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dropout: float | None = None,
    optimizer: str = "adamw",
    fused: bool = False,
    autocast: str | None = None,
) -> Built:
    """Return the named model in training mode with a random batch, its loss and an optimizer.

    Weights and data depend on `seed` alone: they are drawn on the host, whatever the device, and
    the caller's random state is left as it was. On `device="meta"` nothing is allocated.

    Args:
        name: one of `leanstep.models.names()`.
        batch: rows in the batch.
        seq: tokens in a row, for language models.
        image: side of the images in pixels, for image models.
        seed: what weights and data are drawn from.
        device: where model and batch live.
        dropout: share dropped; by default 0.1 in Transformers and none in U-Nets.
        optimizer: "adamw" (weight decay 0.01) or "sgd" (momentum 0.9, weight decay 1e-4).
        fused: let the optimizer update in one kernel, without temporaries.
        autocast: compute the loss in mixed precision: "bf16" or "fp16".

    Raises:
        InputError: a name is not known, or an option does not fit the model.
    """
    entry = find_entry(name)
    check_known(optimizer, OPTIMIZERS, "optimizer")
    rows = entry.rows if batch is None else batch
    extent = find_extent(name, entry, seq=seq, image=image)
    check_positive(rows, "batch")
    sizes = with_dropout(name, entry.sizes, dropout)
    sizes = check_extent(name, sizes, extent)
    target = torch.device(device)
    with drawn_from(seed, target):
        model, data, loss = make_task(sizes, rows, extent, target)
    if autocast is not None:
        check_known(autocast, tuple(AUTOCASTS), "autocast type")
        loss = UnderAutocast(loss, target.type, AUTOCASTS[autocast])
    return Built(model, data, loss, make_optimizer(optimizer, model, fused=fused))


def names() -> tuple[str, ...]:
    """Return the names that `build` knows."""
    return tuple(CATALOG)


def find_entry(name: str) -> Entry:
    """Return the catalog's entry for `name`."""
    check_known(name, names(), "model")
    return CATALOG[name]


def check_known(name: str, known: tuple[str, ...], kind: str) -> None:
    """Raise unless `name` is among the known ones, with the nearest of them in the message."""
    if name not in known:
        raise unknown_name(kind, name, known)


def check_positive(number: int, option: str) -> None:
    """Raise unless `number` is at least one."""
    if number < 1:
        raise InputError(f"{option}={number} is too small: the least is 1")


def find_extent(name: str, entry: Entry, *, seq: int | None, image: int | None) -> int:
    """Return the image's side or the tokens in a row, whichever the model takes."""
    if isinstance(entry.sizes, ImageSizes):
        wanted, given, other, wrong = "image", image, "seq", seq
    else:
        wanted, given, other, wrong = "seq", seq, "image", image
    if wrong is not None:
        raise InputError(f"{name} takes no {other}={wrong}: pass {wanted}= instead")
    extent = entry.extent if given is None else given
    check_positive(extent, wanted)
    return extent


def check_extent(name: str, sizes: ImageSizes | TextSizes, extent: int) -> ImageSizes | TextSizes:
    """Return sizes that hold `extent`, or raise where the model cannot."""
    match sizes:
        case ResNetSizes():
            return sizes
        case UNetSizes(image_multiple=multiple):
            if extent % multiple:
                raise InputError(
                    f"image={extent} does not fit {name}: use a multiple of {multiple}"
                )
            return sizes
        case LlamaSizes():
            # Rotary tables have no parameters, so they may be of any length.
            return replace(sizes, positions=max(extent, sizes.positions))
        case _:
            if extent > sizes.positions:
                raise InputError(
                    f"seq={extent} does not fit {name}: it has {sizes.positions} learned positions"
                )
            return sizes


def with_dropout(
    name: str, sizes: ImageSizes | TextSizes, dropout: float | None
) -> ImageSizes | TextSizes:
    """Return the sizes with the share dropped that the caller asked for, if any."""
    if dropout is None:
        return sizes
    if not 0.0 <= dropout < 1.0:
        raise InputError(f"dropout={dropout} is not a share: use 0.0 or more, below 1.0")
    if isinstance(sizes, ResNetSizes):
        raise InputError(f"{name} has no dropout: leave dropout={dropout} out")
    return replace(sizes, dropout=dropout)


@contextmanager
def drawn_from(seed: int, target: torch.device) -> Iterator[None]:
    """Draw from `seed` on the host inside, and restore the caller's random state after."""
    source = torch.device("meta" if target.type == "meta" else "cpu")
    with torch.random.fork_rng(devices=[]), source:
        # Not torch.manual_seed: it seeds the generators of all devices, which are not forked.
        torch.default_generator.manual_seed(seed)
        yield


def make_optimizer(name: str, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return the named optimizer over all parameters of `model`."""
    # None, not False: torch then chooses by the device.
    one_kernel = True if fused else None
    if name == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=one_kernel
        )
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=one_kernel)
