"""Kept values that wait on the host: they come back as they were, or autograd's error comes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

writes = SimpleNamespace(first=None, how="")


def written_inside(self, x):
    hidden = torch.tanh(self.a(x))
    out = self.b(hidden)
    if writes.first is self and writes.how == "inside":
        hidden.add_(1.0)
    if writes.first is self and writes.how == "as data":
        hidden.data.add_(1.0)
    return out


def returned(self, x):
    return torch.tanh(self.a(x))


class Written(nn.Module):
    """The output of the first block is written once it has left the device."""

    def __init__(self, stack):
        super().__init__()
        self.first, self.blocks = stack.first, stack.blocks

    def forward(self, x):
        x = self.first(x)
        outs = []
        for block in self.blocks:
            outs.append(block(x))
            x = outs[-1] * 1.0
        if writes.first is not None and writes.how == "outside":
            with torch.no_grad():
                outs[0].add_(1.0)
        return x


@pytest.fixture(autouse=True)
def written_by_nobody():
    yield
    writes.first, writes.how = None, ""


def kept(candidates):
    """Drop nothing."""
    return ()


def gradients(lab, model, batch):
    model.zero_grad()
    lab.mean_square(model, batch).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("how", ["inside", "outside"])
@pytest.mark.parametrize("num_warm", [0, 6])
def test_a_write_after_the_save_raises_as_in_autograd(lab, how, num_warm) -> None:
    body = written_inside if how == "inside" else returned
    case = lab.Case(lambda: Written(lab.stack_of(body, 3)))
    model, applied = case.fitted(lab.REPLAY, kept, offloads=True)
    for _ in range(num_warm):
        gradients(lab, model, case.batch)

    for trained in (case.fresh(), model):
        writes.first, writes.how = trained.blocks[0], how
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
            gradients(lab, trained, case.batch)
    applied.remove()


def test_a_write_past_autograd_counts_as_it_does_untouched(lab) -> None:
    case = lab.Case(lambda: Written(lab.stack_of(written_inside, 3)))
    plain = case.fresh()
    model, applied = case.fitted(lab.REPLAY, kept, offloads=True)
    for step in range(4):
        found = []
        for trained in (plain, model):
            writes.first, writes.how = trained.blocks[0], "as data" if step == 3 else ""
            found.append(gradients(lab, trained, case.batch))
        assert all(map(torch.equal, *found))
    applied.remove()


def test_conjugates_come_back_from_the_host(lab) -> None:
    def spectral(self, x):
        spectrum = torch.fft.fft(self.a(x)).conj()
        return x + self.b((spectrum * spectrum.conj() * spectrum).real.tanh())

    case = lab.Case(lambda: lab.stack_of(spectral, 3))
    expected = case.train(case.fresh(), 4)
    model, applied = case.fitted(lab.REPLAY, kept, offloads=True)
    got = case.train(model, 4)
    applied.remove()
    assert lab.different(expected, got) == []
