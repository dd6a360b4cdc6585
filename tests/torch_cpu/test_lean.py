"""Lazy mode: one line, the first step recorded as it runs, the plan in force from the second."""

import copy
import dataclasses
import itertools
import weakref

import pytest
import torch
from torch import Tensor, nn

import leanstep
from leanstep import models
from leanstep.errors import BudgetError, InputError
from leanstep.ir import Category, Graph
from leanstep.recorder import record
from leanstep.recorder.signatures import Signatures
from leanstep.step.state import untouched
from leanstep.step.training import make_step
from leanstep.torch_private.modes import TorchDispatchMode
from leanstep.torch_private.tensors import storage_address, tree_leaves
from leanstep.truth import peak_rise_bytes, resident_bytes

SIZES = {
    "gpt2-tiny": {"batch": 4},
    "bert-tiny": {"batch": 8},
    "resnet-tiny": {"batch": 16, "image": 64, "optimizer": "sgd"},
    "llama-tiny": {"batch": 4},
    "unet-tiny": {"batch": 8},
}


def one_step(model, batch, loss, optimizer) -> Tensor:
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def trained(model, batch, loss, optimizer, steps: int = 5) -> list[Tensor]:
    torch.manual_seed(5)
    seen = []
    for _ in range(steps):
        seen.append(one_step(model, batch, loss, optimizer))
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [buffer.clone() for buffer in model.buffers()]
    return [*seen, torch.get_rng_state()]


def assert_equal(expected: list[Tensor], got: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("name", SIZES)
def test_training_is_bit_equal_from_the_first_step_on(name: str) -> None:
    expected = trained(*models.build(name, **SIZES[name]))
    model, batch, loss, optimizer = models.build(name, **SIZES[name])
    keys = list(model.state_dict())

    lean = leanstep.lean(model, optimizer, budget="90%")

    assert_equal(expected, trained(model, batch, loss, optimizer))
    assert lean.plan is not None and lean.plan.changed
    assert "optimal" in str(lean)
    assert "the first step compared every dropped tensor" in " ".join(str(lean).split())
    assert list(model.state_dict()) == keys
    lean.remove()
    assert not any(type(m).forward.__qualname__.startswith("_make") for m in model.modules())


def without_what_the_loop_decides(graph: Graph) -> Graph:
    """Gradients go when the user's loop lets them go; source lines are the caller's."""
    storages = [
        dataclasses.replace(s, death=0, natural_death=0) if s.category is Category.GRADIENT else s
        for s in graph.storages
    ]
    ops = [dataclasses.replace(op, source="", cost=0) for op in graph.ops]
    return dataclasses.replace(graph, ops=tuple(ops), storages=tuple(storages))


@pytest.mark.parametrize("name", SIZES)
def test_what_is_recorded_with_every_block_recomputed_is_the_untouched_step(name: str) -> None:
    model, batch, loss, optimizer = models.build(name, **SIZES[name])
    step = make_step(model, batch, loss, optimizer)
    one_step(model, batch, loss, optimizer)
    with untouched(step):
        expected = record(step, Signatures())

    lean = leanstep.lean(model, optimizer, budget="100%")
    loss(model, batch).backward()
    optimizer.step()

    assert lean.profile is not None
    got, expected = map(without_what_the_loop_decides, (lean.profile.graph, expected))
    assert got.ops == expected.ops
    assert got.storages == expected.storages
    assert got.saves == expected.saves
    assert got.unpacks == expected.unpacks
    assert got.calls == expected.calls


def test_state_that_the_optimizer_makes_in_the_first_step_counts_from_its_start() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    expected = leanstep.profile(model, batch, loss, optimizer=optimizer)

    lean = leanstep.lean(model, optimizer, budget="100%")
    one_step(model, batch, loss, optimizer)

    assert lean.profile is not None
    assert lean.profile.peak_bytes == expected.peak_bytes
    states = [s for s in lean.profile.graph.storages if s.category is Category.OPTIMIZER_STATE]
    assert states and all(s.birth == -1 for s in states)


class Level(TorchDispatchMode):
    """The most bytes of storages that were alive at once, those of before left out."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor) and storage_address(tensor) not in self._known:
                self._see(tensor, tensor.untyped_storage())
        return out

    def _see(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage_address(tensor), storage.nbytes()

        def died(_: object) -> None:
            del self._known[address]
            self.now -= nbytes

        self._known[address] = weakref.ref(storage, died)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def level_of_a_step(make_lean: bool) -> int:
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8, optimizer="sgd")
    lean = leanstep.lean(model, optimizer, budget="100%") if make_lean else None
    with Level() as level:
        one_step(model, batch, loss, optimizer)
    assert lean is None or lean.plan is not None
    return level.peak


def test_first_step_runs_with_every_block_recomputed() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8, optimizer="sgd")
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer)
    plan = leanstep.plan(profile, "120%", overrides={"layers.*": "recompute"})

    assert level_of_a_step(False) > 0.9 * profile.peak_bytes
    assert level_of_a_step(True) < 1.03 * plan.peak_bytes < 0.6 * profile.peak_bytes


def test_later_steps_stay_within_the_budget() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=8)
    lean = leanstep.lean(model, optimizer, budget="70%")

    one_step(model, batch, loss, optimizer)

    assert lean.plan is not None and lean.profile is not None
    step = make_step(model, batch, loss, optimizer)
    measured = peak_rise_bytes(step.run, step.device) + resident_bytes(step)
    assert measured <= lean.plan.peak_bytes <= lean.plan.budget_bytes
    assert lean.plan.budget_bytes < lean.profile.peak_bytes


def test_accumulated_gradients_are_planned_for() -> None:
    def run(model, batch, loss, optimizer) -> list[Tensor]:
        torch.manual_seed(5)
        seen = []
        for _ in range(3):
            for _ in range(3):
                loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [p.detach().clone() for p in model.parameters()]
        return seen

    expected = run(*models.build("gpt2-tiny"))
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    lean = leanstep.lean(model, optimizer, budget="80%")

    assert_equal(expected, run(model, batch, loss, optimizer))
    assert lean.profile is not None and lean.profile.gradients_kept


def test_without_an_optimizer_the_next_call_ends_the_first_step() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    twin, *_ = models.build("gpt2-tiny")
    lean = leanstep.lean(model, budget="100%", overrides={"layers.*": "recompute"})

    for _ in range(3):
        one_step(model, batch, loss, optimizer)
    assert lean.plan is not None

    torch.manual_seed(5)
    loss(model, batch).backward()
    twin.load_state_dict(model.state_dict())
    torch.manual_seed(5)
    loss(twin, batch).backward()
    assert_equal([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


def test_budget_that_no_plan_fits_is_refused_with_what_is_there() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    classes = [type(m) for m in model.modules()]
    leanstep.lean(model, optimizer, budget=1000)

    with pytest.raises(BudgetError) as caught:
        one_step(model, batch, loss, optimizer)

    assert {"parameter", "gradient", "activation"} & dict(caught.value.breakdown).keys()
    assert sum(dict(caught.value.breakdown).values()) == caught.value.floor_bytes
    assert "There: " in str(caught.value)
    assert [type(m) for m in model.modules()] == classes
    optimizer.zero_grad()
    one_step(model, batch, loss, optimizer)
    lean = leanstep.lean(model, optimizer, budget=caught.value.floor_bytes)
    one_step(model, batch, loss, optimizer)
    assert lean.plan is not None


def test_full_device_is_told_as_a_budget_error_with_what_is_there(monkeypatch) -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    lean = leanstep.lean(model, optimizer, budget="1GiB")
    monkeypatch.setattr(nn.functional, "cross_entropy", no_room)

    with pytest.raises(BudgetError, match="ran out of memory") as caught:
        one_step(model, batch, loss, optimizer)

    assert not caught.value.is_least
    assert dict(caught.value.breakdown)["parameter"] > 0
    lean.remove()


@torch.library.custom_op("leanstep_tests::no_room", mutates_args=())
def no_room_op(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("a full device")


def no_room(x: Tensor, *_: object, **__: object) -> Tensor:
    return no_room_op(x)


def test_evaluation_before_and_an_error_in_forward_do_not_count() -> None:
    expected = trained(*models.build("gpt2-tiny"))
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    lean = leanstep.lean(model, optimizer, budget="80%")

    with torch.no_grad():
        loss(model, batch)
    try:
        loss(model, {**batch, "tokens": batch["tokens"] + 10**6})
    except IndexError:
        assert lean.plan is None
        # Here, while the error is being handled.
        got = trained(model, batch, loss, optimizer)

    assert_equal(expected, got)
    assert lean.plan is not None


def test_a_call_that_was_interrupted_does_not_count() -> None:
    expected = trained(*models.build("gpt2-tiny"))
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    lean = leanstep.lean(model, optimizer, budget="80%")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        loss(model, batch)
    handle.remove()

    assert_equal(expected, trained(model, batch, loss, optimizer))
    assert lean.plan is not None and lean.plan.changed


@pytest.mark.parametrize("when", ["before", "between forward and backward", "after"])
def test_removing_leaves_no_trace(when: str) -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    lean = leanstep.lean(model, optimizer, budget="80%")

    if when != "before":
        value = loss(model, batch)
        if when == "after":
            value.backward()
            optimizer.step()
    lean.remove()

    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    optimizer.zero_grad()
    one_step(model, batch, loss, optimizer)


@pytest.mark.parametrize("when", ["before", "between forward and backward", "after"])
def test_a_deep_copy_knows_nothing_of_it(when: str) -> None:
    """Of the weights' average, say, which is made once or in every step."""
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    lean = leanstep.lean(model, optimizer, budget="80%")
    if when == "before":
        twin = copy.deepcopy(model)
        loss(twin, batch).backward()
        assert lean._first is None
    value = loss(model, batch)
    if when == "between forward and backward":
        twin = copy.deepcopy(model)
    value.backward()
    optimizer.step()
    if when == "after":
        twin = copy.deepcopy(model)

    assert lean.plan is not None and lean.plan.changed
    optimizer.zero_grad()
    twin.load_state_dict(model.state_dict())
    found = []
    for own in (model, twin):
        own.zero_grad()
        torch.manual_seed(5)
        loss(own, batch).backward()
        found.append([p.grad for p in own.parameters()])
    assert_equal(*found)


CLOCK = itertools.count(1)


@torch.library.custom_op("leanstep_tests::moody", mutates_args=())
def moody(x: Tensor) -> Tensor:
    return x * next(CLOCK)


moody.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)


def test_block_that_does_not_repeat_itself_is_refused_before_a_number_is_wrong(lab) -> None:
    def body(block, x):
        return x + block.b(torch.tanh(moody(block.a(x))))

    def make():
        model = lab.stack_of(body, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    lean = leanstep.lean(model, optimizer, budget="100%")
    with pytest.raises(InputError, match=r"blocks\.2 does not repeat itself"):
        one_step(model, lab.rows(), lab.mean_square, optimizer)
    lean.remove()

    model, optimizer = make()
    for block in model.blocks:
        leanstep.keep(block)
    leanstep.lean(model, optimizer, budget="100%")
    one_step(model, lab.rows(), lab.mean_square, optimizer)


class Answering(nn.Module):
    """One that returns a loss of its own beside what it is trained for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        )
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.blocks(x))
        return nn.functional.cross_entropy(logits, labels), logits


def test_a_loss_that_nobody_derives_may_be_held_through_the_step() -> None:
    def run(is_lean: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Answering()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, labels = torch.randn(256, 32), torch.randint(64, (256,))
        lean = leanstep.lean(model, optimizer, budget="90%") if is_lean else None
        for _ in range(3):
            own, logits = model(x, labels)
            logits.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert lean is None or lean.plan.changed
        return [own.detach(), *model.parameters()]

    assert_equal(run(False), run(True))


def test_other_hooks_of_the_optimizer_run_as_before() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny")
    leanstep.lean(model, optimizer, budget="80%")
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    for _ in range(3):
        one_step(model, batch, loss, optimizer)

    assert seen == 3 * ["before", "after"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(48, 48, batch_first=True)
        self.out = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.out(self.cells(x[None])[0][0]))


def test_blocks_that_were_not_recomputed_in_the_first_step_are_not_planned(lab) -> None:
    def make():
        torch.manual_seed(1)
        blocks = [Recurrent() if place == 1 else lab.Block(steady) for place in range(4)]
        model = lab.Stack(blocks)
        return model, lab.rows(), lab.mean_square, torch.optim.SGD(model.parameters(), lr=0.1)

    expected = trained(*make())
    model, batch, loss, optimizer = make()
    lean = leanstep.lean(model, optimizer, budget="100%", overrides={"blocks.*": "recompute"})

    assert_equal(expected, trained(model, batch, loss, optimizer))
    assert lean.plan is not None
    assert [d.path for d in lean.plan.changed] == ["blocks.0", "blocks.2", "blocks.3"]


def steady(block, x):
    return x + block.b(torch.tanh(block.a(x)))


def test_a_model_that_waits_for_its_first_step_is_not_fitted_or_profiled() -> None:
    model, batch, loss, optimizer = models.build("gpt2-tiny", batch=2)
    lazy = leanstep.lean(model, optimizer, budget="100%")

    for call in (leanstep.fit, leanstep.profile):
        with pytest.raises(InputError, match=r"lean waits for this model's first step: call rem"):
            call(model, batch, loss, optimizer=optimizer)

    assert str(lazy) == "leanstep: waiting for the first training step"
    one_step(model, batch, loss, optimizer)
    assert lazy.plan is not None
    lazy.remove()
    leanstep.profile(model, batch, loss, optimizer=optimizer)


def test_unusable_arguments_are_refused_at_once() -> None:
    model, _, _, optimizer = models.build("gpt2-tiny")
    with pytest.raises(InputError, match="budget"):
        leanstep.lean(model, optimizer, budget="many")
    with pytest.raises(InputError, match=r"not a torch\.optim\.Optimizer"):
        leanstep.lean(model, "sgd")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="none of this model's parameters"):
        leanstep.lean(copy.deepcopy(model), optimizer)
