"""What cannot be used is refused in one sentence, by the right type, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanstep
from leanstep.errors import InputError

BATCH = torch.ones(4, 8)


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def frozen() -> nn.Module:
    return nn.Linear(8, 8).requires_grad_(False)


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))


def other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(8, 8).parameters(), lr=0.1)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "the model is no module": ({"model": lambda x: x}, "model is function, not a torch.nn.Module"),
    "the model is a class": ({"model": nn.Linear}, "model is type, not a torch.nn.Module"),
    "the model is None": ({"model": None}, "model is NoneType"),
    "nothing is trainable": ({"model": frozen()}, "has no trainable parameters"),
    "there are no parameters": ({"model": nn.ReLU()}, "has no trainable parameters"),
    "the model has no data": (
        {"model": nn.Linear(8, 8, device="meta"), "batch": BATCH.to("meta")},
        "the model is on meta: leanstep runs steps on CPU and CUDA devices",
    ),
    "the model is on two devices": ({"model": on_two_devices()}, r"on 2 devices \(cpu, meta\)"),
    "the model has no shape yet": (
        {"model": nn.LazyLinear(8)},
        "weight has no shape yet: call the model once on a batch first",
    ),
    "the batch is elsewhere": (
        {"batch": BATCH.to("meta")},
        r"a tensor on meta but the model is on cpu: move it with .to\('cpu'\)",
    ),
    "a part of the batch is elsewhere": (
        {"batch": {"x": BATCH, "labels": [BATCH.to("meta")]}},
        "a tensor on meta",
    ),
    "the optimizer is another's": (
        {"optimizer": other_optimizer()},
        "holds none of this model's parameters: build it from model.parameters()",
    ),
    "the optimizer is a name": ({"optimizer": "adamw"}, "optimizer is str, not a torch.optim"),
    "the optimizer is a class": ({"optimizer": torch.optim.SGD}, "optimizer is type, not a torch"),
    "the loss is no scalar": (
        {"loss": lambda model, batch: model(batch)},
        r"the loss has shape \(4, 8\), not one number: reduce it",
    ),
    "the output is no scalar": ({"loss": None}, r"the loss has shape \(4, 8\)"),
    "the loss is a number": (
        {"loss": lambda model, batch: squares(model, batch).item()},
        "the loss is float, not a tensor: return a scalar",
    ),
    "the loss is a pair": (
        {"loss": lambda model, batch: (squares(model, batch), None)},
        "the loss is tuple, not a tensor",
    ),
    "the loss is nothing": ({"loss": lambda model, batch: None}, "the loss is NoneType"),
    "the loss is detached": (
        {"loss": lambda model, batch: squares(model, batch).detach()},
        "does not depend on any trainable parameter",
    ),
}


@pytest.mark.parametrize(("changes", "sentence"), CASES.values(), ids=CASES)
def test_it_is_refused_in_one_sentence_where(changes: dict[str, Any], sentence: str) -> None:
    arguments = {"model": nn.Linear(8, 8), "batch": BATCH, "loss": squares, **changes}
    model = arguments["model"]
    before = snapshot(model)

    with pytest.raises(InputError, match=sentence) as caught:
        leanstep.profile(**arguments)

    assert isinstance(caught.value, ValueError)
    assert_is_one_sentence(caught.value)
    assert snapshot(model) == before


WRONG_KINDS: dict[str, tuple[Callable[[], object], str]] = {
    "a path is planned": (lambda: leanstep.plan("run.json"), "profile is str, not a leanstep.Prof"),
    "a model is planned": (lambda: leanstep.plan(nn.Linear(8, 8)), "leanstep.profile makes one"),
    "a model has a frontier": (lambda: leanstep.frontier(nn.Linear(8, 8)), "profile is Linear"),
    "a model is simulated": (lambda: leanstep.simulate(nn.Linear(8, 8)), "profile is Linear"),
    "a path is applied": (
        lambda: leanstep.apply(nn.Linear(8, 8), "plan.json"),
        r"plan is str, not a leanstep.Plan: leanstep.plan makes one, leanstep.Plan.load\(path\)",
    ),
    "a path is verified": (
        lambda: leanstep.verify(nn.Linear(8, 8), BATCH, squares, plan="plan.json"),
        "plan is str, not a leanstep.Plan",
    ),
    "overrides are a list": (
        lambda: leanstep.fit(nn.Linear(8, 8), BATCH, squares, overrides=["layers"]),
        "overrides is list, not a dict",
    ),
    "a model is swept": (
        lambda: leanstep.sweep(nn.Linear(8, 8), [1, 2], budget="1GiB"),
        "a study takes a function of a batch size, not Linear",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), WRONG_KINDS.values(), ids=WRONG_KINDS)
def test_what_is_of_another_kind_is_refused_where(
    call: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        call()

    assert_is_one_sentence(caught.value)


def test_a_loss_of_outputs_and_targets_is_told_what_it_was_called_with() -> None:
    with pytest.raises(AttributeError) as caught:
        leanstep.profile(nn.Linear(8, 8), BATCH, nn.MSELoss())

    said = ["leanstep called loss(model, batch), where batch is Tensor of shape (4, 8)"]
    assert caught.value.__notes__ == said


@pytest.mark.parametrize(
    ("batch", "called"),
    [
        (torch.ones(4, 7), "model(batch), where batch is Tensor of shape (4, 7)"),
        ((BATCH, BATCH), "model(*batch), where batch is tuple"),
        ({"y": BATCH}, "model(**batch), where batch is dict"),
    ],
)
def test_a_batch_that_the_model_does_not_take_is_told_how_it_was_called(
    batch: Any, called: str
) -> None:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        leanstep.profile(nn.Linear(8, 8), batch)

    assert caught.value.__notes__ == [f"leanstep called {called}"]


class Pair(nn.Module):
    """Returns what has no loss in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return {"scores": self.layer(x)}


def test_a_model_whose_output_has_no_loss_needs_a_loss_function() -> None:
    with pytest.raises(InputError, match="returned dict without a loss: pass loss=") as caught:
        leanstep.profile(Pair(), BATCH)

    assert_is_one_sentence(caught.value)


class Raising(nn.Module):
    """Raises what it is told to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(8, 8), error

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        raise self.error


class UsersOwnError(Exception):
    """Not one of leanstep's."""


@pytest.mark.parametrize(
    "error", [UsersOwnError("mine"), ValueError("bad"), KeyError("x"), KeyboardInterrupt()]
)
def test_an_error_of_the_model_comes_out_as_it_is(error: BaseException) -> None:
    model = Raising(error)
    before = snapshot(model)

    with pytest.raises(type(error)) as caught:
        leanstep.profile(model, BATCH, squares)

    assert caught.value is error
    assert snapshot(model) == before


def test_a_batch_that_does_not_fit_the_model_is_torchs_own_error() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        leanstep.profile(nn.Linear(8, 8), torch.ones(4, 3), squares)


@pytest.mark.parametrize(
    ("batch", "error"), [({"y": BATCH}, TypeError), ((BATCH, BATCH), TypeError)]
)
def test_a_batch_of_other_arguments_is_pythons_own_error(
    batch: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="forward"):
        leanstep.profile(nn.Linear(8, 8), batch)


def test_a_scalar_on_the_cpu_is_welcome_anywhere() -> None:
    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squares(model, batch[0]) * batch[1]

    assert leanstep.profile(nn.Linear(8, 8), (BATCH, torch.tensor(2.0)), scaled).peak_bytes > 0


@pytest.mark.parametrize("make", [lambda loss: loss.reshape(1), lambda loss: loss.reshape(1, 1)])
def test_a_loss_of_one_element_is_a_scalar(make: Callable[[Tensor], Tensor]) -> None:
    profile = leanstep.profile(nn.Linear(8, 8), BATCH, lambda m, b: make(squares(m, b)))

    assert profile.peak_bytes > 0


def snapshot(model: Any) -> Any:
    """The bytes of a model, the mode of its modules and their hooks."""
    if not isinstance(model, nn.Module):
        return model
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return [
        (
            module.training,
            [len(getattr(module, name)) for name in hooks],
            [(id(p), p.grad, contents(p)) for p in module.parameters(recurse=False)],
        )
        for module in model.modules()
    ]


def contents(parameter: nn.Parameter) -> bytes | None:
    is_there = not parameter.is_meta and not nn.parameter.is_lazy(parameter)
    return parameter.detach().numpy().tobytes() if is_there else None


def assert_is_one_sentence(error: Exception) -> None:
    text = str(error)
    assert "\n" not in text and 10 < len(text) < 200
    assert "Traceback" not in text and not text.endswith(".")
