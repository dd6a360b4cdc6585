"""Denoising networks in the two usual shapes: a U-Net with attention to a text, and a DiT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def time_features(times: Tensor, width: int) -> Tensor:
    """Sines and cosines of the noise level."""
    rates = torch.exp(torch.arange(width // 2) * (-9.0 / (width // 2)))
    angles = times[:, None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResidualBlock(nn.Module):
    """Two convolutions, shifted by the noise level."""

    def __init__(self, wide_in: int, wide_out: int, time_width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, wide_in), nn.GroupNorm(8, wide_out)
        self.conv1 = nn.Conv2d(wide_in, wide_out, 3, padding=1)
        self.conv2 = nn.Conv2d(wide_out, wide_out, 3, padding=1)
        self.time = nn.Linear(time_width, wide_out)
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Conv2d(wide_in, wide_out, 1) if wide_in != wide_out else nn.Identity()

    def forward(self, hidden: Tensor, level: Tensor) -> Tensor:
        inner = self.conv1(functional.silu(self.norm1(hidden)))
        inner = inner + self.time(functional.silu(level))[:, :, None, None]
        return self.skip(hidden) + self.conv2(self.dropout(functional.silu(self.norm2(inner))))


class CrossBlock(nn.Module):
    """Attention of pixels to each other and to a text, then a gated layer."""

    def __init__(self, width: int, text_width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.text = nn.MultiheadAttention(
            width, heads, dropout=dropout, kdim=text_width, vdim=text_width, batch_first=True
        )
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, text: Tensor) -> Tensor:
        rows, width, high, broad = hidden.shape
        flat = hidden.flatten(2).transpose(1, 2)
        seen = self.norms[0](flat)
        flat = flat + self.own(seen, seen, seen, need_weights=False)[0]
        flat = flat + self.text(self.norms[1](flat), text, text, need_weights=False)[0]
        gate, value = self.wide(self.norms[2](flat)).chunk(2, dim=-1)
        flat = flat + self.narrow(functional.gelu(gate) * value)
        return flat.transpose(1, 2).reshape(rows, width, high, broad)


class TextUNet(nn.Module):
    """A U-Net that denoises latents for a text: down, middle, up with the skipped layers."""

    def __init__(
        self, widths: tuple[int, ...] = (32, 64, 96), text_width: int = 32, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.time_width = 4 * widths[0]
        self.first = nn.Conv2d(4, widths[0], 3, padding=1)
        self.level = nn.Sequential(
            nn.Linear(widths[0], self.time_width),
            nn.SiLU(),
            nn.Linear(self.time_width, self.time_width),
        )
        befores = (widths[0], *widths[:-1])
        make = self.make_pair
        self.down = nn.ModuleList(
            make(a, b, text_width, dropout) for a, b in zip(befores, widths, strict=True)
        )
        self.middle = make(widths[-1], widths[-1], text_width, dropout)
        self.up = nn.ModuleList(
            make(2 * b, a, text_width, dropout)
            for a, b in reversed(list(zip(befores, widths, strict=True)))
        )
        self.last = nn.Conv2d(widths[0], 4, 3, padding=1)

    def make_pair(self, before: int, width: int, text_width: int, dropout: float) -> nn.ModuleList:
        return nn.ModuleList(
            [
                ResidualBlock(before, width, self.time_width, dropout),
                CrossBlock(width, text_width, 4, dropout),
            ]
        )

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        level = self.level(time_features(times, self.first.out_channels))
        hidden, skipped = self.first(latents), []
        for residual, cross in self.down:
            hidden = cross(residual(hidden, level), text)
            skipped.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        residual, cross = self.middle
        hidden = cross(residual(hidden, level), text)
        for residual, cross in self.up:
            hidden = functional.interpolate(hidden, scale_factor=2.0)
            hidden = torch.cat([hidden, skipped.pop()], dim=1)
            hidden = cross(residual(hidden, level), text)
        return self.last(functional.silu(hidden))


class DiTBlock(nn.Module):
    """Attention and a feed-forward layer, scaled, shifted and gated by the noise level."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, hidden: Tensor, level: Tensor) -> Tensor:
        parts = self.modulation(level)[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        seen = self.norm1(hidden) * (1 + scale1) + shift1
        hidden = hidden + gate1 * self.attention(seen, seen, seen, need_weights=False)[0]
        seen = self.norm2(hidden) * (1 + scale2) + shift2
        return hidden + gate2 * self.inner(seen)


class DiT(nn.Module):
    """A Transformer over the patches of noisy latents."""

    def __init__(
        self, width: int = 96, depth: int = 4, heads: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.level = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(10, width)
        self.layers = nn.ModuleList(DiTBlock(width, heads, dropout) for _ in range(depth))
        self.last = nn.Linear(width, 2 * 2 * 4)

    def forward(self, latents: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        hidden = self.patches(latents).flatten(2).transpose(1, 2)
        level = self.level(time_features(times, hidden.shape[-1])) + self.classes(classes)
        for layer in self.layers:
            hidden = layer(hidden, level)
        return self.last(hidden)


DIFFUSION = {"TextUNet": TextUNet, "DiT": DiT}
