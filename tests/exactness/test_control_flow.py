"""Paths and sizes that the data, chance or the batch decide."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn

STEPS = 8


class Experts(nn.Module):
    """A mixture of experts with top-k routing, one loop over the experts that have tokens."""

    def __init__(self, width, experts=4, top=2, empty=()):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )
        self.top, self.norm = top, nn.LayerNorm(width)
        with torch.no_grad():
            for expert in empty:
                self.router.bias[expert] = -1e4

    def forward(self, x):
        hidden = self.norm(x)
        weights, chosen = torch.topk(torch.softmax(self.router(hidden), -1), self.top)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, expert(hidden[rows]) * weights[rows, places, None])
        return x + out


def test_experts_without_tokens_have_no_gradient(lab):
    case = lab.Case(lambda: lab.Stack([Experts(lab.WIDTH, empty=(1,))]))
    lab.check_same(case)
    model, applied = case.fitted()
    lab.mean_square(model, case.batch).backward()
    assert model.blocks[0].experts[1][0].weight.grad is None
    assert model.blocks[0].experts[0][0].weight.grad is not None
    applied.remove()


def batches(lab, sizes):
    """A step that takes another number of rows each time."""

    def step(model, optimizer, batch, index):
        rows = lab.rows(seed=index).to(batch.device)[: sizes[index % len(sizes)]]
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    return step


def test_routing_of_other_tokens_each_step(lab):
    case = lab.Case(lambda: lab.Stack([Experts(lab.WIDTH)]), whole_step=batches(lab, [64, 33, 1]))
    lab.check_same(case, steps=STEPS)


def dense_dispatch(self, x):
    """Experts by one-hot matrices and capacity, as some implementations do."""
    scores = torch.softmax(self.a(x)[:, :4], -1)
    best = scores.argmax(-1)
    places = functional.one_hot(best, 4).to(x.dtype)
    order = places.cumsum(0) * places
    kept = (order > 0) & (order <= 20)
    return x + self.b(x * (scores * kept).sum(-1, keepdim=True))


def nonzero(self, x):
    hidden = self.a(x)
    rows, columns = torch.nonzero(hidden > 0.5, as_tuple=True)
    return x + self.b(torch.zeros_like(x).index_put((rows, columns), hidden[rows, columns].exp()))


def boolean_mask(self, x):
    mask = x.mean(-1) > 0
    out = x.clone()
    out[mask] = functional.gelu(self.a(x[mask]))
    return self.b(out)


def branch_on_a_value(self, x):
    hidden = self.a(x)
    hidden = torch.tanh(hidden) if hidden.mean() > 0 else functional.gelu(hidden)
    return x + self.b(hidden)


def numbers_from_the_data(self, x):
    hidden = self.a(x)
    scale = hidden.std().item()
    counts = (hidden[0] > 0).int().tolist()
    return x + self.b(torch.sin(hidden) * scale + sum(counts) / 10)


def unique(self, x):
    keys, inverse = torch.unique((x[:, 0] * 2).round().long(), return_inverse=True)
    sums = torch.zeros(len(keys), x.shape[1], device=x.device).index_add(0, inverse, self.a(x))
    return x + self.b(torch.tanh(sums)[inverse])


def repeated(self, x):
    counts = (x[:, 0] > 0).long() + 1
    many = torch.repeat_interleave(self.a(x), counts, dim=0)
    ends = counts.cumsum(0) - 1
    return x + self.b(functional.gelu(many)[ends])


def loop_until_small(self, x):
    for _ in range(5):
        x = x + torch.tanh(self.a(x)) * 0.5
        if float(x.detach().abs().max()) > 3:
            break
    return self.b(x)


def length_of_the_data(self, x):
    length = int((x[0] > 0).sum())
    hidden = self.a(x)
    return x + self.b(torch.cat([functional.gelu(hidden[:, :length]), hidden[:, length:]], 1))


def split_by_data(self, x):
    sizes = [10, 20, x.shape[0] - 30] if x[0, 0] > 0 else [x.shape[0]]
    return x + self.b(torch.cat([torch.tanh(part) for part in self.a(x).split(sizes)]))


def to_numpy(self, x):
    scale = float(x.detach().cpu().numpy().mean()) + 1
    return x + self.b(functional.gelu(self.a(x) * scale))


BODIES = [
    dense_dispatch,
    nonzero,
    boolean_mask,
    branch_on_a_value,
    numbers_from_the_data,
    unique,
    repeated,
    loop_until_small,
    length_of_the_data,
    split_by_data,
    to_numpy,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_data_decide(lab, body):
    def step(model, optimizer, batch, index):
        rows = lab.rows(seed=index).to(batch.device)
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), whole_step=step), steps=6)


def as_list(sizes):
    return sizes.tolist()[0]


def as_array(sizes):
    return sizes.numpy(force=True)[0].item()


def as_numpy_asks(sizes):
    return float(numpy.asarray(sizes.cpu())[0])


def as_a_shared_array(sizes):
    return float(numpy.from_dlpack(sizes.cpu())[0])


def as_where_to_split(sizes):
    return torch.ones(40, device=sizes.device).tensor_split(sizes.cpu())[0].sum()


def as_lengths(sizes):
    lengths = torch.cat([sizes, 30 - 0 * sizes]).cpu()
    rows = torch.ones(30, 2, 1, device=sizes.device)
    packed = rnn.pack_padded_sequence(rows, lengths, enforce_sorted=False)
    return torch.sin(rnn.pad_packed_sequence(packed)[0].reshape(-1)[:48])


READERS = [
    as_list,
    as_array,
    as_numpy_asks,
    as_a_shared_array,
    as_where_to_split,
    as_lengths,
]


class Sized(nn.Module):
    """Blocks that are told a size as a tensor, and read it their way."""

    def __init__(self, lab, read):
        super().__init__()
        self.blocks = lab.stack_of(
            lambda s, x, sizes: x + s.b(functional.gelu(s.a(x) * read(sizes)))
        ).blocks

    def forward(self, x, sizes):
        for block in self.blocks:
            x = block(x, sizes)
        return x


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_values_that_stay_for_some_steps_and_are_read_past_every_op(lab, read):
    sizes = [3, 3, 3, 3, 3, 3, 7, 7, 3]

    def step(model, optimizer, batch, index):
        loss = model(batch[0], torch.full_like(batch[1], sizes[index])).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    case = lab.Case(
        lambda: Sized(lab, read),
        loss=lambda model, batch: model(*batch).pow(2).mean(),
        batch=(lab.rows(), torch.tensor([3])),
        whole_step=step,
    )
    lab.check_same(case, steps=len(sizes))


def gelu_block(self, x):
    return x + self.b(functional.dropout(functional.gelu(self.norm(self.a(x))), 0.1))


class Exiting(nn.Module):
    """Leaves as soon as the hidden state is confident."""

    def __init__(self, lab):
        super().__init__()
        self.blocks = nn.ModuleList(lab.Block(gelu_block) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.detach().abs().mean() > 1.0:
                break
        return x


def test_early_exit(lab):
    lab.check_same(lab.Case(lambda: Exiting(lab), whole_step=batches(lab, [64, 9, 30])), steps=6)


class StochasticDepth(nn.Module):
    """Each step runs another set of blocks."""

    def __init__(self, lab, draw):
        super().__init__()
        self.blocks = nn.ModuleList(lab.Block(gelu_block) for _ in range(4))
        self.head, self.draw = nn.Linear(lab.WIDTH, lab.WIDTH), draw

    def forward(self, x):
        for block in self.blocks:
            if not self.training or self.draw() > 0.4:
                x = block(x)
        return self.head(x)


DRAWS = {
    "torch": lambda: torch.rand(1).item(),
    "Python": random.random,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_stochastic_depth(lab, draw):
    lab.check_same(lab.Case(lambda: StochasticDepth(lab, DRAWS[draw])), steps=STEPS)


@pytest.mark.parametrize("draw", DRAWS)
def test_layer_drop_inside_a_block(lab, draw):
    def body(self, x):
        if DRAWS[draw]() < 0.5:
            return x * 1.0
        return x + self.b(torch.tanh(self.a(x))) * (1 + DRAWS[draw]())

    lab.check_same(lab.Case(lambda: lab.stack_of(body, 3)), steps=STEPS)


def drop_path(self, x):
    """Stochastic depth by sample, as vision models have it."""
    kept = x.new_empty(x.shape[0], 1).bernoulli_(0.7)
    return x + self.b(functional.gelu(self.a(x))) * kept / 0.7


def test_drop_path(lab):
    lab.check_same(lab.Case(lambda: lab.stack_of(drop_path)))


@pytest.mark.parametrize(
    "sizes",
    [[64, 64, 64, 64, 64, 17], [64, 32, 16], [64, 63, 62, 61, 60, 59, 58, 57]],
    ids=["last batch smaller", "buckets in turns", "always another"],
)
def test_batches_of_other_sizes(lab, sizes):
    case = lab.Case(lambda: lab.stack_of(gelu_block), whole_step=batches(lab, sizes))
    lab.check_same(case, steps=STEPS)


def test_sequences_of_other_lengths(lab):
    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.inner = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
            self.norm = nn.LayerNorm(width)

        def forward(self, x, padding=None):
            hidden = self.norm(x)
            out, _ = self.inner(
                hidden, hidden, hidden, key_padding_mask=padding, need_weights=padding is not None
            )
            return x + out

    def step(model, optimizer, batch, index):
        length = (16, 16, 8, 5, 16, 16, 16, 3)[index]
        padding = None
        if index % 3 == 1:
            padding = torch.zeros(2, length, dtype=torch.bool, device=batch.device)
            padding[:, -1] = True
        x = batch[:2, :length] if index % 3 == 1 else batch[:, :length]
        for block in model.blocks:
            x = block(x, padding)
        loss = x.pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    make = lambda: lab.Stack([Attention(lab.WIDTH) for _ in range(2)])  # noqa: E731
    batch = lab.rows().view(4, 16, lab.WIDTH)
    lab.check_same(lab.Case(make, batch=batch, whole_step=step), steps=STEPS)


def test_code_that_asks_what_mode_it_is_in(lab):
    def body(self, x):
        hidden = self.a(x)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            hidden = functional.gelu(hidden)
        if not torch.is_inference_mode_enabled() and not torch.jit.is_tracing():
            hidden = torch.tanh(hidden)
        return x + self.b(hidden)

    def step(model, optimizer, batch, index):
        model.train(index % 3 != 2)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            return [loss, model(batch)]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), whole_step=step), steps=STEPS)
