"""Memory stays flat, step after step, without the garbage collector."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from leanstep.ir import Engine

STEPS = 50
ENGINES = [Engine.REPLAY, Engine.MODULE]


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def live_storages():
    """How many tensors the interpreter knows, and the bytes of what they hold."""
    seen = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter):
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return len(seen), sum(seen.values())


def allocated(lab):
    if lab.DEVICE == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return live_storages()


def check_flat(lab, make, engine, step=None):
    """Train for a while; what is held after the tenth step is what is held after the last."""
    case = lab.Case(make)
    model, applied = case.fitted(engine)
    optimizer = case.make_optimizer(model)
    levels = []
    for index in range(STEPS):
        if step is None:
            lab.mean_square(model, case.batch).backward()
        else:
            step(model, case.batch, index)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if index in (9, 29, STEPS - 1):
            levels.append(allocated(lab))
    applied.remove()
    assert levels[0] == levels[1] == levels[2]


def with_dropout(self, x):
    return x + self.b(functional.dropout(functional.gelu(self.a(x)), 0.2))


def with_statistics(self, x):
    return x + self.b(torch.relu_(self.norm(self.a(x))))


def with_routing(self, x):
    rows = torch.nonzero(x[:, 0] > 0)[:, 0]
    return x.index_add(0, rows, self.b(functional.gelu(self.a(x[rows]))))


def with_closure(self, x):
    scale = [2.0]
    act = lambda hidden: functional.gelu(hidden) * scale[0]  # noqa: E731
    return x + self.b(act(self.a(x)))


def batch_norm(lab):
    def change(block):
        block.norm = nn.BatchNorm1d(lab.WIDTH)

    return change


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize(
    "body", [with_dropout, with_statistics, with_routing, with_closure], ids=lambda b: b.__name__
)
def test_memory_is_flat(lab, engine, body):
    change = batch_norm(lab) if body is with_statistics else lambda block: None
    check_flat(lab, lambda: lab.stack_of(body, change=change), engine)


class Stop(Exception):
    """Something goes wrong in the middle of forward."""


def in_the_middle(self, x):
    hidden = functional.gelu(self.a(x))
    if self.fails:
        raise Stop
    return x + self.b(torch.tanh(hidden))


def raising_step(model, batch, index):
    model.blocks[1].fails = index % 2 == 0
    try:
        model(batch).pow(2).mean().backward()
    except Stop:
        model.blocks[1].fails = False


def sizes_step(model, batch, index):
    model(batch[: 64 - 7 * (index % 9)]).pow(2).mean().backward()


def forward_alone(model, batch, index):
    model(batch)
    if index % 3 == 0:
        model(batch).pow(2).mean().backward()


def backward_twice(model, batch, index):
    loss = model(batch).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_alone(model, batch, index):
    inner = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inner).sum(), inner, create_graph=True)
    gradient.pow(2).mean().backward()


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize(
    "step",
    [raising_step, sizes_step, forward_alone, backward_twice, gradients_alone],
    ids=lambda step: step.__name__,
)
def test_memory_is_flat_in_unusual_loops(lab, engine, step):
    def change(block):
        block.fails = False

    # Torch keeps a graph through the second derivative in a circle, with or without a plan.
    if step is gradients_alone:
        gc.enable()
    check_flat(lab, lambda: lab.stack_of(in_the_middle, change=change), engine, step)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_loss_kept_for_the_log_holds_no_activations(lab, engine):
    """After backward a loss that is not detached holds what eager's holds: next to nothing."""
    case = lab.Case(lambda: lab.stack_of(with_dropout))
    model, applied = case.fitted(engine)
    log, inputs = [], []
    hook = model.blocks[1].register_forward_pre_hook(
        lambda module, args: inputs.append(weakref.ref(args[0].untyped_storage()))
    )
    for _ in range(10):
        loss = lab.mean_square(model, case.batch)
        loss.backward()
        log.append(loss)
        del loss
        model.zero_grad(set_to_none=True)
        assert inputs[-1]() is None
    hook.remove()
    applied.remove()


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_no_circle_holds_a_tensor(lab, engine):
    case = lab.Case(lambda: lab.stack_of(with_dropout))
    model, applied = case.fitted(engine)
    for _ in range(8):
        lab.mean_square(model, case.batch).backward()
        model.zero_grad(set_to_none=True)
    gc.collect()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(8):
            lab.mean_square(model, case.batch).backward()
            model.zero_grad(set_to_none=True)
        gc.collect()
        found = [type(thing) for thing in gc.garbage if issubclass(type(thing), torch.Tensor)]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
    assert not found
    applied.remove()


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_replaced_block_and_a_removed_plan_let_go(lab, engine):
    case = lab.Case(lambda: lab.stack_of(with_dropout))
    model, applied = case.fitted(engine)
    for _ in range(6):
        lab.mean_square(model, case.batch).backward()
    old = weakref.ref(model.blocks[0].a.weight)
    model.blocks[0].a = nn.Linear(lab.WIDTH, lab.WIDTH).to(lab.DEVICE)
    for _ in range(6):
        lab.mean_square(model, case.batch).backward()
    gc.collect()
    assert old() is None
    applied.remove()
    gone = weakref.ref(model)
    del model, applied
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_fitted_model_goes_when_its_user_lets_go_of_it(lab, engine):
    case = lab.Case(lambda: lab.stack_of(with_dropout))
    model, applied = case.fitted(engine)
    for _ in range(6):
        lab.mean_square(model, case.batch).backward()
    gone = [weakref.ref(part) for part in (*model.modules(), *model.parameters())]
    del model, applied
    gc.collect()
    assert not [part() for part in gone if part() is not None]
