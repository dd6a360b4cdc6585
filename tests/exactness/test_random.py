"""Random numbers: the same ones, drawn once."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

FORMS = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout in place": lambda x: functional.dropout(x * 1.0, 0.3, inplace=True),
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "feature alpha dropout": lambda x: functional.feature_alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x: functional.dropout1d(x.unsqueeze(0), 0.3)[0],
    "dropout2d": lambda x: functional.dropout2d(x.view(4, 16, 6, 8), 0.3).view_as(x),
    "dropout3d": lambda x: functional.dropout3d(x.view(4, 16, 2, 3, 8), 0.3).view_as(x),
    "dropout of everything": lambda x: functional.dropout(x, 1.0) + x,
    "dropout of nothing": lambda x: functional.dropout(x, 0.0),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rrelu in place": lambda x: functional.rrelu(x * 1.0, training=True, inplace=True),
    "rand": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "bernoulli of a probability": lambda x: x * torch.bernoulli(x.sigmoid()),
    "in place draws": lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5).clamp_(max=1.2),
    "normal": lambda x: x + torch.normal(0.0, 0.1, x.shape, device=x.device),
    "randint": lambda x: x * torch.randint(1, 4, x.shape, device=x.device),
    "permuted rows": lambda x: x[torch.randperm(len(x), device=x.device)],
    "multinomial": lambda x: x[torch.multinomial(x.detach().sigmoid().sum(1), len(x))],
    "gumbel softmax": lambda x: functional.gumbel_softmax(x),
    "hard gumbel softmax": lambda x: functional.gumbel_softmax(x, hard=True),
    "sampled from a distribution": lambda x: (
        torch.distributions.Normal(x, 1.0).rsample()
        + torch.distributions.Gamma(x.exp() + 1, 1.0).rsample() * 0.01
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_dropout_in_every_form(lab, form):
    def body(self, x):
        return x + self.b(FORMS[form](torch.relu(self.a(x))))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


class Layers(nn.Module):
    """A block made of modules, called on a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.alpha = nn.AlphaDropout(0.2)
        self.feature = nn.FeatureAlphaDropout(0.2)
        self.leaky = nn.RReLU(inplace=True)
        self.drop = nn.Dropout(0.2, inplace=True)
        self.channels = nn.Dropout1d(0.2)

    def forward(self, x):
        x = self.leaky(self.alpha(self.first(x)))
        return self.drop(self.channels(self.feature(x)))


def test_dropout_as_modules(lab):
    batch = torch.randn(4, 16, lab.WIDTH)

    def make():
        return lab.Stack([Layers(lab.WIDTH) for _ in range(2)])

    lab.check_same(lab.Case(make, batch=batch))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(4, 16, 4, 12).transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(64, 48)


ATTENTION = {
    "dropout": {"dropout_p": 0.2},
    "causal with dropout": {"dropout_p": 0.2, "is_causal": True},
    "scaled": {"scale": 0.3},
    "bool mask": {"attn_mask": "bool", "dropout_p": 0.1},
    "float mask": {"attn_mask": "float"},
}


@pytest.mark.parametrize("form", ATTENTION)
def test_attention_with_dropout(lab, form):
    settings = dict(ATTENTION[form])
    masks = {
        "bool": torch.ones(16, 16, dtype=torch.bool, device=lab.DEVICE).tril(),
        "float": torch.linspace(-1, 1, 256, device=lab.DEVICE).view(16, 16),
    }
    if "attn_mask" in settings:
        settings["attn_mask"] = masks[settings["attn_mask"]]

    def body(self, x):
        query, key = heads(self.a(x)), heads(self.b(x))
        out = functional.scaled_dot_product_attention(query, key, heads(x), **settings)
        return self.norm(x + merged(out))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


def test_attention_with_shared_keys_and_a_chosen_kernel(lab):
    def body(self, x):
        query, key = heads(self.a(x)), heads(self.b(x))[:, :2]
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            out = functional.scaled_dot_product_attention(
                query, key, key, dropout_p=0.2, enable_gqa=True
            )
        return self.norm(x + merged(out))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


class SelfAttention(nn.Module):
    def __init__(self, width: int, **settings: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.2, batch_first=True)
        self.settings = settings

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -3:] = True
        out, weights = self.attention(x, x, x, key_padding_mask=padding, **self.settings)
        return x + out if weights is None else x + out + weights.mean()


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(lab, need_weights):
    def make():
        return lab.Stack([SelfAttention(lab.WIDTH, need_weights=need_weights) for _ in range(2)])

    lab.check_same(lab.Case(make, batch=torch.randn(4, 16, lab.WIDTH)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(lab, norm_first):
    def make():
        layer = nn.TransformerEncoderLayer(
            lab.WIDTH, 4, 96, 0.2, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    lab.check_same(lab.Case(make, batch=torch.randn(4, 16, lab.WIDTH)))


def test_transformer_decoder(lab):
    def make():
        layer = nn.TransformerDecoderLayer(lab.WIDTH, 4, 96, 0.2, batch_first=True)
        return nn.TransformerDecoder(layer, 2)

    def loss(model, batch):
        mask = nn.Transformer.generate_square_subsequent_mask(8, device=batch[0].device)
        return model(*batch, tgt_mask=mask, tgt_is_causal=True).pow(2).mean()

    batch = (torch.randn(4, 8, lab.WIDTH), torch.randn(4, 16, lab.WIDTH))
    lab.check_same(lab.Case(make, loss=loss, batch=batch))


class Recurrent(nn.Module):
    def __init__(self, kind: type, width: int) -> None:
        super().__init__()
        self.layers = kind(width, width, num_layers=2, dropout=0.3)

    def forward(self, x):
        return x + self.layers(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_recurrent_layers(lab, kind):
    def make():
        return lab.Stack([Recurrent(kind, lab.WIDTH) for _ in range(2)])

    # On the CPU they are hundreds of small ops: planning them would take the longest.
    ways = ["replay, all dropped", "replay, some dropped", "module"]
    lab.check_same(lab.Case(make, batch=torch.randn(3, 4, lab.WIDTH)), ways=ways)


def test_draws_of_the_user_between_blocks(lab):
    class Noisy(lab.Stack):
        def forward(self, x):
            for block in self.blocks:
                x = block(x) + 0.1 * torch.randn_like(x)
            return x

    def body(self, x):
        return self.b(nn.functional.dropout(torch.relu(self.a(x))))

    lab.check_same(lab.Case(lambda: Noisy([lab.Block(body) for _ in range(3)])))


def test_draws_between_forward_and_backward(lab):
    def body(self, x):
        return self.b(functional.dropout(torch.relu(self.a(x))))

    def step(model, batch):
        loss = model(batch).pow(2).mean()
        noise = torch.randn(7, device=batch.device)
        loss.backward()
        return [loss, noise, torch.randn(3, device=batch.device)]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), step=step))


def test_a_generator_made_in_the_block(lab):
    def body(self, x):
        own = torch.Generator(x.device).manual_seed(7)
        noise = torch.rand(x.shape, generator=own, device=x.device)
        return self.b(noise * torch.relu(self.a(x))) + functional.dropout(x, 0.2)

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


def test_a_generator_that_the_block_holds(lab):
    def body(self, x):
        noise = torch.rand(x.shape, generator=self.own, device=x.device)
        return self.b(functional.dropout(noise * torch.relu(self.a(x)), 0.2))

    def change(block):
        block.own = torch.Generator(lab.DEVICE).manual_seed(7)

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)))


def test_a_generator_that_two_blocks_share_by_a_closure(lab):
    def make():
        own = torch.Generator(lab.DEVICE).manual_seed(7)

        def body(self, x):
            noise = torch.rand(x.shape, generator=own, device=x.device)
            return self.b(noise * torch.relu(self.a(x)))

        return lab.stack_of(body)

    lab.check_same(lab.Case(make))


def test_a_generator_that_is_an_argument(lab):
    def body(self, x, own):
        return self.b(torch.relu(self.a(x)) * torch.rand(x.shape, generator=own, device=x.device))

    def loss(model, batch):
        own = torch.Generator(batch.device).manual_seed(3)
        for block in model.blocks:
            batch = block(batch, own)
        return batch.pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss))


def seeded(self, x):
    torch.manual_seed(42)
    return self.b(functional.dropout(torch.relu(self.a(x)), 0.5))


def forked(self, x):
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(3)
        noise = torch.randn_like(x)
    return self.b(functional.dropout(torch.relu(self.a(x)), 0.5) * noise.exp())


def rewound(self, x):
    state = torch.get_rng_state()
    first = functional.dropout(torch.relu(self.a(x)), 0.5)
    torch.set_rng_state(state)
    return self.b(first) * torch.rand(x.shape).to(x.device)


@pytest.mark.parametrize("body", [seeded, forked, rewound], ids=lambda body: body.__name__)
@pytest.mark.parametrize("seeds_each_step", [False, True])
def test_seeds_set_inside_a_block(lab, body, seeds_each_step):
    steps = iter(range(1000))

    def step(model, batch):
        if seeds_each_step:
            torch.manual_seed(next(steps) % 5)
        loss = model(batch).pow(2).mean()
        loss.backward()
        return [loss]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), step=step))


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["python", "numpy"])
def test_draws_of_other_libraries(lab, draw):
    def body(self, x):
        return x + self.b(torch.relu(self.a(x))) * draw() if draw() < 0.7 else x * 1.0

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


OTHER_GENERATORS = {
    "Python": lambda: random.Random(5).random,
    "NumPy": lambda: numpy.random.default_rng(5).random,
    "old NumPy": lambda: numpy.random.RandomState(5).random_sample,
}


@pytest.mark.parametrize("kind", OTHER_GENERATORS)
def test_other_generators_that_a_block_holds(lab, kind):
    """Two equal draws in a row must not pass for a rule."""

    def body(self, x):
        factor = 2.0 if self.draw() < 0.2 else 1.0
        return x + self.b(torch.relu(self.a(x)) * factor).sigmoid()

    def change(block):
        block.draw = OTHER_GENERATORS[kind]()

    lab.check_same(lab.Case(lambda: lab.stack_of(body, change=change)), steps=9)
