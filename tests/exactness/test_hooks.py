"""The user's hooks fire as often as before, see what they saw, and change what they changed."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrize

STEPS = 7
CHANGE_AT = 5


def residual(self, x):
    return x + self.b(functional.dropout(functional.gelu(self.norm(self.a(x))), 0.1))


class Log(list):
    """What hooks saw, as numbers."""

    def add(self, *tensors):
        self.append(tuple(float(t.detach().double().sum()) for t in tensors if t is not None))


def forward_hooks(model, log):
    return [
        model.blocks[0].a.register_forward_hook(lambda m, args, out: log.add(args[0], out)),
        model.blocks[0].register_forward_hook(lambda m, args, out: log.add(args[0], out)),
        model.blocks[1].b.register_forward_hook(lambda m, args, out: out * 1.1),
        model.blocks[1].register_forward_hook(lambda m, args, out: torch.tanh(out)),
    ]


def pre_hooks(model, log):
    def with_keywords(module, args, kwargs):
        log.add(args[0])
        return (args[0] * 0.9,), kwargs

    return [
        model.blocks[0].register_forward_pre_hook(with_keywords, with_kwargs=True),
        model.blocks[1].a.register_forward_pre_hook(with_keywords, with_kwargs=True),
        model.blocks[1].norm.register_forward_pre_hook(lambda m, args: (args[0].sin(),)),
        model.blocks[0].norm.register_forward_pre_hook(lambda m, args: log.add(args[0])),
    ]


def backward_hooks(model, log):
    return [
        model.blocks[0].a.register_full_backward_hook(lambda m, gi, go: log.add(*gi, *go)),
        model.blocks[0].register_full_backward_hook(lambda m, gi, go: log.add(*gi, *go)),
        model.blocks[1].b.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)),
        model.blocks[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2.0,)),
        model.blocks[1].norm.register_full_backward_pre_hook(lambda m, go: (go[0] * 1.5,)),
        model.blocks[0].register_full_backward_pre_hook(lambda m, go: log.add(*go)),
    ]


def parameter_hooks(model, log):
    return [
        model.blocks[0].a.weight.register_hook(lambda grad: grad * 0.5),
        model.blocks[1].b.bias.register_hook(lambda grad: log.add(grad)),
        model.blocks[1].a.weight.register_post_accumulate_grad_hook(
            lambda parameter: log.add(parameter.grad)
        ),
    ]


def global_hooks(model, log):
    def count(module, args, out=None):
        log.append(type(module).__name__)

    return [
        register_module_forward_pre_hook(count),
        register_module_forward_hook(count),
        register_module_full_backward_hook(lambda m, gi, go: log.add(*go)),
    ]


def global_hook_that_changes(model, log):
    def change(module, args, out):
        return out * 1.25 if isinstance(module, nn.LayerNorm) else None

    return [register_module_forward_hook(change)]


KINDS = [
    forward_hooks,
    pre_hooks,
    backward_hooks,
    parameter_hooks,
    global_hooks,
    global_hook_that_changes,
]


def hooked_step(add, *, start=0, stop=STEPS):
    """A step with hooks that are there from one step on, up to another."""

    def step(model, optimizer, batch, index):
        log = Log()
        handles = add(model, log) if start <= index < stop else []
        try:
            loss = model(batch).pow(2).mean()
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        optimizer.step()
        return [loss, tuple(log)]

    return step


# Torch says so of backward hooks on a module whose input wants no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.parametrize("add", KINDS, ids=lambda add: add.__name__)
@pytest.mark.parametrize(
    "when", [{}, {"start": CHANGE_AT}, {"stop": CHANGE_AT}], ids=["always", "added", "removed"]
)
def test_hooks(lab, add, when):
    case = lab.Case(lambda: lab.stack_of(residual), whole_step=hooked_step(add, **when))
    lab.check_same(case, ways=["replay, all dropped", "module"], steps=STEPS)


def test_hooks_that_stay(lab):
    def make():
        model = lab.stack_of(residual)
        model.log = Log()
        for add in (forward_hooks, pre_hooks, backward_hooks, parameter_hooks):
            add(model, model.log)
        return model

    def step(model, batch):
        model.log.clear()
        loss = lab.mean_square(model, batch)
        loss.backward()
        return [loss, tuple(model.log)]

    lab.check_same(lab.Case(make, step=step))


def test_hooks_on_tensors_between_and_inside_blocks(lab):
    log = Log()

    def body(self, x):
        hidden = functional.gelu(self.a(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 0.5)
            hidden.register_hook(lambda grad: log.add(grad))
        return x + self.b(torch.tanh(hidden))

    def step(model, batch):
        log.clear()
        x = model.first(batch)
        x.register_hook(lambda grad: grad + 0.01)
        for block in model.blocks:
            x = block(x)
            x.retain_grad()
        loss = x.pow(2).mean()
        loss.backward()
        return [loss, x.grad, tuple(log)]

    case = lab.Case(lambda: lab.stack_of(body), step=step)
    lab.check_same(case, ways=["replay, all dropped", "replay, some dropped"], steps=STEPS)


def test_a_hook_that_raises_leaves_the_next_step_right(lab):
    def refuse(module, args, out):
        raise ValueError("not today")

    def step(model, optimizer, batch, index):
        if index in (2, 5):
            for where in (model.blocks[1].a, model.blocks[1]):
                handle = where.register_forward_hook(refuse)
                with pytest.raises(ValueError, match="not today"):
                    model(batch)
                handle.remove()
            handle = model.blocks[0].b.register_full_backward_hook(refuse)
            with pytest.raises(ValueError, match="not today"):
                model(batch).pow(2).mean().backward()
            handle.remove()
            optimizer.zero_grad(set_to_none=True)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=["replay, all dropped", "module"], steps=STEPS)


def test_the_optimizer_runs_inside_backward(lab):
    """Each parameter is stepped, and its gradient let go, as soon as it is there."""

    def make():
        model = lab.stack_of(residual, 3)
        for parameter in model.parameters():
            own = torch.optim.SGD([parameter], lr=0.05)

            def hook(parameter, own=own):
                own.step()
                own.zero_grad(set_to_none=True)

            parameter.register_post_accumulate_grad_hook(hook)
        return model

    def step(model, optimizer, batch, index):
        loss = model(batch).pow(2).mean()
        loss.backward()
        return [loss]

    lab.check_same(lab.Case(make, whole_step=step), ways=["replay, all dropped", "module"])


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: clip_grad_norm_(parameters, 0.01),
        lambda parameters: clip_grad_norm_(parameters, 0.01, norm_type=float("inf")),
        lambda parameters: clip_grad_value_(parameters, 1e-4),
    ],
    ids=["norm", "largest", "value"],
)
def test_gradients_are_clipped(lab, clip):
    def step(model, optimizer, batch, index):
        loss = model(batch).pow(2).mean()
        loss.backward()
        norm = clip(model.parameters())
        optimizer.step()
        return [loss, norm]

    lab.check_same(lab.Case(lambda: lab.stack_of(residual), whole_step=step))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, weight):
        return weight * self.scale


def test_parametrized_weights(lab):
    def change(block):
        parametrize.register_parametrization(block.a, "weight", Symmetric())
        parametrize.register_parametrization(block.a, "weight", Scaled())

    lab.check_same(lab.Case(lambda: lab.stack_of(residual, change=change)), steps=STEPS)


def test_a_parametrization_added_and_removed_while_training(lab):
    def step(model, optimizer, batch, index):
        if index == 3:
            parametrize.register_parametrization(model.blocks[0].a, "weight", Symmetric())
        if index == 6:
            parametrize.remove_parametrizations(model.blocks[0].a, "weight")
        loss = model(batch).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            with torch.no_grad():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        return [loss]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=["replay, all dropped", "module"], steps=9)


def test_parametrized_weights_cached_over_the_step(lab):
    def change(block):
        parametrize.register_parametrization(block.a, "weight", Symmetric())

    def loss(model, batch):
        with parametrize.cached():
            return model(batch).pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(residual, change=change), loss=loss)
    lab.check_same(case, steps=STEPS)
