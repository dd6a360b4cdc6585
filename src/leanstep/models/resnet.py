"""ResNet for image classification, in the form most people train (version 1.5).

Version 1.5 strides in the 3x3 convolution of a bottleneck, where the paper strides in the 1x1
before it. The rest is the paper's: batch norm after every convolution, one in-place ReLU module
per block that is called after each of them, a projected shortcut where the shape changes. Those
are the traits that make ResNet hard to replay: in-place writes, running statistics, and a block
input that lives until the end of the block.

Submodules carry torchvision's names, so its checkpoints load.

Paper: He et al., Deep Residual Learning for Image Recognition, 2016.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetSizes:
    """The numbers that tell one ResNet from another."""

    block: type[BasicBlock] | type[Bottleneck]
    depths: tuple[int, int, int, int]
    width: int = 64
    num_classes: int = 1000


class ResNet(nn.Module):
    """Classify images: `model(images)` gives one row of class scores per image."""

    def __init__(self, sizes: ResNetSizes) -> None:
        super().__init__()
        width = sizes.width
        self.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        widths = [width, *(width * 2**stage * sizes.block.expansion for stage in range(4))]
        self.layer1 = stack_blocks(sizes, 0, widths[0])
        self.layer2 = stack_blocks(sizes, 1, widths[1])
        self.layer3 = stack_blocks(sizes, 2, widths[2])
        self.layer4 = stack_blocks(sizes, 3, widths[3])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[4], sizes.num_classes)
        self.apply(initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return the class scores of `images`."""
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        scores: Tensor = self.fc(torch.flatten(self.avgpool(hidden), 1))
        return scores


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: the block of ResNet-18."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = project_shortcut(in_channels, width, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output for `hidden`."""
        branch = self.relu(self.bn1(self.conv1(hidden)))
        branch = self.bn2(self.conv2(branch))
        return add_shortcut(branch, hidden, self.downsample, self.relu)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 around a shortcut: the block of ResNet-50 and -152."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = project_shortcut(in_channels, out_channels, stride)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the block's output for `hidden`."""
        branch = self.relu(self.bn1(self.conv1(hidden)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return add_shortcut(branch, hidden, self.downsample, self.relu)


def stack_blocks(sizes: ResNetSizes, stage: int, in_channels: int) -> nn.Sequential:
    """Return the blocks of one stage; the first changes the shape, the others keep it."""
    width = sizes.width * 2**stage
    first = sizes.block(in_channels, width, stride=1 if stage == 0 else 2)
    out_channels = width * sizes.block.expansion
    others = (sizes.block(out_channels, width, stride=1) for _ in range(sizes.depths[stage] - 1))
    return nn.Sequential(first, *others)


def project_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return what brings a block's input to the shape of its output, if they differ."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


def add_shortcut(
    branch: Tensor, hidden: Tensor, downsample: nn.Sequential | None, relu: nn.ReLU
) -> Tensor:
    """Return the rectified sum of a block's branch and its shortcut; `branch` is overwritten."""
    branch += hidden if downsample is None else downsample(hidden)
    output: Tensor = relu(branch)
    return output


def initialise(module: nn.Module) -> None:
    """Draw the weights of a convolution so that the variance of gradients is kept (He)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
