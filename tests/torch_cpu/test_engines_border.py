"""A block's output can be dropped: same numbers, and the memory that was predicted."""

import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import different

import leanstep
from leanstep import models
from leanstep.engines.apply import apply
from leanstep.engines.border import Border
from leanstep.engines.context import Context
from leanstep.errors import PlanError
from leanstep.ir import Decision, Engine, Identity, Plan, Profile
from leanstep.planner.options import foreign_readers
from leanstep.rebuild.block import views_of
from leanstep.simulator import simulate, static_bytes
from leanstep.step.training import TrainingStep
from leanstep.truth import peak_rise_bytes, resident_bytes


def make_plan(profile: Profile, drops: list[set[int]], takes: list[bool]) -> Plan:
    decisions = []
    views = views_of(profile.graph, profile.blocks)
    for view, dropped, border_in in zip(views, drops, takes, strict=True):
        block, keys = view.block, tuple(view.storage_key(number) for number in sorted(dropped))
        name = block.path, block.occurrence, block.children
        engine = Engine.REPLAY if keys or border_in else Engine.UNTOUCHED
        decisions.append(Decision(*name, engine, keys, 0, 0, 0.0, "", border_in=border_in))
    return Plan("test", 1 << 40, 0, 0, 0, 1.0, 0.0, 0.0, tuple(decisions), Identity(""), "")


def careful_plan(profile: Profile, inside: bool, borders: bool = True) -> Plan:
    """Drop what the planner may: no border that is rebuilt from one that is gone too."""
    views = views_of(profile.graph, profile.blocks)
    shared = set(foreign_readers(views))
    drops, takes, gone = [], [], frozenset()
    for view in views:
        takes.append(bool(gone))
        dropped = set(view.candidates) - shared if inside else set()
        both = dropped.union(view.borders if borders else ())
        is_early = bool(gone & view.reads_input_early(both))
        gone = frozenset() if is_early or not borders else frozenset(view.borders)
        drops.append(dropped | gone)
    plan = make_plan(profile, drops, takes)
    return dataclasses.replace(plan, peak_bytes=simulate(profile, plan).peak_bytes)


def careless_plan(profile: Profile) -> Plan:
    """Drop everything, and all that one call reads of another whether or not it can be rebuilt."""
    views = views_of(profile.graph, profile.blocks)
    shared = set(foreign_readers(views))
    drops = [set(view.candidates) | (shared & view.own_storages) for view in views]
    assert any(drops)
    return make_plan(profile, drops, [True] * len(views))


def differences(case, plan: Plan, steps: int = 6) -> list[str]:
    expected = case.train(case.fresh(), steps)
    model = case.fresh()
    applied = apply(model, plan)
    got = case.train(model, steps)
    applied.remove()
    return different(expected, got)


def normed(s, x):
    return s.norm(x + s.b(F.gelu(s.a(x))))


def random_normed(s, x):
    return s.norm(x + F.dropout(s.b(F.gelu(s.a(x))), 0.2))


def written(s, x):
    out = s.norm(s.b(F.relu(s.a(x))))
    out += x
    return out.relu_()


def residual(s, x):
    out = s.norm(s.b(F.relu(s.a(x))))
    out += x
    return out


def summed(s, x):
    return x + s.b(F.gelu(s.a(x)))


def viewed(s, x):
    return s.norm(s.b(F.gelu(s.a(x.t().contiguous().t())))).t().contiguous().t()


def random_output(s, x):
    return F.dropout(s.b(F.gelu(s.a(x))), 0.5)


def overwrites_input(s, x):
    return s.norm(s.b(F.gelu(s.a(x.mul_(1.5)))) + x)


def overwrites_input_unseen(s, x):
    x.data.mul_(1.5)
    return s.norm(s.b(F.gelu(s.a(x))))


def saves_before_overwriting(s, x):
    y = s.norm(s.b(F.gelu(s.a(x * 1.0))))
    x.add_(y.detach())
    return s.norm(x * y)


BODIES = [
    *(normed, random_normed, written, residual, summed, viewed, random_output),
    *(overwrites_input, overwrites_input_unseen, saves_before_overwriting),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_dropped_outputs_come_back_with_the_same_bits(lab, body) -> None:
    case = lab.Case(lambda: lab.stack_of(body, 4))

    assert differences(case, careless_plan(case.profile()), steps=9) == []


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
    first = torch.autograd.grad(loss, [model.blocks[2].a.weight], retain_graph=True)
    return [loss, *first, *torch.autograd.grad(loss, [model.blocks[0].a.weight])]


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


def change_the_outputs(model, batch):
    for block in model.blocks:
        batch = block(batch).mul_(1.1).add_(0.1)
    loss = batch.pow(2).mean()
    loss.backward()
    return [loss]


def transform_the_outputs(model, batch):
    for block in model.blocks:
        batch = block(batch.roll(1, 0))
    loss = batch.pow(2).mean()
    loss.backward()
    return [loss]


def use_every_output(model, batch):
    outputs = [batch]
    for block in model.blocks:
        outputs.append(block(outputs[-1]))
    loss = sum(out.sigmoid().pow(2).mean() for out in outputs)
    loss.backward()
    return [loss, *outputs]


def call_in_another_order(model, batch):
    for block in [*model.blocks[::-1], model.blocks[0]]:
        batch = block(batch)
    loss = batch.pow(2).mean()
    loss.backward()
    return [loss]


def one_output_for_two(model, batch):
    first, second, third, fourth = model.blocks
    hidden = first(batch)
    loss = (fourth(second(hidden)) * third(hidden)).mean()
    loss.backward()
    return [loss]


def mixed_precision(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch).float().pow(2).mean()
    loss.backward()
    return [loss]


def backward_under_autocast(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch).float().pow(2).mean()
        loss.backward()
    return [loss]


STEPS = [
    *(twice, double_backward, some_gradients, accumulate, forget_one, evaluate_between),
    *(change_the_outputs, transform_the_outputs, use_every_output, call_in_another_order),
    *(one_output_for_two, mixed_precision, backward_under_autocast),
]


@pytest.mark.parametrize("body", [random_normed, residual], ids=lambda body: body.__name__)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_way_to_run_backward_gives_the_same_bits(lab, step, body) -> None:
    case = lab.Case(lambda: lab.stack_of(body, 4), step=step)

    assert differences(case, careless_plan(case.profile())) == []


class TwoOutputs(nn.Module):
    """A block that takes and returns a pair, both dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, pair):
        x, y = pair
        return F.gelu(self.a(x)), F.gelu(self.b(y) + x)


class Pairs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoOutputs(width) for _ in range(4))

    def forward(self, x):
        pair = (x, x)
        for block in self.blocks:
            pair = block(pair)
        return pair[0] * pair[1]


class Convolutions(nn.Module):
    """Residual blocks with batch norm, written in place."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
            self.norm, self.last = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

        def forward(self, x):
            out = self.last(self.two(F.relu(self.norm(self.one(x)), inplace=True)))
            out += x
            return F.relu(out, inplace=True)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Repeated(nn.Module):
    """One block, called four times."""

    def __init__(self, block: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.block, self.last = block, last

    def forward(self, x):
        for _ in range(4):
            x = self.block(x)
        return self.last(x)


def frozen(model: nn.Module) -> nn.Module:
    for parameter in model.blocks[:2].parameters():
        parameter.requires_grad_(False)
    return model


def model_cases(lab) -> dict:
    images = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0))

    def repeated():
        return Repeated(lab.Block(random_normed), lab.Block(random_normed))

    def sequential():
        kinds = [lambda: nn.Linear(lab.WIDTH, lab.WIDTH), nn.GELU, nn.Tanh] * 4
        return nn.Sequential(*(make() for make in kinds))

    return {
        "a pair": lab.Case(lambda: Pairs(lab.WIDTH)),
        "batch norm": lab.Case(lambda: Convolutions(8), batch=images),
        "repeated": lab.Case(repeated),
        "sequential": lab.Case(sequential),
        "frozen": lab.Case(lambda: frozen(lab.stack_of(random_normed, 4))),
    }


@pytest.mark.parametrize("name", ["a pair", "batch norm", "repeated", "sequential", "frozen"])
def test_any_model_keeps_its_bits(lab, monkeypatch, name) -> None:
    case = model_cases(lab)[name]
    rebuilt, rebuild = [], Border.tensor
    monkeypatch.setattr(Border, "tensor", lambda self: rebuilt.append(1) or rebuild(self))

    assert differences(case, careless_plan(case.profile()), steps=9) == []
    assert rebuilt


@pytest.mark.parametrize("engine", [Engine.UNTOUCHED, Engine.MODULE])
def test_a_border_that_nobody_takes_is_kept(lab, engine) -> None:
    case = lab.Case(lambda: lab.stack_of(random_normed, 4))
    plan = careless_plan(case.profile())
    others = [
        dataclasses.replace(d, engine=engine, drop=(), border_in=False) if place % 2 else d
        for place, d in enumerate(plan.decisions)
    ]

    assert differences(case, dataclasses.replace(plan, decisions=tuple(others))) == []


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("backward", [True, False], ids=["backward", "no backward"])
@pytest.mark.parametrize("body", [normed, random_normed, written], ids=lambda body: body.__name__)
def test_dropped_outputs_die_in_forward_and_nothing_outlives_the_graph(
    lab, no_collector, body, backward
) -> None:
    case = lab.Case(lambda: lab.stack_of(body, 4))
    model = case.fresh()
    applied = apply(model, careless_plan(case.profile()))
    borders = []
    for block in model.blocks[1:]:
        block.register_forward_pre_hook(
            lambda module, args: borders.append(weakref.ref(args[0].untyped_storage()))
        )

    for _ in range(12):
        loss = lab.mean_square(model, case.batch)
        assert [border() for border in borders] == [None] * 3
        if backward:
            loss.backward()
        del loss
        assert not [found for found in gc.get_objects() if type(found) in (Border, Context)]
        borders.clear()
    applied.remove()


BUILT = {
    "bert-tiny": {"batch": 16, "seq": 64},
    "gpt2-tiny": {"batch": 8, "seq": 64},
    "resnet-tiny": {"batch": 16, "image": 64},
    "unet-tiny": {"batch": 4},
    "seq2seq-tiny": {"batch": 8},
}


def measured_peak(step: TrainingStep, profile: Profile, plan: Plan) -> int:
    applied = apply(step.model, plan)
    step.run()
    rise = peak_rise_bytes(step.run, step.device)
    applied.remove()
    return rise + max(resident_bytes(step), static_bytes(profile))


@pytest.mark.parametrize("inside", [False, True], ids=["borders", "all"])
@pytest.mark.parametrize("name", BUILT)
def test_measured_memory_is_what_was_predicted(name, inside) -> None:
    model, batch, loss, _ = models.build(name, **BUILT[name])
    profile = leanstep.profile(model, batch, loss)
    step = TrainingStep(model, batch, loss)

    plan = careful_plan(profile, inside)
    measured = measured_peak(step, profile, plan)

    assert any(decision.takes_border for decision in plan.decisions)
    assert measured <= plan.peak_bytes <= 1.01 * measured


class Reversed(Pairs):
    """Hands each pair on in the other order."""

    def forward(self, x):
        pair = (x, x)
        for block in self.blocks:
            pair = block(pair[::-1])
        return pair[0] * pair[1]


@pytest.mark.parametrize("inside", [False, True], ids=["borders", "all"])
@pytest.mark.parametrize("name", ["normed", "random_normed", "written", "pairs", "reversed"])
def test_measured_memory_of_small_blocks_is_what_was_predicted(lab, name, inside) -> None:
    bodies = {"normed": normed, "random_normed": random_normed, "written": written}
    pairs = {"pairs": Pairs, "reversed": Reversed}.get(name)
    batch = torch.randn(4096, lab.WIDTH)
    model = lab.stack_of(bodies[name], 4) if pairs is None else pairs(lab.WIDTH)
    profile = leanstep.profile(model, batch, lab.mean_square)

    plan = careful_plan(profile, inside)
    measured = measured_peak(TrainingStep(model, batch, lab.mean_square), profile, plan)

    assert any(decision.takes_border for decision in plan.decisions)
    assert measured <= plan.peak_bytes <= 1.01 * measured


@pytest.mark.parametrize("name", ["bert-tiny", "resnet-tiny"])
def test_dropping_borders_lowers_the_peak(name) -> None:
    model, batch, loss, _ = models.build(name, **BUILT[name])
    profile = leanstep.profile(model, batch, loss)
    step = TrainingStep(model, batch, loss)

    without = measured_peak(step, profile, careful_plan(profile, inside=False, borders=False))
    with_borders = measured_peak(step, profile, careful_plan(profile, inside=False))

    assert with_borders < without
    if name == "bert-tiny":
        # A post-norm output is rebuilt from the sum before it, which is kept: three borders go.
        assert without - with_borders >= 0.95 * 3 * 16 * 64 * 64 * 4


def test_an_output_that_the_next_call_does_not_take_cannot_be_dropped(lab) -> None:
    profile = lab.Case(lambda: lab.stack_of(normed, 3)).profile()
    plan = careful_plan(profile, inside=False)
    kept = [dataclasses.replace(d, border_in=False) for d in plan.decisions]

    with pytest.raises(PlanError, match="which others hold"):
        simulate(profile, dataclasses.replace(plan, decisions=tuple(kept)))


def test_a_border_is_not_rebuilt_from_one_that_is_gone(lab) -> None:
    profile = lab.Case(lambda: lab.stack_of(normed, 3)).profile()

    with pytest.raises(PlanError, match="drop one of them"):
        simulate(profile, careless_plan(profile))
