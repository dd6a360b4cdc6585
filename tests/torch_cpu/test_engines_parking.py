"""Kept values that wait on the host: they come back as they were, or autograd's error comes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from leanstep.engines import lanes, parking

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


def test_what_never_comes_to_backward_leaves_nothing_behind(lab) -> None:
    case = lab.Case(lambda: lab.stack_of(written_inside, 3))
    model, applied = case.fitted(lab.REPLAY, kept, offloads=True)
    lot = applied.rounds.lot
    for _ in range(3 * parking._MANY_WAITING):
        lab.mean_square(model, case.batch)
        assert not any(known() for waiting in lot._coming.values() for known in waiting)
    assert all(len(waiting) < 2 * parking._MANY_WAITING for waiting in lot._coming.values())
    for number in range(1, 9):
        lab.mean_square(model, lab.rows()[: 4 * number]).backward()
    (lane,) = lot._lanes.values()
    assert len(lane._spare) == 1, "buffers of other sizes are given back"
    applied.remove()


class Stream:
    """Stands for a stream of a GPU: the events that it has waited for, and that are in it."""

    current = None

    def __init__(self, device=None):
        self.past = set()

    def wait_stream(self, other):
        self.past |= other.past

    def wait_event(self, event):
        self.past |= event

    def record_event(self):
        self.past |= {object()}
        return frozenset(self.past)

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.before


@pytest.fixture
def lane(monkeypatch):
    """A lane of a GPU that is not there; its memory notes the stream it is taken on."""
    taken_on = []
    empty = torch.empty

    def taken(*sizes, pin_memory=False, **looks):
        if sizes != (0,):
            taken_on.append("host" if pin_memory else Stream.current)
        return empty(*sizes, **looks)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    found = lanes.Lane(torch.device("cpu"), Stream())
    found.taken_on = taken_on
    monkeypatch.setattr(torch, "empty", taken)
    return found


@pytest.mark.parametrize("is_asked", [True, False])
def test_all_memory_is_the_main_stream_s_wherever_it_is_let_go(lane, is_asked) -> None:
    saved = torch.arange(8.0)
    parked = lanes.Parked(lane, saved, group=0)
    with Stream():
        lanes.send([parked])
        assert not parked.leaving <= lane._main.past
        leaving = parked.leaving
        parked.leave()
        assert leaving <= lane._main.past
        lanes.fetch([parked])
        coming, host = parked.coming, parked.host
        assert leaving < coming and not coming <= lane._main.past
        if is_asked:
            assert torch.equal(parked.storage("it").view(torch.float32), saved)
            assert coming <= lane._main.past
        del parked
    assert coming <= lane._main.past
    assert lane.taken_on == ["host", lane._main]

    again = lanes.Parked(lane, saved, group=0)
    lanes.send([again])
    assert again.host is host and coming <= again.leaving, "the last reader was waited for"


def test_what_is_let_go_together_is_waited_for_once(lane) -> None:
    """An event each would cost the CPU more than some copies cost the link."""
    groups = {0: 1, 1: 3, 2: 1}
    parked = [lanes.Parked(lane, torch.arange(8.0) + n, group=g) for n, g in groups.items()]
    lanes.send(parked)
    first, second, third = (one.leaving for one in parked)
    assert first is third, "of one group: the event is behind the last of it"
    assert second is not first


def test_storages_leave_in_the_order_of_the_plan_and_come_back_the_other_way_round(lane) -> None:
    """A call saves in an order of its own; whoever the plan has first must not wait for others."""
    ranks = [(1, 2), (1, 0), (1, 1)]
    parked = [
        lanes.Parked(lane, torch.arange(8.0), group=number, rank=rank)
        for number, rank in enumerate(ranks)
    ]
    lanes.send(parked)
    assert parked[1].leaving < parked[2].leaving < parked[0].leaving
    for one in parked:
        one.leave()
    lanes.fetch(parked)
    assert parked[0].coming < parked[2].coming < parked[1].coming
