"""Profiling leaves no trace: everything is bit for bit, and object for object, as before."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import leanstep

WIDTH = 12


class Net(nn.Module):
    """Everything that a forward pass may change, it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("lazy", None)
        self.register_buffer("wide", torch.ones(1).expand(WIDTH))
        self.generator = torch.Generator().manual_seed(5)
        self.num_calls = 0
        self.history: list[float] = [0.5]
        self.counts = {"calls": 0, "nested": [1]}
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.tally = Counter(calls=1)
        self.running = torch.zeros(2)
        self.cache = [torch.zeros(2)]
        self.last.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.history.append(float(self.num_calls))
        self.counts["calls"] += 1
        self.counts["nested"].append(self.num_calls)
        self.recent.append(self.num_calls)
        self.tally["calls"] += 1
        self.running += 1
        self.cache[0] += 1
        self.made_by_forward = x
        self.seen += 1
        if self.lazy is None:
            self.lazy = x.detach().mean()
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(2))
        self.last.train()
        noise = torch.rand(WIDTH, generator=self.generator) + random.random() + numpy.random.rand()
        hidden = self.dropout(self.norm(self.first(x * self.wide)).relu())
        return self.last(hidden * noise)


class FailsAtCall(Net):
    """Raises in forward, in the middle of the call with the given number."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.num_calls == self.call:
            raise UsersOwnError("the data is bad")
        return out


class UsersOwnError(Exception):
    """Not one of leanstep's."""


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def bits(value: Any) -> Any:
    """A value as something that can be compared: tensors as who they are and their bytes."""
    if isinstance(value, Tensor):
        raw = value.detach().contiguous().numpy().tobytes()
        return id(value), value.shape, value.stride(), value.requires_grad, raw
    if isinstance(value, dict):
        return id(value), type(value), [(id(key), bits(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), type(value), [bits(item) for item in value]
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return id(value)


def state_of(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> dict:
    """Everything that a step could change."""
    state = {
        "batch": bits(batch),
        "torch's random state": torch.get_rng_state().numpy().tobytes(),
        "Python's random state": random.getstate(),
        "NumPy's random state": str(numpy.random.get_state()),
    }
    for path, module in model.named_modules():
        state[f"attributes of {path!r}"] = {name: bits(v) for name, v in vars(module).items()}
    for name, parameter in model.named_parameters():
        state[f"gradient of {name}"] = bits(parameter.grad)
    for leaf in [batch] if isinstance(batch, Tensor) else []:
        state["gradient of the batch"] = bits(leaf.grad)
    if optimizer is not None:
        state["optimizer"] = {name: bits(value) for name, value in vars(optimizer).items()}
    return state


def differences(before: dict, after: dict) -> list[str]:
    assert before.keys() == after.keys()
    return [name for name in before if before[name] != after[name]]


def train(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        squares(model, batch).backward()
        optimizer.step()


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "tensor rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1)),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "none": lambda parameters: None,
}


@pytest.mark.parametrize("gradients_kept", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_profiling_leaves_no_trace(make: Any, steps: int, gradients_kept: bool) -> None:
    model, batch = Net(), torch.randn(8, WIDTH)
    optimizer = make(model.parameters())
    if optimizer is not None:
        train(model, batch, optimizer, steps)
    before = state_of(model, batch, optimizer)

    leanstep.profile(model, batch, squares, optimizer=optimizer, gradients_kept=gradients_kept)

    assert differences(before, state_of(model, batch, optimizer)) == []


@pytest.mark.parametrize("gradients_kept", [False, True])
@pytest.mark.parametrize("call", [1, 3])
def test_a_model_that_raises_leaves_no_trace_and_its_own_error(
    call: int, gradients_kept: bool
) -> None:
    model, batch = FailsAtCall(call), torch.randn(8, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, batch, optimizer)

    with pytest.raises(UsersOwnError, match="the data is bad"):
        leanstep.profile(model, batch, squares, optimizer=optimizer, gradients_kept=gradients_kept)

    assert differences(before, state_of(model, batch, optimizer)) == []


@pytest.mark.parametrize("call", range(1, 8))
def test_a_model_that_raises_while_it_is_recorded_keeps_no_hook(call: int) -> None:
    model = FailsAtCall(call)
    hooks = num_hooks(model)

    with contextlib.suppress(UsersOwnError):
        leanstep.profile(model, torch.randn(8, WIDTH), squares)

    assert num_hooks(model) == hooks


def num_hooks(model: nn.Module) -> list[int]:
    own = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(module, name)) for module in model.modules() for name in own]


def test_the_hooks_of_the_user_stay_and_stay_in_order() -> None:
    model, order = Net(), []
    model.first.register_forward_hook(lambda *_: order.append("first"))
    model.first.register_forward_hook(lambda *_: order.append("second"))
    hooks = num_hooks(model)

    leanstep.profile(model, torch.randn(8, WIDTH), squares)

    order.clear()
    model(torch.randn(8, WIDTH))
    assert order == ["first", "second"]
    assert num_hooks(model) == hooks


@pytest.mark.parametrize("had_gradients", [False, True])
def test_gradients_are_the_same_objects_with_the_same_contents(had_gradients: bool) -> None:
    model, batch = Net(), torch.randn(8, WIDTH)
    if had_gradients:
        squares(model, batch).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    copies = [None if grad is None else grad.clone() for grad in gradients]

    leanstep.profile(model, batch, squares)

    for parameter, gradient, copy in zip(model.parameters(), gradients, copies, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, copy)


@pytest.mark.parametrize("had_gradient", [False, True])
def test_a_batch_with_a_gradient_keeps_it(had_gradient: bool) -> None:
    model, batch = Net(), torch.randn(8, WIDTH, requires_grad=True)
    if had_gradient:
        batch.grad = torch.ones_like(batch)
    before = state_of(model, batch, None)

    leanstep.profile(model, batch, squares)

    assert differences(before, state_of(model, batch, None)) == []


def test_a_batch_that_the_model_overwrites_is_put_back() -> None:
    def overwrite(model: nn.Module, batch: Tensor) -> Tensor:
        batch.mul_(2.0)
        return squares(model, batch)

    model, batch = Net(), torch.randn(8, WIDTH)
    before = batch.clone()

    leanstep.profile(model, batch, overwrite)

    assert torch.equal(batch, before)


@pytest.mark.parametrize("make", [torch.randn(1, WIDTH).expand, None], ids=["expanded", "unfolded"])
def test_a_batch_whose_elements_share_memory_can_be_profiled(make: Any) -> None:
    batch = make(8, WIDTH) if make else torch.randn(8 + WIDTH).unfold(0, WIDTH, 1)[:8]
    before = batch.clone()

    leanstep.profile(Net(), batch, squares)

    assert torch.equal(batch, before)


def test_a_batch_that_is_read_only_is_not_written() -> None:
    array = numpy.ones((8, WIDTH), dtype=numpy.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = torch.from_numpy(array)
    version = batch._version

    leanstep.profile(Net(), batch, squares)

    assert batch._version == version


def test_an_empty_optimizer_stays_empty() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    leanstep.profile(model, torch.randn(8, WIDTH), squares, optimizer=optimizer)

    assert len(optimizer.state) == 0


@pytest.fixture
def fired() -> Iterator[list[str]]:
    """Hooks on the steps of all optimizers, and what they saw."""
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_step_hooks_are_silent_and_still_there(fired: list[str]) -> None:
    model, batch = Net(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    optimizer.register_step_post_hook(lambda *_: fired.append("after"))

    leanstep.profile(model, batch, squares, optimizer=optimizer)

    assert fired == []
    train(model, batch, optimizer, 1)
    assert sorted(fired) == ["after", "after any", "before", "before any"]


def test_a_scheduler_still_knows_that_no_step_was_made() -> None:
    model, batch = Net(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    before = dict(vars(scheduler))

    leanstep.profile(model, batch, squares, optimizer=optimizer)

    assert vars(scheduler) == before
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_a_scheduler_still_knows_that_a_step_was_made() -> None:
    model, batch = Net(), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(model, batch, optimizer, 1)

    leanstep.profile(model, batch, squares, optimizer=optimizer)

    # A warning would be an error.
    scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.01)]


def test_training_goes_on_as_if_nothing_had_been() -> None:
    losses = []
    for profiled in (False, True):
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
        model, batch = Net(), torch.randn(8, WIDTH)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, batch, optimizer, 2)
        if profiled:
            leanstep.profile(model, batch, squares, optimizer=optimizer)
        train(model, batch, optimizer, 2)
        losses.append(squares(model, batch))

    assert torch.equal(*losses)


@pytest.mark.parametrize("training", [False, True])
def test_modes_stay_module_by_module(training: bool) -> None:
    model = Net().train(training)
    model.norm.eval()
    model.last.train()
    modes = [module.training for module in model.modules()]

    leanstep.profile(model, torch.randn(8, WIDTH), squares)

    assert [module.training for module in model.modules()] == modes


def test_loading_the_verb_leaves_pythons_random_state_alone() -> None:
    program = (
        "import random, sys, torch, leanstep; before = random.getstate(); leanstep.profile; "
        "sys.exit(random.getstate() != before)"
    )
    source = Path(leanstep.__file__).parents[1]

    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(source)}, check=False
    )

    assert done.returncode == 0
