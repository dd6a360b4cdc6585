"""Autocast in all its places, scaled gradients, and other types than float32."""

import pytest
import torch
from torch import nn
from torch.nn import functional

TYPES = [torch.bfloat16, torch.float16]


def body(self, x):
    return x + self.b(functional.gelu(self.a(self.norm(x))))


def under(lab, dtype, **settings):
    return torch.autocast(lab.DEVICE, dtype, **settings)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_autocast_around_forward(lab, dtype, cache_enabled):
    def loss(model, batch):
        with under(lab, dtype, cache_enabled=cache_enabled):
            return model(batch).float().pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss))


def test_autocast_around_backward_too(lab):
    def step(model, batch):
        with under(lab, torch.bfloat16):
            loss = model(batch).float().pow(2).mean()
            loss.backward()
        return [loss]

    def loss(model, batch):
        with under(lab, torch.bfloat16):
            return model(batch).float().pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss, step=step))


def test_autocast_entered_in_the_models_forward(lab):
    class Inside(lab.Stack):
        def forward(self, x):
            with under(lab, torch.bfloat16):
                return super().forward(x).float()

    lab.check_same(lab.Case(lambda: Inside([lab.Block(body) for _ in range(2)])))


def test_autocast_entered_in_a_block(lab):
    def inside(self, x):
        with under(lab, torch.bfloat16):
            h = functional.gelu(self.a(x))
        return x + self.b(h.float())

    lab.check_same(lab.Case(lambda: lab.stack_of(inside)))


def test_autocast_around_some_blocks_only(lab):
    class Some(lab.Stack):
        def forward(self, x):
            for index, block in enumerate(self.blocks):
                with under(lab, torch.bfloat16, enabled=index % 2 == 0):
                    x = block(x).float()
            return x

    lab.check_same(lab.Case(lambda: Some([lab.Block(body) for _ in range(4)])))


def test_an_island_of_full_precision(lab):
    def island(self, x):
        h = self.a(x)
        with under(lab, torch.bfloat16, enabled=False):
            h = functional.softmax(self.norm(h.float()) @ self.b.weight, -1)
        return x + self.b(h)

    def loss(model, batch):
        with under(lab, torch.bfloat16):
            return model(batch).float().pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(island), loss=loss))


def test_nested_autocast_of_two_types(lab):
    def nested(self, x):
        with under(lab, torch.float16):
            h = torch.tanh(self.a(x))
        return x + self.b(h)

    def loss(model, batch):
        with under(lab, torch.bfloat16):
            return model(batch).float().pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(nested), loss=loss))


def calls_of_one_block(model, batch):
    block = model.blocks[0]
    return block(block(block(batch)))


def calls_of_tied_blocks(model, batch):
    return model.blocks[1](model.blocks[0](batch))


def weights_before_the_block(model, batch):
    # The first use of a weight casts it for all: here outside every block.
    return calls_of_tied_blocks(model, model.blocks[0].a(batch))


def weights_after_the_block(model, batch):
    return functional.linear(calls_of_tied_blocks(model, batch), model.blocks[1].a.weight)


@pytest.mark.parametrize(
    "forward",
    [calls_of_one_block, calls_of_tied_blocks, weights_before_the_block, weights_after_the_block],
    ids=lambda forward: forward.__name__,
)
@pytest.mark.parametrize("cache_enabled", [True, False])
def test_weights_that_are_cast_once_for_several_uses(lab, forward, cache_enabled):
    def make():
        model = lab.stack_of(body)
        model.blocks[1].a.weight = model.blocks[0].a.weight
        model.blocks[0].b.weight = nn.Parameter(model.blocks[0].b.weight.detach().clone())
        return model

    def loss(model, batch):
        with under(lab, torch.bfloat16, cache_enabled=cache_enabled):
            return forward(model, batch).float().pow(2).mean()

    lab.check_same(lab.Case(make, loss=loss))


def test_several_batches_in_one_region(lab):
    """From the second on the weights are cast already; the recordings must not mix."""

    def loss(model, batch):
        with under(lab, torch.bfloat16):
            return model(batch).float().pow(2).mean()

    def step(model, batch):
        with under(lab, torch.bfloat16):
            losses = [model(part).float().pow(2).mean() for part in batch.split([32, 16, 16])]
        for one in losses:
            one.backward()
        return losses

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss, step=step))


def test_convolutions_with_batch_norm_and_attention(lab):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            x = torch.relu(self.norm(self.convolution(x)))
            rows = x.flatten(2).transpose(1, 2)
            rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
            return rows.transpose(1, 2).reshape(x.shape)

    def loss(model, batch):
        with under(lab, torch.bfloat16):
            return model(batch).float().pow(2).mean()

    def make():
        return nn.Sequential(*(Mixed() for _ in range(2)))

    lab.check_same(lab.Case(make, loss=loss, batch=torch.randn(2, 8, 6, 6)))


@pytest.mark.parametrize("clips", [False, True])
def test_scaled_gradients_with_skipped_steps(lab, clips):
    def loss(model, batch):
        with under(lab, torch.float16):
            return model(batch).float().pow(2).mean()

    scalers = {}

    def whole_step(model, optimizer, batch, index):
        if index == 0:
            scalers[id(model)] = torch.amp.GradScaler(lab.DEVICE, init_scale=2.0**8)
        scaler = scalers[id(model)]
        value = loss(model, batch)
        scaler.scale(value * (1e30 if index == 2 else 1.0)).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return [value, torch.tensor(scaler.get_scale())]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss, whole_step=whole_step))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_whole_models_of_another_type(lab, dtype):
    batch = torch.randn(64, 48).to(dtype)

    def loss(model, batch):
        return model(batch).float().pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body).to(dtype), loss=loss, batch=batch))


def test_float64_as_the_default_type(lab):
    def noisy(self, x):
        return body(self, x) * torch.rand(x.shape, device=x.device) + torch.ones(1, device=x.device)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        lab.check_same(lab.Case(lambda: lab.stack_of(noisy), batch=torch.randn(64, 48)))
    finally:
        torch.set_default_dtype(default)


class Spectral(nn.Module):
    """A layer with complex weights, between Fourier transforms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        places = width // 2 + 1
        self.weight = nn.Parameter(torch.randn(places, places, dtype=torch.complex64) / width)

    def forward(self, x):
        spectrum = torch.fft.rfft(x, dim=1)
        mixed = spectrum @ self.weight
        mixed = mixed * mixed.conj().abs() + spectrum.conj() * 1j
        return torch.fft.irfft(mixed, n=x.shape[1], dim=1).tanh() + mixed.imag.sum() * 1e-4


def test_complex_parameters(lab):
    lab.check_same(lab.Case(lambda: lab.Stack([Spectral(lab.WIDTH) for _ in range(2)])))
