"""Settings of torch that hold around forward, and no more when backward runs its ops again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.backends import mkldnn


@contextmanager
def other_default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def without_onednn() -> Iterator[None]:
    mkldnn.enabled = False
    try:
        yield
    finally:
        mkldnn.enabled = True


@contextmanager
def less_precise() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def less_precise_said_otherwise() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@contextmanager
def less_precise_in_general() -> Iterator[None]:
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.fp32_precision = before


@torch.library.custom_op("leanstep_tests::rounded", mutates_args=())
def rounded(x: torch.Tensor) -> torch.Tensor:
    """As a product does on machines that have units for it."""
    is_precise = torch.backends.mkldnn.matmul.fp32_precision != "bf16"
    return x.clone() if is_precise else x.bfloat16().float()


rounded.register_fake(torch.empty_like)
rounded.register_autograd(lambda ctx, gradient: gradient)


def multiplied(block, x):
    """The numbers are those of the precision that holds."""
    return rounded(block.a(x)).tanh().sin() * block.b(x).sin()


def divided(block, x):
    """Integers become what the default says."""
    y = block.a(x)
    return (y * ((y * 10).long() / 3)).tanh().to(x.dtype) * block.b(x).sin()


def convolved(block, x):
    """The kernel is oneDNN's, or torch's own with other bits."""
    image = (block.a(x) * 0.5 + 1).view(4, 16, 6, 8)
    weight = block.b.weight.view(16, 16, 3, 3)
    return F.conv2d(image, weight, padding=1).tanh().sin().reshape(x.shape)


@pytest.mark.parametrize(
    ("body", "setting"),
    [
        (divided, other_default_dtype),
        (convolved, without_onednn),
        (multiplied, less_precise),
        (multiplied, less_precise_said_otherwise),
    ],
    ids=["default dtype", "oneDNN", "precision", "precision said otherwise"],
)
@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("engine", ["REPLAY", "MODULE"])
def test_ops_run_again_with_the_settings_they_had(lab, engine, body, setting, turns) -> None:
    steps = 0

    def step(model, batch):
        nonlocal steps
        steps += 1
        with setting() if steps % turns == 0 else nullcontext():
            loss = lab.mean_square(model, batch)
        loss.backward()
        return [loss]

    case = lab.Case(lambda: lab.stack_of(body), step=step)

    assert case.differences(getattr(lab, engine), steps=12) == []
    assert torch.get_default_dtype() is torch.float32
    assert mkldnn.enabled
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("outside", ["none", "ieee"])
@pytest.mark.parametrize("is_forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("engine", ["REPLAY", "MODULE"])
def test_a_precision_set_for_everything_is_seen_and_put_back(
    lab, engine, is_forward, outside
) -> None:
    """What is set for one kind of op would hide it from then on."""

    def step(model, batch):
        with less_precise_in_general() if is_forward else nullcontext():
            loss = lab.mean_square(model, batch)
        with nullcontext() if is_forward else less_precise_in_general():
            loss.backward()
        return [loss]

    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = outside
    try:
        case = lab.Case(lambda: lab.stack_of(multiplied), step=step)
        assert case.differences(getattr(lab, engine), steps=4) == []
    finally:
        torch.backends.fp32_precision = "none"
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
