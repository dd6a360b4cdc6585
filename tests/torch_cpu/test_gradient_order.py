"""Gradients get ready in the order of the untouched model: DDP and FSDP2 send them in it."""

import pytest
import torch

import leanstep
from leanstep import models

SIZES = {
    "gpt2-tiny": {"batch": 4},
    "bert-tiny": {"batch": 8},
    "resnet-tiny": {"batch": 16, "image": 64, "optimizer": "sgd"},
    "llama-tiny": {"batch": 4},
    "unet-tiny": {"batch": 8},
}
STEPS = 6


def orders(model, batch, loss, optimizer) -> list[list[str]]:
    """The names of the parameters whose gradients are ready, of each step."""
    steps: list[list[str]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: steps[-1].append(name))
    for _ in range(STEPS):
        steps.append([])
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps


def by_fit(engine: str):
    def change(model, batch, loss, optimizer) -> None:
        budget = {"overrides": {"*": "recompute"}, "budget": "100%"}
        leanstep.fit(model, batch, loss, optimizer=optimizer, engine=engine, **budget)

    return change


def by_lean(model, batch, loss, optimizer) -> None:
    leanstep.lean(model, optimizer, budget="90%")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "change", [by_fit("replay"), by_fit("module"), by_lean], ids=["replay", "module", "lean"]
)
def test_gradients_get_ready_in_the_order_of_the_untouched_model(name: str, change) -> None:
    expected = orders(*models.build(name, **SIZES[name]))
    made = models.build(name, **SIZES[name])
    change(*made)

    assert orders(*made) == expected


def by_segments(model, batch, loss, optimizer) -> None:
    leanstep.segments(model, 3)


def by_marks(model, batch, loss, optimizer) -> None:
    for module in model[1:3]:
        leanstep.recompute(module)
    by_lean(model, batch, loss, optimizer)


@pytest.mark.parametrize("change", [by_segments, by_marks], ids=["segments", "marks"])
def test_gradients_of_a_sequential_get_ready_in_that_order(change) -> None:
    def make():
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 32))
            for _ in range(6)
        ]
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, torch.randn(64, 32), lambda m, b: m(b).square().mean(), optimizer

    expected = orders(*make())
    made = make()
    change(*made)

    assert orders(*made) == expected
