"""`leanstep.segments`: checkpoint_sequential in place, exact, with the number found."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import leanstep
from leanstep.errors import BudgetError, InputError
from leanstep.step.training import make_step
from leanstep.truth import peak_rise_bytes, resident_bytes

WIDTH = 64


def plain() -> nn.Sequential:
    pairs = [(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def awkward() -> nn.Sequential:
    """Everything that bites: dropout, batch norm, in-place layers at a cut, a layer used twice."""
    twice = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True)),
        *(twice, nn.Dropout(0.3), nn.ReLU(inplace=True)),
        *(twice, nn.BatchNorm1d(WIDTH), nn.SiLU(inplace=True)),
        *(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3, inplace=True), nn.Linear(WIDTH, WIDTH)),
    )


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trained(model: nn.Module, batch: Tensor, steps: int = 6) -> list[Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        loss = squares(model, batch)
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        seen += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, torch.get_rng_state()]


@pytest.mark.parametrize("make", [plain, awkward])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 12])
def test_segments_train_the_same_numbers(make: object, count: int) -> None:
    torch.manual_seed(0)
    model, batch = make(), torch.randn(32, WIDTH)
    twin = copy.deepcopy(model)

    cut = leanstep.segments(model, count)

    assert cut.count == count
    pairs = zip(trained(twin, batch), trained(model, batch), strict=True)
    assert all(torch.equal(expected, got) for expected, got in pairs)
    cut.remove()
    assert type(model) is nn.Sequential


def peak_of(model: nn.Module, batch: Tensor, loss: object) -> int:
    step = make_step(model, batch, loss, None)
    # Whole segments run again from their third call on.
    step.run()
    step.run()
    return peak_rise_bytes(step.run, step.device) + resident_bytes(step)


def test_four_segments_take_no_more_memory_than_checkpoint_sequential() -> None:
    model, batch = plain(), torch.randn(2048, WIDTH)

    def checkpointed(model: nn.Module, batch: Tensor) -> Tensor:
        return checkpoint_sequential(model, 4, batch, use_reentrant=False).square().mean()

    theirs, untouched = peak_of(model, batch, checkpointed), peak_of(model, batch, squares)
    leanstep.segments(model, 4)

    assert peak_of(model, batch, squares) <= theirs < untouched


def test_auto_finds_the_number_that_fits_and_names_the_floor() -> None:
    torch.manual_seed(0)
    model, batch = plain(), torch.randn(2048, WIDTH)
    twin = copy.deepcopy(model)
    untouched = leanstep.profile(model, batch, squares).peak_bytes

    cut = leanstep.segments(model, "auto", batch=batch, loss=squares, budget="85%")

    assert cut.count > 1
    assert peak_of(model, batch, squares) <= cut.peak_bytes <= 0.85 * untouched
    pairs = zip(trained(twin, batch), trained(model, batch), strict=True)
    assert all(torch.equal(expected, got) for expected, got in pairs)
    cut.remove()
    assert leanstep.segments(model, "auto", batch=batch, loss=squares, budget="100%").count == 1
    with pytest.raises(BudgetError) as caught:
        leanstep.segments(twin, "auto", batch=batch, loss=squares, budget=1000)
    floor = caught.value.floor_bytes
    assert leanstep.segments(twin, "auto", batch=batch, loss=squares, budget=floor).count > 1


def test_sequential_inside_a_model_is_cut_and_larger_batches_are_no_surprise() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": plain(), "head": nn.Linear(WIDTH, 1)})

    leanstep.segments(model["body"], 3)

    for rows in (4, 8, 16):
        model["head"](model["body"](torch.randn(rows, WIDTH))).mean().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2), 2), "segments are for an nn.Sequential"),
        ((plain(), 0), "from 1 to 12"),
        ((plain(), 13), "from 1 to 12"),
        ((plain(), True), "from 1 to 12"),
        ((plain(), "auto"), "needs batch= and budget="),
    ],
)
def test_unusable_arguments_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(InputError, match=message):
        leanstep.segments(*arguments)


def test_what_auto_needs_is_refused_with_a_number_and_so_is_a_second_cut() -> None:
    model = plain()
    with pytest.raises(InputError, match="budget= goes with"):
        leanstep.segments(model, 2, budget="1GiB")
    leanstep.segments(model, 2)
    with pytest.raises(InputError, match="already fitted"):
        leanstep.segments(model, 2)
