"""Weights that are computed from others: by hooks, parametrizations, or in the block."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


def old_spectral(layer):
    return nn.utils.spectral_norm(layer)


def old_weight(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * weight.norm().rsqrt()


def own(layer):
    parametrize.register_parametrization(layer, "weight", Scaled())
    parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


WAYS = {
    "spectral norm by hooks": old_spectral,
    "weight norm by hooks": old_weight,
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "orthogonal by Cayley": lambda layer: parametrizations.orthogonal(layer, "weight", "cayley"),
    "two on one layer": own,
}


def body(self, x):
    return x + self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("way", WAYS)
def test_normed_weights(lab, way):
    def change(block):
        block.a, block.b = WAYS[way](block.a), WAYS[way](block.b)

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


@pytest.mark.parametrize("way", ["spectral norm", "weight norm", "two on one layer"])
def test_weights_computed_once_for_several_calls(lab, way):
    def change(block):
        block.a = WAYS[way](block.a)

    def loss(model, batch):
        with parametrize.cached():
            return model(model(batch)).pow(2).mean()

    # Whole modules cannot be run again outside the cache: torch says so.
    case = lab.Case(lambda: lab.stack_of(body, change=change), loss=loss)
    lab.check_same(case, ways=["replay, all dropped", "replay, some dropped", "plan at the floor"])


def test_pruned_weights(lab):
    from torch.nn.utils import prune

    def change(block):
        prune.random_unstructured(block.a, "weight", amount=0.4)

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


def test_spectral_norm_of_convolutions_with_batch_norm(lab):
    def make():
        layers = [
            nn.Sequential(old_spectral(nn.Conv2d(6, 6, 3, padding=1)), nn.BatchNorm2d(6), nn.ReLU())
            for _ in range(2)
        ]
        return nn.Sequential(*layers)

    lab.check_same(lab.Case(make, batch=torch.randn(4, 6, 8, 8)))
