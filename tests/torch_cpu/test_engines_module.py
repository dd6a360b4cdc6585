"""Whole modules that run again: once for the numbers, without a second side effect."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parametrizations


def body(s, x):
    return x + s.b(F.gelu(s.a(x)))


def spectral(block):
    block.a = parametrizations.spectral_norm(block.a)


def weight_norm(block):
    block.a = parametrizations.weight_norm(block.a)


@pytest.mark.parametrize("change", [spectral, weight_norm], ids=lambda change: change.__name__)
def test_computed_weights_are_the_same_in_the_second_run(lab, change) -> None:
    case = lab.Case(lambda: lab.stack_of(body, change=change))

    assert case.differences(lab.MODULE, steps=4) == []
    assert case.differences(steps=6) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooks_that_compute_a_weight_run_again(lab) -> None:
    def change(block):
        block.a = torch.nn.utils.weight_norm(block.a)

    case = lab.Case(lambda: lab.stack_of(body, change=change))

    assert case.differences(lab.MODULE, steps=4) == []
    assert case.differences(steps=6) == []


def test_buffers_attributes_and_lists_move_once(lab) -> None:
    def change(block):
        block.losses, block.calls = [], 0
        block.register_buffer("mean", torch.zeros(48))
        block.register_buffer("replaced", torch.zeros(48))

    def moving(s, x):
        s.calls += 1
        h = s.a(x) * (1 + 0.1 * s.calls)
        out = s.b(F.gelu(h - s.mean.clone() - s.replaced))
        with torch.no_grad():
            s.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        s.replaced = s.replaced * 0.9 + h.detach().mean(0)
        s.losses.append(h.pow(2).mean())
        return out

    def loss(model, batch):
        for block in model.blocks:
            block.losses.clear()
        value = model(batch).pow(2).mean()
        return value + sum(sum(block.losses) for block in model.blocks)

    def step(model, batch):
        value = loss(model, batch)
        value.backward()
        return [value, *((len(block.losses), block.calls) for block in model.blocks)]

    case = lab.Case(lambda: lab.stack_of(moving, change=change), loss=loss, step=step)

    assert case.differences(lab.MODULE, steps=5) == []
    assert case.differences(steps=5) == []


def test_peak_of_whole_modules_is_predicted(lab) -> None:
    case = lab.Case(lambda: lab.stack_of(body), batch=torch.randn(1024, 48))

    predicted, measured = case.peaks(lab.MODULE)

    assert measured <= predicted <= 1.01 * measured
