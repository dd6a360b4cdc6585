"""What users do to a fitted model between steps: load, replace, convert, copy, evaluate, export."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS = 8
CHANGE_AT = 5
WAYS = ["replay, all dropped", "module"]


def residual(self, x):
    return x + self.b(functional.dropout(functional.gelu(self.norm(self.a(x))), 0.1))


def other_weights(lab):
    torch.manual_seed(9)
    return lab.stack_of(residual).to(lab.DEVICE).state_dict()


def load(lab, model):
    model.load_state_dict(other_weights(lab))


def load_assigned(lab, model):
    model.load_state_dict(other_weights(lab), assign=True)


def new_parameter(lab, model):
    model.blocks[0].a.weight = nn.Parameter(model.blocks[0].a.weight.detach() * 2)


def new_data(lab, model):
    model.blocks[0].a.weight.data = model.blocks[0].a.weight.data * 2


def transposed_data(lab, model):
    weight = model.blocks[0].a.weight
    weight.data = weight.data.t().contiguous().t()


def double(lab, model):
    model.double()


def replaced_layer(lab, model):
    model.blocks[0].b = nn.Sequential(nn.Linear(lab.WIDTH, lab.WIDTH), nn.Tanh()).to(lab.DEVICE)


def replaced_block(lab, model):
    model.blocks[1] = lab.Block(residual).to(lab.DEVICE)


def removed_block(lab, model):
    del model.blocks[0]


def added_parameter(lab, model):
    model.blocks[0].scale = nn.Parameter(torch.ones(lab.WIDTH, device=lab.DEVICE))
    model.blocks[0].body = lambda self, x: residual(self, x) * self.scale


def added_buffer(lab, model):
    model.blocks[0].register_buffer("shift", torch.ones(lab.WIDTH, device=lab.DEVICE))
    model.blocks[0].body = lambda self, x: residual(self, x) + self.shift


def lost_bias(lab, model):
    model.blocks[0].a.bias = None


def swapped_tensors(lab, model):
    torch.utils.swap_tensors(
        model.blocks[0].b.weight, nn.Parameter(model.blocks[0].a.weight.detach().clone())
    )


def shared_memory(lab, model):
    if lab.DEVICE == "cpu":
        model.share_memory()


def tied(lab, model):
    model.blocks[1].a.weight = model.blocks[0].a.weight


def frozen(lab, model):
    model.blocks[0].requires_grad_(False)


CHANGES = [
    load,
    load_assigned,
    new_parameter,
    new_data,
    transposed_data,
    double,
    replaced_layer,
    replaced_block,
    removed_block,
    added_parameter,
    added_buffer,
    lost_bias,
    swapped_tensors,
    shared_memory,
    tied,
    frozen,
]


# Twice the bytes, and leanstep says so.
@pytest.mark.filterwarnings("ignore:this batch is 2.00 times:UserWarning")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_model_is_changed_between_steps(lab, change):
    def step(model, optimizer, batch, index):
        if index == CHANGE_AT:
            torch.manual_seed(3)
            change(lab, model)
        dtype = next(model.parameters()).dtype
        loss = model(batch.to(dtype)).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        model_gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [loss, *model_gradients]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=STEPS)


def one_more(model):
    model.insert(4, nn.Linear(len(model[0].bias), len(model[0].bias)).to(model[0].bias.device))


def the_last_ones_less(model):
    del model[-2:]


def one_in_the_middle_less(model):
    del model[4]


SEQUENTIAL_CHANGES = [one_more, the_last_ones_less, one_in_the_middle_less]


@pytest.mark.parametrize("change", SEQUENTIAL_CHANGES, ids=lambda change: change.__name__)
def test_a_sequential_gets_longer_or_shorter_between_steps(lab, change):
    def step(model, optimizer, batch, index):
        if index == CHANGE_AT:
            torch.manual_seed(3)
            change(model)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    def make():
        pairs = [(nn.Linear(lab.WIDTH, lab.WIDTH), nn.GELU(), nn.Tanh()) for _ in range(4)]
        return nn.Sequential(*[layer for pair in pairs for layer in pair])

    lab.check_same(lab.Case(make, whole_step=step), ways=WAYS, steps=STEPS)


def test_averages_and_copies_beside_the_training(lab):
    def step(model, optimizer, batch, index):
        if index == 0:
            model.average = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))]
            model.teacher = [copy.deepcopy(model)]
        loss = model(batch).pow(2).mean()
        with torch.no_grad():
            target = model.teacher[0](batch)
        loss = loss + functional.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
        model.average[0].update_parameters(model)
        with torch.no_grad():
            for old, new in zip(model.teacher[0].parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return [loss, *model.average[0].parameters(), model.average[0](batch)]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=6)


def test_averaged_weights_swapped_in_for_validation(lab):
    def step(model, optimizer, batch, index):
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        own = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        model.eval()
        with torch.inference_mode():
            found = model(batch).sum().item()
        model.train()
        with torch.no_grad():
            for parameter, kept in zip(model.parameters(), own, strict=True):
                parameter.copy_(kept)
        return [loss, found]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=6)


def no_grad(model, batch):
    with torch.no_grad():
        return model(batch)


def inference(model, batch):
    with torch.inference_mode():
        return model(batch).clone()


def with_gradients(model, batch):
    batch = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(batch).sum(), batch)
    return gradient


def half_way(model, batch):
    """A forward in training mode that nobody takes backward."""
    model.train()
    return model(batch * 2)


@pytest.mark.parametrize(
    "evaluate", [no_grad, inference, with_gradients, half_way], ids=lambda e: e.__name__
)
def test_evaluation_between_steps(lab, evaluate):
    def step(model, optimizer, batch, index):
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        model.eval()
        out = evaluate(model, batch[:7])
        model.train()
        return [loss, out.detach()]

    def change(block):
        block.norm = nn.BatchNorm1d(lab.WIDTH)

    case = lab.Case(lambda: lab.stack_of(residual, change=change), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=6)


def test_evaluation_between_forward_and_backward(lab):
    def step(model, optimizer, batch, index):
        loss = model(batch).pow(2).mean()
        model.eval()
        with torch.no_grad():
            found = model(batch[:5])
        model.train()
        loss.backward()
        optimizer.step()
        return [loss, found]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=6)


def test_a_model_called_with_other_parameters(lab):
    def step(model, optimizer, batch, index):
        inner = {name: p * 0.9 for name, p in model.named_parameters()}
        loss = functional_call(model, inner, (batch,)).pow(2).mean()
        loss = loss + model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return [loss]

    case = lab.Case(lambda: lab.stack_of(residual), whole_step=step)
    lab.check_same(case, ways=WAYS, steps=6)


class Plain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(functional.gelu(self.a(x)))


def saved(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["REPLAY", "MODULE"])
def test_a_fitted_model_is_exported_as_the_untouched_one(lab, way):
    from leanstep.ir import Engine

    case = lab.Case(lambda: lab.Stack([Plain(lab.WIDTH) for _ in range(2)]))
    untouched = case.fresh()
    model, applied = case.fitted(getattr(Engine, way))
    case.train(untouched, 4)
    case.train(model, 4)
    batch = case.batch[:3]
    expected = untouched(batch)

    assert list(saved(model)) == list(saved(untouched))
    assert all(
        torch.equal(a, b)
        for a, b in zip(saved(model).values(), saved(untouched).values(), strict=True)
    )
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.jit.trace(model, batch, check_trace=False),
        torch.jit.trace(model.eval(), batch),
        torch.export.export(model, (batch,)).module(),
        torch.fx.symbolic_trace(model),
    ]
    for other in copies:
        assert torch.equal(other(batch), expected)
    assert torch.equal(torch.func.vmap(model)(batch[None])[0], expected)
    applied.remove()


def replica_of(module):
    """A shallow copy as DataParallel makes one: parameters are plain attributes of it."""
    replica = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter.view_as(parameter))
    for name, child in module._modules.items():
        replica._modules[name] = replica_of(child)
    return replica


def test_replicas_of_a_fitted_model(lab):
    case = lab.Case(lambda: lab.Stack([Plain(lab.WIDTH) for _ in range(2)]))
    untouched = case.fresh()
    model, applied = case.fitted()
    for which in (untouched, model):
        for _ in range(6):
            replica_of(which)(case.batch).pow(2).mean().backward()
            which(case.batch).pow(2).mean().backward()
    for old, new in zip(untouched.parameters(), model.parameters(), strict=True):
        assert torch.equal(old.grad, new.grad)
    applied.remove()
