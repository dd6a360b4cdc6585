"""In-place ops and views, inside blocks and across their borders."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from leanstep.ir import Engine


def relu_inside(self, x):
    return x + self.b(functional.relu(self.a(x), inplace=True))


def chain_inside(self, x):
    h = self.a(x).mul_(1.5).add_(0.1).tanh_()
    h = (h * 0.5).sigmoid_()
    return self.b(h)


def residual_in_place(self, x):
    out = self.b(functional.gelu(self.a(x)))
    out += x
    return out.relu_()


def index_put(self, x):
    h = self.a(x)
    h[torch.arange(0, 64, 2, device=x.device)] = x[1::2]
    h[:, 3] = 0.5
    return self.b(torch.tanh(h))


def accumulated_index_put(self, x):
    rows = torch.tensor([0, 1, 1, 2], device=x.device)
    h = torch.zeros_like(x).index_put_((rows,), self.a(x)[:4], accumulate=True)
    return self.b(torch.tanh(h + x))


def masked_fill(self, x):
    h = self.a(x)
    h = h.masked_fill_(h.detach() > 0.5, 0.0)
    return self.b(h.exp_())


def slices_of_zeros(self, x):
    out = torch.zeros(64, 96, device=x.device)
    out[:, :48] = self.a(x)
    out[:, 48:].copy_(torch.tanh(x))
    return self.b(out[:, 24:72].sigmoid())


def slices_of_empty(self, x):
    out = torch.empty(64, 96, device=x.device)
    out[:, :48] = self.a(x)
    out[:, 48:] = x
    return self.b(torch.tanh(out).view(64, 2, 48).sum(1))


def scatter_in_place(self, x):
    places = torch.arange(48, device=x.device).flip(0).expand(64, 48)
    return self.b(torch.tanh(x.clone().scatter_add_(1, places, self.a(x))))


def written_through_a_view(self, x):
    h = torch.sigmoid(self.a(x))
    h = h * 1.0
    h.view(-1)[:100].mul_(2)
    h.t()[3].zero_()
    return self.b(torch.tanh(h))


def out_argument(self, x):
    with torch.no_grad():
        scale = torch.empty(48, device=x.device)
        torch.amax(x, 0, out=scale)
        scale.abs_().add_(1.0)
    return self.b(torch.tanh(self.a(x) / scale))


def saved_then_written_elsewhere(self, x):
    h = self.a(x)
    kept = torch.tanh(h)
    h = h * kept
    h[::2] = h[1::2].clone()
    return self.b(h) + kept


def input_in_place(self, x):
    x.mul_(1.1)
    return self.b(torch.tanh(self.a(x)))


def input_in_place_after_use(self, x):
    y = self.b(torch.tanh(x + 1.0))
    x.add_(y.detach())
    return torch.tanh(y) + x


def input_in_place_returned(self, x):
    return x.add_(self.b(torch.tanh(self.a(x + 0.0))))


def swaps_data(self, x):
    h = self.a(x)
    h.data = h.data * 2.0
    return self.b(torch.tanh(h))


def written_by_data(self, x):
    h = torch.tanh(self.a(x))
    h.data.clamp_(-0.5, 0.5)
    return self.b(h)


def foreach_in_place(self, x):
    parts = [self.a(x) * 1.0, x * 2.0]
    torch._foreach_mul_(parts, 0.5)
    torch._foreach_add_(parts, 0.1)
    return self.b(torch.tanh(parts[0]) * parts[1])


BODIES = [
    *(relu_inside, chain_inside, residual_in_place, index_put, accumulated_index_put),
    *(masked_fill, slices_of_zeros, slices_of_empty, scatter_in_place, written_through_a_view),
    *(out_argument, saved_then_written_elsewhere, swaps_data, written_by_data, foreach_in_place),
]
ON_INPUT = [input_in_place, input_in_place_after_use, input_in_place_returned]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_in_place_inside_a_block(lab, body):
    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


REPLAY = ["replay, all dropped", "replay, some dropped", "plan at the floor"]


@pytest.mark.parametrize("body", ON_INPUT, ids=lambda body: body.__name__)
def test_a_block_that_writes_its_input(lab, body):
    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


def identity(self, x):
    self.b(torch.tanh(self.a(x)))
    return x


def returns_view(self, x):
    return self.b(torch.tanh(self.a(x))).t().contiguous().t()


def view_of_input(self, x):
    return x.view(-1).view_as(x)


def detached_input(self, x):
    return x.detach() * 0.5 + self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("body", [identity, returns_view, view_of_input, detached_input])
def test_a_block_that_returns_its_input_or_a_view(lab, body):
    lab.check_same(lab.Case(lambda: lab.stack_of(body, 3)))


def halves(self, x):
    return self.b(torch.tanh(self.a(x))).chunk(2, dim=1)


def whole_and_view(self, x):
    h = self.b(torch.tanh(self.a(x)))
    return h, h[:, :24], x[:, 24:]


def listed(self, x):
    return list(torch.tanh(self.a(x)).unbind(0))


def transposed_and_expanded(self, x):
    h = self.b(torch.tanh(self.a(x)))
    return h.t(), h[:, :1].expand(64, 48), x


def parts(self, x):
    return self.b(torch.tanh(self.a(x))).split([8, 40], dim=1)


def joined(out):
    if len(out) == 64:
        return torch.stack(out)
    if len(out) == 2:
        return torch.cat(out, 1)
    if out[0].shape == (48, 64):
        return out[0].t() * out[1] + out[2]
    return torch.cat(out[1:], 1) * out[0]


@pytest.mark.parametrize(
    "body",
    [halves, whole_and_view, listed, transposed_and_expanded, parts],
    ids=lambda body: body.__name__,
)
def test_views_across_borders(lab, body):
    def loss(model, batch):
        for block in model.blocks:
            batch = joined(block(batch))
        return batch.pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss))


def plain(self, x):
    return self.b(functional.gelu(self.a(x)))


def ends_in_relu(self, x):
    return functional.relu(self.b(torch.tanh(self.a(x))))


CALLERS = {
    "relu": lambda x, out: out.relu_(),
    "added": lambda x, out: out.add_(x),
    "input added to": lambda x, out: x.clone().add_(out),
    "slice": lambda x, out: out[:, :4].zero_() is not None and out,
    "dropout": lambda x, out: functional.dropout(out, 0.2, inplace=True),
    "past autograd": lambda x, out: out.data.mul_(0.5) is not None and out,
}


@pytest.mark.parametrize("caller", CALLERS)
def test_outputs_written_by_the_caller(lab, caller):
    def loss(model, batch):
        for block in model.blocks:
            batch = CALLERS[caller](batch, block(batch))
        return batch.pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(plain, 3), loss=loss))


def test_an_input_written_by_the_caller_after_the_block(lab):
    def body(self, x):
        return self.b(functional.gelu(x + 1))

    def loss(model, batch):
        first, second = model.blocks
        hidden = first.a(batch)
        out = first(hidden)
        hidden.mul_(2)
        return (second(hidden) + out).pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss), ways=REPLAY)


@pytest.mark.parametrize("way", ["REPLAY", "MODULE"])
def test_an_input_written_after_the_block_against_the_plan_is_an_error(lab, way):
    def body(self, x):
        return self.b(functional.gelu(x + 1))

    model, applied = lab.Case(lambda: lab.stack_of(body)).fitted(getattr(Engine, way))
    for _ in range(4):
        hidden = model.first(lab.rows().to(lab.DEVICE)) * 1.0
        loss = model.blocks[1](hidden).pow(2).mean()
        hidden.mul_(2)
        with pytest.raises(RuntimeError, match=r"changed\s+in place|modified by an inplace"):
            loss.backward()
    applied.remove()


class Cached(nn.Module):
    """Attention over keys and values that earlier calls wrote to one preallocated tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, cache, place):
        rows = len(x)
        cache[place * rows : (place + 1) * rows] = self.key(x).detach()
        seen = cache[: (place + 1) * rows].clone()
        return x + functional.softmax(self.query(x) @ seen.t(), 1) @ seen


def test_two_blocks_that_share_a_preallocated_cache(lab):
    def loss(model, batch):
        cache = torch.zeros(3 * len(batch), lab.WIDTH, device=batch.device)
        for place, block in enumerate(model.blocks):
            batch = block(batch, cache, place)
        return batch.pow(2).mean() + cache.mean()

    def make():
        return lab.Stack([Cached(lab.WIDTH) for _ in range(3)])

    lab.check_same(lab.Case(make, loss=loss), ways=REPLAY)


def test_a_cache_that_gradients_flow_through(lab):
    def body(self, x, cache, place):
        cache = cache.clone()
        cache[place] = self.a(x)
        return self.b(torch.tanh(cache.sum(0))), cache

    def loss(model, batch):
        cache = torch.zeros(3, *batch.shape, device=batch.device)
        for place, block in enumerate(model.blocks):
            batch, cache = block(batch, cache, place)
        return batch.pow(2).mean() + cache.pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body, 3), loss=loss))


def test_a_cache_that_gets_a_history_does_not_outlive_the_graph(lab):
    """It leads back to the call that read it: held as it is, it would hold itself."""

    def body(self, x, cache):
        return self.b(torch.tanh(self.a(x) + cache.sum(0)))

    def empty():
        return torch.zeros(2, 64, 48, device=lab.DEVICE)

    def loss(model, batch):
        return sum(block(batch, empty()).mean() for block in model.blocks)

    model, applied = lab.Case(lambda: lab.stack_of(body), loss=loss).fitted()
    gc.disable()
    try:
        for _ in range(4):
            cache = empty()
            alive = weakref.ref(cache.untyped_storage())
            cache[0] = model.blocks[0](lab.rows().to(lab.DEVICE), cache)
            del cache
            assert alive() is None
    finally:
        gc.enable()
    applied.remove()


def test_a_scratch_tensor_that_blocks_write_in_turn(lab):
    """What is computed from it must not be rebuilt from what is there later."""

    def body(self, x):
        (scratch,) = self.scratch
        scratch.copy_(self.a(x).detach())
        scratch.sigmoid_()
        return self.b(torch.tanh(x * (scratch * 2.0)))

    def make():
        scratch = torch.zeros(64, 48, device=lab.DEVICE)

        def change(block):
            block.scratch = [scratch]

        return lab.stack_of(body, 3, change=change)

    lab.check_same(lab.Case(make))


def test_memory_that_is_written_behind_torchs_back(lab):
    """As Triton kernels and extensions do: an empty tensor comes out full."""

    def filled(x):
        out = torch.empty_like(x)

        if x.device.type == "cpu":
            out.detach().numpy()[:] = x.detach().numpy() * 0.5
        else:
            out.untyped_storage().copy_((x.detach() * 0.5).untyped_storage())
        return out

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = filled(x)
            ctx.save_for_backward(out)
            return out * out

        @staticmethod
        def backward(ctx, slope):
            (out,) = ctx.saved_tensors
            return slope * out

    def body(self, x):
        return self.b(torch.tanh(Halved.apply(self.a(x))))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))
