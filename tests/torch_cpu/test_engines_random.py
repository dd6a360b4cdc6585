"""Random numbers: replayed draws are the same, and the generators end where they would have."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F


def dropouts(s, x):
    return x + F.dropout(s.b(F.dropout(s.a(x).relu(), 0.3)), 0.2)


def rrelu(s, x):
    return s.b(F.rrelu(s.a(x), training=True))


def rrelu_in_place(s, x):
    return s.b(F.rrelu(s.a(x), training=True, inplace=True))


def attention(s, x):
    q = s.a(x).view(4, 16, 4, 12).transpose(1, 2)
    k = s.b(x).view(4, 16, 4, 12).transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, q, dropout_p=0.2, is_causal=True)
    return s.norm(x + out.transpose(1, 2).reshape(x.shape))


def many_kinds(s, x):
    noise = torch.bernoulli(torch.full_like(x, 0.4)) + torch.randn_like(x)
    waits = torch.empty_like(x).exponential_() * torch.poisson(torch.full_like(x, 2.0))
    return s.b(noise * s.a(x) + waits * x.sigmoid())[torch.randperm(len(x))]


def draw_with_rate_zero(s, x):
    return s.b(F.dropout(s.a(x) + torch.empty_like(x).bernoulli_(0.0), 0.3))


def own_generator(s, x):
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(7))
    return s.b(noise * s.a(x).relu()) + F.dropout(x, 0.2) * s.a(x).sigmoid()


def seed_inside(s, x):
    torch.manual_seed(42)
    return s.b(F.dropout(s.a(x), 0.5))


def fork_inside(s, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn_like(x)
    return s.b(F.dropout(s.a(x), 0.5) * noise.exp())


BODIES = [
    *(dropouts, rrelu, rrelu_in_place, attention, many_kinds, draw_with_rate_zero),
    *(own_generator, seed_inside, fork_inside),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_random_blocks_have_the_bits_of_the_untouched_model(lab, body) -> None:
    case = lab.Case(lambda: lab.stack_of(body))

    assert case.differences() == []
    assert case.differences(pick=lab.some(0), steps=4) == []
    assert case.differences(lab.MODULE, steps=3) == []


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_stochastic_depth_takes_the_same_paths(lab, draw) -> None:
    def body(s, x):
        return x + s.b(s.a(x).relu()) * draw() if draw() < 0.7 else x * 1

    case = lab.Case(lambda: lab.stack_of(body))

    assert case.differences() == []
    assert case.differences(lab.MODULE) == []


def test_draws_between_blocks_stay_where_they_are(lab) -> None:
    def loss(model, batch):
        hidden = batch
        for block in model.blocks:
            hidden = block(hidden) * torch.rand(())
        return hidden.pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(dropouts), loss=loss)

    assert case.differences() == []


def test_peak_with_replayed_draws_is_predicted(lab) -> None:
    case = lab.Case(lambda: lab.stack_of(dropouts), batch=torch.randn(1024, 48))

    predicted, measured = case.peaks()

    assert measured <= predicted <= 1.01 * measured
