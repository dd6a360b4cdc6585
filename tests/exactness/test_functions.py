"""Custom autograd functions, with all that they may do to what they are given."""

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Swish(Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, slope):
        x, gate = ctx.saved_tensors
        return slope * (gate + x * gate * (1 - gate))


class KeepsAttributes(Function):
    @staticmethod
    def forward(ctx, x, power, name):
        ctx.tensor, ctx.power, ctx.name = x.detach().exp(), power, name
        ctx.mark_non_differentiable(empty := torch.zeros(0, device=x.device))
        return x.pow(power), empty, name

    @staticmethod
    def backward(ctx, slope, *_):
        return slope * ctx.power + ctx.tensor * 0.1, None, None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.clamp_(min=0.0).mul_(2.0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return slope * (x > 0) * 2.0


class Ranked(Function):
    """Several outputs, one of which has no gradient."""

    @staticmethod
    def forward(ctx, x):
        values, places = x.sort(1)
        ctx.mark_non_differentiable(places)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    @once_differentiable
    def backward(ctx, slope, _):
        (places,) = ctx.saved_tensors
        return None if slope is None else torch.zeros_like(slope).scatter_(1, places, slope)


class Quantized(Function):
    """Forward in eight bits, gradient straight through; packs what it saves."""

    @staticmethod
    def forward(ctx, x):
        scale = x.detach().abs().amax() / 127
        small = (x / scale).round().to(torch.int8)
        ctx.save_for_backward(small, scale)
        return small.to(x.dtype) * scale

    @staticmethod
    def backward(ctx, slope):
        small, scale = ctx.saved_tensors
        return slope + small.to(slope.dtype) * scale * 1e-3


class WithSetup(Function):
    @staticmethod
    def forward(x, weight):
        return torch.tanh(x) * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx, slope):
        x, weight, output = ctx.saved_tensors
        gate = torch.tanh(x)
        return slope * weight * (1 - gate * gate), (slope * gate).sum(0) + output.mean() * 0


class Recomputes(Function):
    """A checkpoint by hand: backward runs forward again with gradients."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.run(x)
        torch.autograd.backward(out, slope)
        return None, x.grad


class Reversed(Function):
    """Gradient reversal; returns a view of its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, slope):
        return -slope


class Noisy(Function):
    @staticmethod
    def forward(ctx, x):
        noise = torch.empty_like(x).bernoulli_(0.7)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx, slope):
        (noise,) = ctx.saved_tensors
        return slope * noise


class Nothing(Function):
    """Saves an output, an input it changed, and a tensor that is neither."""

    @staticmethod
    def forward(ctx, x, other):
        out = x + other
        between = (out * 2).cos()
        ctx.save_for_backward(out, other, between, None)
        return out

    @staticmethod
    def backward(ctx, slope):
        out, other, between, nothing = ctx.saved_tensors
        assert nothing is None
        return slope * between, slope * torch.tanh(out) * other


USES = {
    "saves": lambda self, h: Swish.apply(h),
    "attributes": lambda self, h: KeepsAttributes.apply(h, 2, "name")[0],
    "in place": lambda self, h: InPlace.apply(h * 1.0),
    "several outputs": lambda self, h: Ranked.apply(h)[0] + Ranked.apply(h)[1],
    "packed": lambda self, h: Quantized.apply(h),
    "setup": lambda self, h: WithSetup.apply(h, self.norm.weight),
    "recomputes": lambda self, h: Recomputes.apply(lambda x: torch.tanh(self.a(x)), h),
    "a view": lambda self, h: torch.tanh(Reversed.apply(h)) + h,
    "noise": lambda self, h: Noisy.apply(h),
    "what is neither input nor output": lambda self, h: Nothing.apply(h, self.norm(h)),
}


@pytest.mark.parametrize("use", USES)
def test_custom_functions(lab, use):
    def body(self, x):
        return x + self.b(torch.tanh(USES[use](self, self.a(x))))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))


@pytest.mark.parametrize("use", ["saves", "setup", "a view", "what is neither input nor output"])
def test_gradients_of_gradients_of_custom_functions(lab, use):
    def body(self, x):
        return x + self.b(torch.tanh(USES[use](self, self.a(x))))

    def step(model, batch):
        batch = batch.clone().requires_grad_()
        out = model(batch)
        (slope,) = torch.autograd.grad(out.sum(), batch, create_graph=True)
        loss = out.mean() + (slope.norm(2, dim=1) - 1).pow(2).mean()
        loss.backward()
        return [loss, slope]

    lab.check_same(lab.Case(lambda: lab.stack_of(body), step=step))


def test_a_function_around_a_block(lab):
    """The block runs inside a function's forward, without gradients, and again in its backward."""

    def body(self, x):
        return x + self.b(torch.tanh(self.a(x)))

    def loss(model, batch):
        hidden = model.first(batch)
        for block in model.blocks:
            hidden = Recomputes.apply(block, hidden)
        return hidden.pow(2).mean()

    lab.check_same(lab.Case(lambda: lab.stack_of(body), loss=loss))


def test_a_function_that_makes_its_result_in_numpy(lab):
    class Cubed(Function):
        @staticmethod
        def forward(ctx, x):
            host = x.detach().cpu().numpy()
            ctx.save_for_backward(torch.from_numpy(host * host).to(x.device))
            return torch.from_numpy(host**3).to(x.device)

        @staticmethod
        def backward(ctx, slope):
            (square,) = ctx.saved_tensors
            return slope * square * 3

    def body(self, x):
        return x + self.b(torch.tanh(Cubed.apply(self.a(x))))

    lab.check_same(lab.Case(lambda: lab.stack_of(body)))
