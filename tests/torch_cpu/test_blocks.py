"""The blocks are what a person would name, and each holds what autograd saved in its call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanstep
from leanstep import models
from leanstep.ir import Profile
from leanstep.models.build import Built

WIDTH = 16

BLOCKS = {
    "resnet-tiny": [f"layer{stage}.{place}" for stage in (1, 2, 3, 4) for place in (0, 1)],
    "bert-tiny": [f"layers.{place}" for place in range(4)],
    "gpt2-tiny": [f"layers.{place}" for place in range(4)],
    "llama-tiny": [f"layers.{place}" for place in range(4)],
    "seq2seq-tiny": [
        *(f"encoder.layers.{place}" for place in range(3)),
        *(f"decoder.layers.{place}" for place in range(3)),
    ],
    "unet-tiny": [
        *("time.layers[0…1]", "time.layers.2", "down.0", "down.1"),
        *("middle.0", "middle.1", "up.0", "up.1"),
    ],
}


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def profile_of(model: nn.Module, *shape: int) -> Profile:
    return leanstep.profile(model, torch.randn(*(shape or (4, WIDTH))), squares)


def names(profile: Profile) -> list[str]:
    return [block.name for block in profile.blocks]


class Cell(nn.Module):
    """Two layers: more than one of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class Pair(nn.Module):
    """Two cells."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Cell(), Cell()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Tower(nn.Module):
    """A list of layers and one more."""

    def __init__(self, layer: type[nn.Module], last: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layer() for _ in range(3)), last()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Heavy(nn.Module):
    """A layer that saves more than a few cells do."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x


def test_two_stacks_of_one_class_are_looked_through() -> None:
    profile = profile_of(nn.Sequential(Tower(Pair), Tower(Pair)))

    assert names(profile) == [f"{tower}.layers.{place}" for tower in (0, 1) for place in range(3)]


@pytest.mark.parametrize("tower", [(Pair, Heavy), (Cell,)], ids=["much beside", "simple layers"])
def test_a_list_of_layers_is_one_block(tower: tuple[type[nn.Module], ...]) -> None:
    profile = profile_of(nn.Sequential(Tower(*tower), Tower(*tower)))

    assert names(profile) == ["0", "1"]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_a_model_are_what_a_person_would_name(name: str) -> None:
    built = models.build(name)

    profile = leanstep.profile(built.model, built.batch, built.loss)

    assert names(profile) == BLOCKS[name]


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_do_not_overlap_and_come_in_order(name: str) -> None:
    built = models.build(name)

    blocks = leanstep.profile(built.model, built.batch, built.loss).blocks

    borders = [border for block in blocks for border in (block.start, block.stop)]
    assert borders == sorted(borders)
    saves = [save for block in blocks for save in block.saves]
    assert len(saves) == len(set(saves))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_holds_what_autograd_saves_during_its_call(name: str) -> None:
    built = models.build(name)
    profile = leanstep.profile(built.model, built.batch, built.loss)

    saved = count_saves(built)

    for block in profile.blocks:
        paths = [f"{block.path}.{child}" for child in block.children] or [block.path]
        assert len(block.saves) == sum(len(saved[path]) for path in paths), block.name
        sizes = [
            profile.graph.storages[profile.graph.saves[s].value.storage].nbytes for s in block.saves
        ]
        assert sizes == [nbytes for path in paths for nbytes in saved[path]], block.name


def count_saves(built: Built) -> dict[str, list[int]]:
    """The bytes of each tensor that autograd saves while a module runs, in order."""
    saved: dict[str, list[int]] = {path: [] for path, _ in built.model.named_modules()}
    running: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        for path in running:
            saved[path].append(tensor.untyped_storage().nbytes())
        return tensor

    for path, module in built.model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: running.append(path))
        module.register_forward_hook(lambda *_: running.__delitem__(-1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        built.loss(built.model, built.batch)
    return saved


def test_a_flat_stack_of_layers_is_cut_before_each_weight() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(4 * 4 * 4, 5)),
    )

    profile = profile_of(model, 2, 3, 8, 8)

    assert names(profile) == ["[0…2]", "[3…7]", "8"]
    assert profile.blocks[0].children == ("0", "1", "2")


def test_a_flat_module_is_one_block() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    assert names(profile_of(Flat())) == ["the whole model"]


def test_a_module_that_is_called_three_times_is_three_calls() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = Cell(), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.cell(x)
            return self.head(x)

    profile = profile_of(Recurrent())

    assert names(profile) == ["cell", "cell (call 1)", "cell (call 2)"]
    assert [block.occurrence for block in profile.blocks] == [0, 1, 2]
    # The batch needs no gradient, so the first call saves one weight less.
    assert [len(block.saves) for block in profile.blocks] == [5, 6, 6]


def test_a_call_without_gradients_is_no_block_and_is_not_counted() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([Cell(), Cell()])

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                hint = self.cells[1](self.cells[0](x))
            return self.cells[1](self.cells[0](x + hint))

    profile = profile_of(Conditioned())

    assert names(profile) == ["cells.0", "cells.1"]
    assert all(block.saves for block in profile.blocks)


def test_a_sequential_with_a_forward_of_its_own_is_not_taken_apart() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    def residual() -> Residual:
        return Residual(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    assert names(profile_of(residual())) == ["the whole model"]
    stack = nn.Sequential(residual(), residual())
    assert names(profile_of(stack)) == ["0", "1"]


def test_a_layer_that_stands_twice_in_a_sequential_keeps_it_whole() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), relu, nn.Linear(WIDTH, WIDTH), relu)

    assert names(profile_of(model)) == ["the whole model"]


def test_a_layer_that_stands_in_two_sequentials_belongs_to_both() -> None:
    relu = nn.ReLU()

    def stage() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), relu, nn.Linear(WIDTH, WIDTH))

    profile = profile_of(nn.Sequential(stage(), stage()))

    assert names(profile) == ["0[0…1]", "0.2", "1[0…1]", "1.2"]
