"""Parameters that want no gradient, that come to want one, and that several blocks share."""

import pytest
import torch
from torch import nn
from torch.nn import functional

STEPS = 8
CHANGE_AT = 5


def gated(self, x):
    return x + self.b(functional.gelu(self.norm(self.a(x))) * torch.sigmoid(x))


class Adapter(nn.Module):
    """A frozen layer and a trained correction of low rank."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(functional.dropout(self.down(x), 0.1)) * 0.5


def freeze(module):
    return module.requires_grad_(False)


def all_but_norms(model):
    freeze(model)
    for block in model.blocks:
        block.norm.requires_grad_(True)


def all_but_last_block(model):
    freeze(model)
    model.blocks[-1].requires_grad_(True)


def first_block_and_stem(model):
    freeze(model.first)
    freeze(model.blocks[0])


def all_but_biases(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))


def adapters(model):
    freeze(model)
    for block in model.blocks:
        block.a, block.b = Adapter(block.a), Adapter(block.b)


@pytest.mark.parametrize(
    "change",
    [all_but_norms, all_but_last_block, first_block_and_stem, all_but_biases, adapters],
    ids=lambda change: change.__name__,
)
def test_frozen_parts(lab, change):
    def make():
        model = lab.stack_of(gated, 3)
        change(model)
        return model

    lab.check_same(lab.Case(make))


@pytest.mark.parametrize("wants", [True, False])
def test_an_input_that_wants_a_gradient_or_none(lab, wants):
    class Bare(lab.Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def step(model, batch):
        batch = batch.detach().requires_grad_(wants)
        loss = lab.mean_square(model, batch)
        loss.backward()
        return [loss, batch.grad]

    make = lambda: Bare([lab.Block(gated) for _ in range(2)])  # noqa: E731
    lab.check_same(lab.Case(make, step=step))


def unfreeze_in_the_middle(model, index):
    model.blocks[0].requires_grad_(index >= CHANGE_AT)


def in_turns(model, index):
    for number, block in enumerate(model.blocks):
        block.requires_grad_((index + number) % 2 == 0)


def one_weight(model, index):
    model.blocks[1].a.weight.requires_grad_(index % 3 != 0)


@pytest.mark.parametrize(
    "change", [unfreeze_in_the_middle, in_turns, one_weight], ids=lambda change: change.__name__
)
def test_what_is_trained_changes_from_step_to_step(lab, change):
    def step(model, optimizer, batch, index):
        change(model, index)
        loss = lab.mean_square(model, batch)
        loss.backward()
        optimizer.step()
        return [loss]

    lab.check_same(lab.Case(lambda: lab.stack_of(gated), whole_step=step), steps=STEPS)


class TiedModel(nn.Module):
    """Embedding and head are one weight; two blocks share a layer."""

    def __init__(self, lab):
        super().__init__()
        self.embedding = nn.Embedding(50, lab.WIDTH)
        self.blocks = nn.ModuleList(lab.Block(gated) for _ in range(3))
        self.blocks[2].a = self.blocks[0].a
        self.blocks[1].b.weight = self.blocks[0].b.weight
        self.head = nn.Linear(lab.WIDTH, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_tied_weights_and_a_layer_in_two_places(lab):
    tokens = torch.arange(lab.ROWS) % 50

    def loss(model, batch):
        return functional.cross_entropy(model(batch), batch)

    lab.check_same(lab.Case(lambda: TiedModel(lab), loss=loss, batch=tokens))


class Shared(nn.Module):
    """One block called again and again, a number of times that may change."""

    def __init__(self, lab, body=gated):
        super().__init__()
        self.first = nn.Linear(lab.WIDTH, lab.WIDTH)
        self.block = lab.Block(body)
        self.calls = 3

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.calls):
            x = self.block(x)
        return x


def test_one_block_called_three_times(lab):
    def body(self, x):
        return x + self.b(functional.dropout(functional.gelu(self.a(self.norm(x))), 0.2))

    lab.check_same(lab.Case(lambda: Shared(lab, body)), steps=STEPS)


def test_one_block_called_another_number_of_times_each_step(lab):
    def step(model, optimizer, batch, index):
        model.calls = (3, 1, 5, 2, 3, 4, 0, 3)[index]
        loss = lab.mean_square(model, batch)
        loss.backward()
        optimizer.step()
        return [loss]

    lab.check_same(lab.Case(lambda: Shared(lab), whole_step=step), steps=STEPS)


def test_one_block_that_stands_twice_in_the_list(lab):
    def make():
        block, other = lab.Block(gated), lab.Block(gated)
        return lab.Stack([block, other, block])

    lab.check_same(lab.Case(make))


def test_one_layer_that_stands_twice_in_a_sequential(lab):
    def make():
        layer = nn.Linear(lab.WIDTH, lab.WIDTH)
        return nn.Sequential(layer, nn.GELU(), layer, nn.Dropout(0.1), layer, nn.Tanh(), layer)

    lab.check_same(lab.Case(make))


def test_a_parameter_handed_from_block_to_block(lab):
    class Handing(lab.Stack):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, self.blocks[0].a.weight)
            return x

    def body(self, x, weight):
        return x + functional.gelu(functional.linear(torch.tanh(self.b(x)), weight * 0.5))

    lab.check_same(lab.Case(lambda: Handing([lab.Block(body) for _ in range(2)])), steps=STEPS)
