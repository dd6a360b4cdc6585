"""What a review by fresh eyes found: each test failed before its repair."""

import contextlib
import copy
import types
import warnings

import pytest
import torch
import torch.nn.functional as functional
from torch import nn

import leanstep
from leanstep.errors import InputError, PlanError
from leanstep.step.outcome import same as _same

WIDTH = 64


class Block(nn.Module):
    """A residual block that takes a number, a function and a list from its attributes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.settings = types.SimpleNamespace(scale=1.0)
        self.activation = functional.gelu
        self.factors = [1.0]

    def forward(self, hidden):
        inner = self.up(hidden) * self.settings.scale * self.factors[0]
        return hidden + self.down(self.activation(inner))


class Rebuilt(Block):
    """A block that says itself how it is copied."""

    def __reduce__(self):
        return Rebuilt, (WIDTH,)


def stack(kind=Block, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(depth)))


def batch_of(rows: int = 256) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    return model(batch).square().mean()


def gradients(model, batch):
    model.zero_grad()
    loss(model, batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("settings", types.SimpleNamespace(scale=3.0)),
        ("activation", functional.silu),
        ("factors", [3.0]),
    ],
)
def test_an_attribute_replaced_by_another_object_is_noticed(name, value):
    model = stack()
    plain = copy.deepcopy(model)
    leanstep.fit(model, batch_of(), loss, budget="75%", verify=False)
    for step in range(10):
        if step == 5:
            for block in (*model, *plain):
                setattr(block, name, value)
        pairs = zip(gradients(model, batch_of()), gradients(plain, batch_of()), strict=True)
        assert all(torch.equal(new, old) for new, old in pairs)


def test_keywords_that_checkpointing_knows_too_reach_the_block():
    class Doubling(Block):
        def forward(self, hidden, debug=False):
            hidden = super().forward(hidden)
            return hidden * 2 if debug else hidden

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Doubling() for _ in range(3))

        def forward(self, hidden):
            for block in self.blocks:
                hidden = block(hidden, debug=True)
            return hidden

    fitted = leanstep.fit(Model(), batch_of(), loss, budget="80%", engine="module")

    assert fitted.plan.changed
    assert fitted.verdict.exact


def test_an_optimizer_that_swaps_the_data_leaves_no_trace():
    class Swapping(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data = parameter.data - 0.1 * parameter.grad

    model = stack()
    before = [(p.data_ptr(), p.detach().clone()) for p in model.parameters()]

    leanstep.profile(model, batch_of(), loss, optimizer=Swapping(model.parameters()))

    for (address, old), parameter in zip(before, model.parameters(), strict=True):
        assert parameter.data_ptr() == address
        assert torch.equal(old, parameter)


def test_an_expanded_gradient_is_put_back():
    model = stack()
    gradient = torch.zeros(1, 1).expand(4 * WIDTH, WIDTH)
    model[0].up.weight.grad = gradient

    leanstep.profile(model, batch_of(), loss)

    assert model[0].up.weight.grad is gradient


def test_zero_and_minus_zero_are_not_the_same_bits():
    assert not _same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert _same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


def test_an_op_that_fails_and_is_caught_by_the_model_is_no_obstacle():
    class Trying(Block):
        def forward(self, hidden):
            with contextlib.suppress(RuntimeError):
                torch.linalg.cholesky(-torch.eye(3))
            return super().forward(hidden)

    assert leanstep.fit(stack(Trying), batch_of(), loss, budget="75%").verdict.exact


def test_a_block_called_at_two_sizes_in_one_step_warns_of_nothing():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, hidden):
            small = self.first(self.first(hidden[:32])).repeat(8, 1)
            return self.second(small + self.first(hidden))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leanstep.fit(Model(), batch_of(), loss, budget="85%")


def test_sparse_gradients_are_compared_too():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, WIDTH, sparse=True)
            self.blocks = stack()

        def forward(self, tokens):
            return self.blocks(self.embedding(tokens))

    tokens = torch.arange(256) % 100
    assert leanstep.fit(Model(), tokens, loss, budget="85%").verdict.gradients_equal


def test_a_forward_put_on_the_instance_does_not_stop_a_fit():
    model = stack()
    for block in model:
        block.forward = block.forward

    leanstep.fit(model, batch_of(), loss, budget="100%", verify=False)
    assert leanstep.fit(model, batch_of(), loss, budget="80%").verdict.exact


def test_a_class_that_says_how_it_is_copied_is_copied_so():
    model = stack(Rebuilt)
    leanstep.fit(model, batch_of(), loss, budget="75%", verify=False)

    twin = copy.deepcopy(model)

    assert type(twin[0]) is Rebuilt
    loss(twin, batch_of(4))


def test_an_optimizer_that_needs_a_closure_is_refused_in_a_sentence():
    model = stack()
    with pytest.raises(InputError, match="LBFGS runs the model several times"):
        leanstep.fit(model, batch_of(), loss, optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_plan_for_another_model_is_refused_with_both_names():
    plan = leanstep.plan(leanstep.profile(stack(), batch_of(), loss), "80%")
    other = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    with pytest.raises(PlanError, match=r"made for Sequential, 12 tensors.* is Sequential, 6.*: p"):
        leanstep.apply(other, plan)


def test_a_block_that_writes_a_parameter_is_not_run_twice():
    class Renorming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, WIDTH, max_norm=1.0)
            self.block = Block()

        def forward(self, tokens, hidden):
            return self.block(hidden + self.embedding(tokens))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Renorming() for _ in range(3))

        def forward(self, tokens):
            hidden = torch.zeros(len(tokens), WIDTH)
            for block in self.blocks:
                hidden = block(tokens, hidden)
            return hidden

    with pytest.raises(leanstep.BudgetError):
        leanstep.fit(Model(), torch.arange(256) % 100, loss, budget="80%", engine="module")
    assert leanstep.fit(Model(), torch.arange(256) % 100, loss, budget="80%").verdict.exact


def test_with_kept_gradients_the_verdict_says_the_optimizer_does_not_step():
    model = stack()
    fitted = leanstep.fit(
        model,
        batch_of(),
        loss,
        optimizer=torch.optim.AdamW(model.parameters()),
        budget="85%",
        gradients_kept=True,
    )
    assert any("optimizer.step() is not part of it" in line for line in fitted.verdict.assumptions)
