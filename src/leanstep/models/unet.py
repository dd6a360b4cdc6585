"""A U-Net that predicts the noise in an image, as diffusion models train it.

Levels shrink the image and widen the channels, then the way back up joins each level's input with
what the way down left at the same resolution (`torch.cat`). For memory it is the opposite of a
chain: what the first level makes is needed again by the last, so it is alive across the whole
forward pass, whatever is dropped in between.

The time step enters every residual block as a shift of its channels. There is no attention.

Papers: Ronneberger et al., U-Net, 2015; Ho et al., Denoising Diffusion Probabilistic Models, 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetSizes:
    """The numbers that tell one U-Net from another; `widths` has one entry per resolution."""

    widths: tuple[int, ...]
    num_blocks: int = 2
    groups: int = 8
    dropout: float = 0.0
    num_channels: int = 3

    @property
    def time_width(self) -> int:
        """The width of the time step's embedding."""
        return self.widths[0] * 4

    @property
    def image_multiple(self) -> int:
        """What the image's side must be a multiple of, so that every level halves evenly."""
        return 1 << (len(self.widths) - 1)


class UNet(nn.Module):
    """Predict noise: `model(noisy, times)` has the shape of `noisy`."""

    def __init__(self, sizes: UNetSizes) -> None:
        super().__init__()
        widths = sizes.widths
        self.stem = nn.Conv2d(sizes.num_channels, widths[0], 3, padding=1)
        self.time = TimeEmbedding(widths[0], sizes.time_width)
        self.down = nn.ModuleList(DownLevel(sizes, *pair) for pair in pairwise(widths))
        self.middle = stack_blocks(sizes, widths[-1], widths[-1])
        self.up = nn.ModuleList(UpLevel(sizes, *pair) for pair in pairwise(widths[::-1]))
        self.norm = nn.GroupNorm(sizes.groups, widths[0])
        self.head = nn.Conv2d(widths[0], sizes.num_channels, 3, padding=1)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the noise found in `noisy`, given how many steps of noise were added."""
        time = self.time(times)
        hidden = self.stem(noisy)
        skips: list[Tensor] = []
        for level in self.down:
            skip, hidden = level(hidden, time)
            skips.append(skip)
        for block in self.middle:
            hidden = block(hidden, time)
        for level in self.up:
            hidden = level(hidden, skips.pop(), time)
        noise: Tensor = self.head(functional.silu(self.norm(hidden)))
        return noise


class DownLevel(nn.Module):
    """Residual blocks at one resolution, then a convolution that halves it."""

    def __init__(self, sizes: UNetSizes, width: int, next_width: int) -> None:
        super().__init__()
        self.blocks = stack_blocks(sizes, width, width)
        self.shrink = nn.Conv2d(width, next_width, 3, stride=2, padding=1)

    def forward(self, hidden: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output at this resolution, for the way up, and the input of the next."""
        for block in self.blocks:
            hidden = block(hidden, time)
        return hidden, self.shrink(hidden)


class UpLevel(nn.Module):
    """Double the resolution, join what the way down left there, then residual blocks."""

    def __init__(self, sizes: UNetSizes, in_width: int, width: int) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(in_width, width, 2, stride=2)
        self.blocks = stack_blocks(sizes, 2 * width, width)

    def forward(self, hidden: Tensor, skip: Tensor, time: Tensor) -> Tensor:
        """Return the output at the resolution of `skip`."""
        hidden = torch.cat([self.grow(hidden), skip], dim=1)
        for block in self.blocks:
            hidden = block(hidden, time)
        return hidden


class ResidualBlock(nn.Module):
    """Two normalised 3x3 convolutions around a shortcut, shifted by the time step."""

    def __init__(self, sizes: UNetSizes, in_width: int, width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(sizes.groups, in_width)
        self.conv1 = nn.Conv2d(in_width, width, 3, padding=1)
        self.shift = nn.Linear(sizes.time_width, width)
        self.norm2 = nn.GroupNorm(sizes.groups, width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Identity() if in_width == width else nn.Conv2d(in_width, width, 1)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        """Return the block's output for `hidden` at the embedded `time`."""
        branch = self.conv1(functional.silu(self.norm1(hidden)))
        branch = branch + self.shift(time)[:, :, None, None]
        branch = self.conv2(self.dropout(functional.silu(self.norm2(branch))))
        output: Tensor = branch + self.shortcut(hidden)
        return output


class TimeEmbedding(nn.Module):
    """Embed a time step as sines and cosines of falling frequency, then two linear layers."""

    frequencies: Tensor

    def __init__(self, num_features: int, width: int) -> None:
        super().__init__()
        half = num_features // 2
        frequencies = torch.exp(torch.arange(half) * (-math.log(10_000.0) / half))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.layers = nn.Sequential(nn.Linear(2 * half, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """Return one activated row of features per time step."""
        angles = times[:, None] * self.frequencies
        features = self.layers(torch.cat([angles.sin(), angles.cos()], dim=1))
        return functional.silu(features)


def stack_blocks(sizes: UNetSizes, in_width: int, width: int) -> nn.ModuleList:
    """Return the residual blocks of one level; the first may change the width."""
    in_widths = [in_width, *[width] * (sizes.num_blocks - 1)]
    return nn.ModuleList(ResidualBlock(sizes, each, width) for each in in_widths)
