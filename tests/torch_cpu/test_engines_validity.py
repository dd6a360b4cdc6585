"""Calls that look alike but are not: a recording is never used where it does not hold."""

import gc
import importlib
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F

from leanstep.engines.reach import Executed, Watched

SCALE = 1.0


def gated(s, q, kv):
    return s.b(F.gelu(s.a(q)) * torch.sigmoid(s.a(kv)))


def self_attending(model, batch):
    hidden = batch
    for block in model.blocks:
        hidden = block(hidden, hidden)
    return hidden.pow(2).mean()


def counted(step):
    """A training step that knows its number."""

    def run(model, batch):
        model.steps = getattr(model, "steps", -1) + 1
        loss = step(model, batch, model.steps)
        loss.backward()
        return [loss]

    return run


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def test_two_arguments_that_were_one_tensor_are_told_apart(lab) -> None:
    @counted
    def step(model, batch, number):
        hidden = batch
        for block in model.blocks:
            hidden = block(hidden, hidden if number < 5 else hidden + 1)
        return hidden.pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(gated), loss=self_attending, step=step)

    assert case.differences() == []


def test_an_argument_that_was_a_parameter_is_told_apart(lab) -> None:
    @counted
    def step(model, batch, number):
        hidden = batch[:48]
        for block in model.blocks:
            hidden = block(hidden, block.a.weight if number < 5 else torch.ones(48, 48))
        return hidden.pow(2).mean()

    def loss(model, batch):
        hidden = batch[:48]
        for block in model.blocks:
            hidden = block(hidden, block.a.weight)
        return hidden.pow(2).mean()

    case = lab.Case(lambda: lab.stack_of(gated), loss=loss, step=step)

    assert case.differences() == []


def test_an_attribute_that_becomes_another_view_is_seen(lab) -> None:
    def change(block):
        block.rows = torch.randn(5, 48)
        block.row = block.rows[0]

    @counted
    def step(model, batch, number):
        for block in model.blocks:
            block.row = block.rows[number // 5]
        return lab.mean_square(model, batch)

    def body(s, x):
        return s.b(F.gelu(s.a(x) * s.row))

    case = lab.Case(lambda: lab.stack_of(body, change=change), step=step)

    assert case.differences() == []
    assert case.differences(pick=lambda candidates: candidates[:1]) == []
    assert case.differences(pick=lambda candidates: candidates[1:]) == []


def test_settings_of_an_object_and_items_of_a_list_are_seen(lab) -> None:
    class Settings:
        scale = 0.0

    def change(block):
        block.settings, block.factors = Settings(), [1.0]
        block.settings.scale = 1.0

    @counted
    def step(model, batch, number):
        for block in model.blocks:
            block.settings.scale = 1.0 + number // 5
            block.factors[0] = 1.0 + number // 7
        return lab.mean_square(model, batch)

    def body(s, x):
        return s.b(F.gelu(s.a(x) * s.settings.scale * s.factors[0]))

    case = lab.Case(lambda: lab.stack_of(body, change=change), step=step)

    assert case.differences() == []


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(48, 48), torch.nn.Linear(48, 48)

    def forward(self, x):
        return self.b(F.gelu(self.a(x) * SCALE))


def test_a_global_number_that_forward_names_is_seen(lab) -> None:
    @counted
    def step(model, batch, number):
        global SCALE
        SCALE = 1.0 + number // 5
        return lab.mean_square(model, batch)

    case = lab.Case(lambda: lab.Stack([Scaled(), Scaled()]), step=step)

    assert case.differences() == []


def test_a_counter_in_the_block_is_seen(lab) -> None:
    def change(block):
        block.calls = 0

    def body(s, x):
        s.calls += 1
        return s.b(F.gelu(s.a(x) * (1 + 0.1 * s.calls)))

    case = lab.Case(lambda: lab.stack_of(body, change=change))

    assert case.differences() == []
    assert case.differences(lab.MODULE) == []


def test_a_hook_that_replaces_another_is_seen(lab) -> None:
    @counted
    def step(model, batch, number):
        factor = 1.0 + number // 5
        hook = model.blocks[0].a.register_forward_hook(lambda module, args, out: out * factor)
        loss = lab.mean_square(model, batch)
        hook.remove()
        return loss

    case = lab.Case(lambda: lab.stack_of(lambda s, x: s.b(F.gelu(s.a(x)))), step=step)

    assert case.differences() == []


def test_alike_calls_run_by_the_recording(lab) -> None:
    from leanstep.engines.attach import runner_of

    case = lab.Case(lambda: lab.stack_of(lambda s, x: s.b(F.gelu(s.a(x)[:, torch.arange(48)]))))
    model, applied = case.fitted()
    case.train(model, 9)

    replayer = runner_of(model.blocks[0]).replays[0]

    assert replayer.reused >= 4
    applied.remove()


def test_calls_that_draw_run_by_the_recording(lab) -> None:
    from leanstep.engines.attach import runner_of

    case = lab.Case(lambda: lab.stack_of(lambda s, x: s.b(F.dropout(s.a(x), 0.1))))
    model, applied = case.fitted()
    case.train(model, 9)

    assert runner_of(model.blocks[0]).replays[0].reused >= 4
    applied.remove()


def test_what_an_import_runs_is_not_taken_for_the_block_s_code(tmp_path, monkeypatch) -> None:
    (tmp_path / "leanstep_lazy.py").write_text("def made():\n    return 1\n\nNUMBER = made()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "leanstep_lazy", raising=False)

    def forward(hidden):
        importlib.import_module("leanstep_lazy")
        return hidden

    executed = Executed()
    first = Watched(executed, torch.nn.Identity(), forward)
    first(torch.ones(1))
    assert not first.is_seen
    assert not executed.codes
    second = Watched(executed, torch.nn.Identity(), forward)
    second(torch.ones(1))
    assert second.is_seen
    assert [code.co_name for code in executed.codes] == ["forward"]


def test_what_the_garbage_collector_calls_is_not_taken_for_the_block_s_code() -> None:
    def timed():
        return 1

    def collecting(phase, info):
        timed()

    def forward(hidden):
        gc.collect()
        return hidden

    gc.callbacks.append(collecting)
    executed = Executed()
    try:
        Watched(executed, torch.nn.Identity(), forward)(torch.ones(1))
    finally:
        gc.callbacks.remove(collecting)

    assert [code.co_name for code in executed.codes] == ["forward"]


class Act(torch.nn.Module):
    def scale(self, hidden):
        return hidden * 1.0

    def forward(self, hidden):
        return torch.tanh(self.scale(hidden))


class HalvedAct(Act):
    def scale(self, hidden):
        return hidden * 0.5


def patch_method(model, patch):
    patch.setattr(Act, "scale", lambda self, hidden: hidden * 0.5)


def change_classes(model, patch):
    for block in model.blocks:
        block.act.__class__ = HalvedAct


@pytest.mark.parametrize("change", [patch_method, change_classes])
def test_other_methods_in_the_place_of_those_recorded(lab, monkeypatch, change) -> None:
    def with_act(self, x):
        return x + self.b(self.act(self.a(x)))

    case = lab.Case(lambda: lab.stack_of(with_act, 2, lambda b: setattr(b, "act", Act())))
    seen = []
    for model, applied in ((case.fresh(), None), case.fitted()):
        with monkeypatch.context() as patch:
            warm = case.train(model, 11)
            change(model, patch)
            seen.append([*warm, *case.train(model, 3)])
        if applied is not None:
            applied.remove()
    assert lab.different(*seen) == []
