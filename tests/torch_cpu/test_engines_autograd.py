"""Every way to ask autograd for gradients works on a fitted model, or says why it cannot."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ENGINES = ["REPLAY", "MODULE"]


def body(s, x):
    return x + s.b(F.gelu(s.a(x)))


def twice(model, batch):
    loss = model(batch).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def double_backward(model, batch):
    batch = batch.clone().requires_grad_()
    loss = model(batch).pow(2).mean()
    (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
    (slope.pow(2).sum() + loss).backward()
    return [loss, slope, batch.grad]


def some_gradients(model, batch):
    loss = model(batch).pow(2).mean()
    return [loss, *torch.autograd.grad(loss, [model.blocks[1].a.weight])]


def accumulate(model, batch):
    losses = [model(batch * factor).pow(2).mean() for factor in (1, 2)]
    for loss in losses:
        loss.backward()
    return losses


def forget_one(model, batch):
    model(batch)
    return twice(model, batch)


def evaluate_between(model, batch):
    model.eval()
    with torch.no_grad():
        seen = model(batch)
    model.train()
    return [seen, *twice(model, batch)]


def update_in_backward(model, batch):
    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    loss = model(batch).pow(2).mean()
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [loss, *model.parameters()]


def other_parameters(model, batch):
    others = {name: p * 1.5 for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, (batch,)).pow(2).mean()
    loss.backward()
    return [loss]


def functional_gradient(model, batch):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (batch,)).pow(2).mean()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def change_the_output(model, batch):
    for block in model.blocks:
        batch = block(batch).mul_(1.1).add_(0.1)
    loss = batch.pow(2).mean()
    loss.backward()
    return [loss]


def user_hooks(model, batch):
    seen = []
    first, second = model.blocks
    hooks = [
        first.a.register_forward_hook(lambda module, args, out: out * 1.5),
        first.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        second.a.register_full_backward_hook(lambda module, _, out: seen.append(out[0].sum())),
        second.b.weight.register_hook(lambda gradient: gradient * 2),
    ]
    loss = model(batch).pow(2).mean()
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [loss, *seen]


STEPS = [
    *(twice, double_backward, some_gradients, accumulate, forget_one, evaluate_between),
    *(update_in_backward, other_parameters, functional_gradient, change_the_output, user_hooks),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_way_to_run_backward_gives_the_same_bits(lab, step, engine) -> None:
    case = lab.Case(lambda: lab.stack_of(body), step=step)

    assert case.differences(getattr(lab, engine), steps=6) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_in_a_block_leaves_no_trace(lab, engine) -> None:
    fails = []

    def sometimes(s, x):
        h = s.a(x).exp()
        if fails:
            raise ValueError
        return x + s.b(h.tanh())

    def step(model, batch):
        fails.append(True)
        with pytest.raises(ValueError):
            model(batch)
        fails.clear()
        return twice(model, batch)

    case = lab.Case(lambda: lab.stack_of(sometimes), step=step)

    assert case.differences(getattr(lab, engine)) == []


def test_a_weight_changed_before_backward_is_an_error_as_in_autograd(lab) -> None:
    model, applied = lab.Case(lambda: lab.stack_of(body)).fitted(pick=lambda c: c[:1])
    loss = model(lab.rows()).pow(2).mean()
    with torch.no_grad():
        model.blocks[0].b.weight.add_(1)

    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()
    applied.remove()


def test_an_input_changed_after_the_block_is_planned_around(lab) -> None:
    def adds(s, x):
        return s.b(F.gelu(x + 1))

    def loss(model, batch):
        first, second = model.blocks
        hidden = first.a(batch)
        out = first(hidden)
        hidden.mul_(2)
        return (second(hidden) + out).pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(adds), loss=loss)

    assert case.differences() == []


def test_a_block_called_three_times_and_without_gradients_first(lab) -> None:
    def loss(model, batch):
        block = model.blocks[0]
        with torch.no_grad():
            target = block(batch)
        return (block(block(block(batch))) - target).pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(body), loss=loss)

    assert case.differences() == []
    predicted, measured = case.peaks()
    assert measured <= predicted <= 1.01 * measured


class Checkpointed(nn.Module):
    def __init__(self, blocks, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = blocks, reentrant

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_its_blocks_stays_right(lab, reentrant) -> None:
    batch = lab.rows().requires_grad_()
    case = lab.Case(lambda: Checkpointed(lab.stack_of(body).blocks, reentrant), batch=batch)

    assert case.differences(steps=4) == []
    predicted, measured = case.peaks()
    assert measured <= 1.1 * predicted, "what the checkpoint drops must stay dropped"


class Result:
    def __init__(self, hidden, extra) -> None:
        self.hidden, self.extra = hidden, extra


def test_blocks_may_return_anything(lab) -> None:
    def returns(s, x, kind):
        h = F.gelu(s.a(x))
        y = s.b(h)
        return {
            "dict": {"y": y, "x": x, "view": x.view(-1), "none": None},
            "object": Result(y, h.sum()),
            "nothing": None,
        }[kind]

    def loss(model, batch):
        first, second = model.blocks
        out = first(batch, kind="dict")
        hidden = out["y"] + out["x"] + out["view"].view_as(batch)
        result = second(hidden, kind="object")
        assert second(hidden, kind="nothing") is None
        return result.hidden.pow(2).mean() + result.extra * 1e-3

    case = lab.Case(lambda: lab.stack_of(returns), loss=loss)

    assert case.differences() == []


def test_shared_layers_and_own_forwards_of_a_sequential_are_respected(lab) -> None:
    class Skip(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    def make():
        shared = nn.GELU()
        return nn.Sequential(
            *(nn.Linear(48, 48), shared, nn.Linear(48, 48), shared, nn.Linear(48, 48)),
            Skip(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48)),
        )

    def step(model, batch):
        loss = model(input=batch).pow(2).mean()
        loss.backward()
        return [loss]

    assert lab.Case(make).differences() == []
    layers = lab.Case(
        lambda: nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 48)), step=step
    )
    assert layers.differences() == []


def test_threads_do_not_disturb_one_another(lab) -> None:
    case = lab.Case(lambda: lab.stack_of(body))
    model, applied = case.fitted()

    def gradients(model, results, number):
        for _ in range(6):
            loss = model(case.batch * (number + 1)).pow(2).mean()
            found = torch.autograd.grad(loss, [block.a.weight for block in model.blocks])
            results[number] = [lab.bits(gradient) for gradient in found]

    def run(model):
        results = {}
        threads = [threading.Thread(target=gradients, args=(model, results, n)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert run(model) == run(case.fresh())
    applied.remove()


def test_what_is_read_before_a_write_and_never_asked_for_can_be_made_again(lab) -> None:
    def body(block, x):
        y = block.a(x)
        (y * block.scale).sin()
        y.add_(1)
        return y.sin() * block.b(x).tanh()

    def change(block) -> None:
        block.register_buffer("scale", torch.rand(lab.WIDTH))

    assert lab.Case(lambda: lab.stack_of(body, change=change)).differences() == []
