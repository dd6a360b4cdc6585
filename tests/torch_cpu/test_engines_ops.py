"""Blocks with nasty ops train with the same bits, whichever of their values are dropped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from leanstep.engines.recording import look_at


def plain(s, x):
    return s.norm(x + s.b(F.gelu(s.a(x))))


def in_place_chain(s, x):
    h = s.a(x)
    h.add_(1).mul_(2)
    h = h.sigmoid()
    g = h * x
    g[:, 0] = h[:, 1]
    g[:, 2:4].mul_(3.0)
    return s.b(g).tanh_()


def in_place_silu(s, x):
    return s.b(F.silu(s.a(x), inplace=True))


def in_place_on_the_input(s, x):
    return s.b(x.add_(1.0).relu_()) * x


def masks(s, x):
    h = s.a(x).clone()
    h[h > 0.5] = 0.0
    h.masked_fill_(h < -1, 0.1)
    h.index_put_((torch.tensor([0, 1]), torch.tensor([2, 2])), torch.tensor([0.5, 0.2]))
    return s.b(h * h)


def saved_views(s, x):
    a, b = s.a(x).chunk(2, -1)
    c, d, *_ = s.b(x).split(12, -1)
    e = s.a(x).view(-1, 4, 12).unbind(1)
    return torch.cat([F.silu(a) * b, c * d.sigmoid(), e[0] * e[1].exp()], -1)


def conjugate_views(s, x):
    w = torch.complex(s.a.weight, s.b.weight)
    f = torch.fft.fft(s.a(x))
    y = ((f * f) @ w.conj()) @ w.mH
    g = f.conj() * y
    return s.b((y.conj().mT.mT * g).real.tanh()) + g.imag.tanh() * y.real.sigmoid()


def data_dependent(s, x):
    h = s.a(x)
    total = (h[h > 0] ** 2).sum()
    return s.b(h.relu()) + total * x if total.item() > 3 else s.b(h.exp())


def integer_indexing(s, x):
    return s.b(F.gelu(s.a(x)[:, torch.arange(47, -1, -1)]) * x)


def loss_inside(s, x):
    return x + F.cross_entropy(s.a(x), torch.arange(len(x)) % 48) * s.b(x).sigmoid()


def backward_inside(s, x):
    slope = torch.autograd.grad(s.a(x).exp().sum(), s.a.weight, create_graph=True)[0]
    return s.b(s.a(x).relu()) + slope.sum(0).tanh()


def sorting(s, x):
    return s.b(s.a(x).sort(1)[0] * s.a(x).topk(48, 1)[0].sigmoid()).cumsum(1)


def checkpoint_inside(s, x):
    inner = torch.utils.checkpoint.checkpoint(
        lambda y: s.b(F.dropout(F.gelu(s.a(y)), 0.1)), x, use_reentrant=False
    )
    return s.norm(x) * inner


BODIES = [
    *(plain, in_place_chain, in_place_silu, in_place_on_the_input, masks, saved_views),
    *(conjugate_views, data_dependent, integer_indexing, loss_inside, backward_inside, sorting),
    checkpoint_inside,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_replay_has_the_bits_of_the_untouched_model(lab, body) -> None:
    case = lab.Case(lambda: lab.stack_of(body))

    assert case.differences() == []
    assert case.differences(pick=lab.some(0), steps=4) == []
    assert case.differences(pick=lab.some(1), steps=4) == []


@pytest.mark.parametrize("body", [plain, in_place_chain, saved_views, conjugate_views])
def test_predicted_peak_is_the_measured_one_or_just_above(lab, body) -> None:
    case = lab.Case(lambda: lab.stack_of(body))

    predicted, measured = case.peaks()

    assert measured <= predicted <= 1.01 * measured


class Recurrent(nn.Module):
    def __init__(self, kind, width: int) -> None:
        super().__init__()
        self.cell = kind(width, width, 1, batch_first=True)
        self.last = nn.Linear(width, width)

    def forward(self, x):
        return x + self.last(self.cell(x.view(4, 16, -1))[0].reshape(x.shape))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_replayed_as_they_ran(lab, kind) -> None:
    # oneDNN's LSTM looks at the grad mode; the GRU writes chunks that count as one storage.
    case = lab.Case(lambda: lab.Stack([Recurrent(kind, lab.WIDTH) for _ in range(2)]))

    assert case.differences(steps=5) == []
    assert case.differences(pick=lab.some(0), steps=3) == []
    predicted, measured = case.peaks(pick=lab.some(0))
    assert measured <= predicted <= 1.01 * measured


class Residual(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8, **settings)

    def forward(self, x):
        return x + self.last(F.relu(self.norm(self.first(x)), inplace=True))


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_batch_norm_moves_its_statistics_once(lab, settings) -> None:
    images = torch.randn(2, 8, 12, 12)
    case = lab.Case(lambda: nn.Sequential(Residual(**settings), Residual(**settings)), batch=images)

    assert case.differences(steps=6) == []
    assert case.differences(lab.MODULE, steps=3) == []


class Graph(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.edges = torch.eye(64).to_sparse()

    def forward(self, x):
        return F.gelu(torch.sparse.mm(self.edges, F.gelu(self.layer(x)))) * x


def test_sparse_arguments_are_looked_up_and_never_remembered(lab) -> None:
    def step(model, batch):
        model.steps = getattr(model, "steps", 0) + 1
        for block in model.blocks:
            block.edges = (torch.eye(64) * (1 + model.steps // 5)).to_sparse()
        loss = lab.mean_square(model, batch)
        loss.backward()
        return [loss]

    case = lab.Case(lambda: lab.Stack([Graph(lab.WIDTH) for _ in range(2)]), step=step)

    assert case.differences() == []


def test_embedding_that_writes_its_weight_is_replayed(lab) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, lab.WIDTH, max_norm=0.5)
            self.last = nn.Linear(lab.WIDTH, lab.WIDTH)

        def forward(self, x):
            rows = (x.detach() * 10).long()[:, 0] % 50
            return self.last(F.gelu(self.table(rows) + x))

    case = lab.Case(lambda: lab.Stack([Lookup(), Lookup()]))

    assert case.differences(steps=6) == []
    assert case.differences(lab.MODULE, steps=6) == []


def test_autograd_gets_a_tensor_of_its_own_and_ops_the_one_that_is_there() -> None:
    held = torch.arange(6.0).view(2, 3)

    for base, look in ((held, held), (held, held.t()), (held, held[1])):
        ref = look_at(look)
        given = ref.anew(base)
        assert (ref.of(base) is base) == (look is held)
        assert given is not base and torch.equal(given, look)
        assert given.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    ref.anew(held).requires_grad_()
    assert not held.requires_grad
