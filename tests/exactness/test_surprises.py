"""Calls that look alike in every respect and are not: the call runs again, recorded.

To bring that about, a function of torch's own is replaced under the block's feet.
"""

import cProfile
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from leanstep.engines.context import ReplayError

STEPS = 9
CHANGE_AT = 6
GELU = functional.gelu


@pytest.fixture(autouse=True)
def torch_as_it_was():
    yield
    functional.gelu = GELU


def short(x):
    """Saves fewer tensors than GELU and what stands beside it."""
    return x * 0.5


def long(x):
    return torch.tanh(torch.sigmoid(x)) * torch.exp(-x)


def other_shape(x):
    return torch.softmax(torch.cat([x, x]), -1)[: len(x)]


def caught(self, x):
    """A block that goes on after any error."""
    try:
        return x + self.b(functional.gelu(self.a(x)))
    except Exception:
        return x + self.b(torch.sigmoid(self.a(x)))


def plain(self, x):
    return x + self.b(functional.gelu(self.a(x)))


def with_dropout(self, x):
    return x + self.b(functional.dropout(functional.gelu(functional.dropout(self.a(x), 0.2)), 0.2))


def step_that_replaces(other):
    def step(model, optimizer, batch, index):
        functional.gelu = GELU if index < CHANGE_AT else other
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        functional.gelu = GELU
        return [loss]

    return step


@pytest.mark.parametrize("body", [plain, with_dropout, caught], ids=lambda body: body.__name__)
@pytest.mark.parametrize("other", [short, long, other_shape], ids=lambda other: other.__name__)
def test_a_call_that_turns_out_to_be_another_one_runs_again(lab, body, other):
    case = lab.Case(lambda: lab.stack_of(body), whole_step=step_that_replaces(other))
    lab.check_same(case, ways=["replay, all dropped"], steps=STEPS)


def train_until_surprised(lab, make):
    case = lab.Case(make, whole_step=step_that_replaces(long))
    model, applied = case.fitted()
    with pytest.raises(ReplayError, match="cannot be undone"):
        case.train(model, STEPS)
    applied.remove()


def test_a_call_that_has_counted_a_batch_is_refused(lab):
    def body(self, x):
        return x + self.b(functional.gelu(self.statistics(self.a(x))))

    def change(block):
        block.statistics = nn.BatchNorm1d(lab.WIDTH)

    train_until_surprised(lab, lambda: lab.stack_of(body, change=change))


def test_a_call_that_has_fired_a_hook_is_refused(lab):
    def change(block):
        block.a.register_forward_hook(lambda *args: None)

    train_until_surprised(lab, lambda: lab.stack_of(plain, change=change))


def test_a_call_that_has_written_a_list_is_refused(lab):
    seen = SimpleNamespace(calls=0)

    def body(self, x):
        if torch.nn.functional.gelu is not GELU:
            seen.calls += 1
        return x + self.b(functional.gelu(self.a(x)))

    train_until_surprised(lab, lambda: lab.stack_of(body))


def reused(model):
    from leanstep.engines.attach import runner_of

    return runner_of(model.blocks[0]).replays[0].reused


def test_a_profiler_of_the_user_is_called_and_stays(lab):
    case = lab.Case(lambda: lab.stack_of(plain))
    seen = set()

    def profiler(frame, event, arg):
        seen.add(frame.f_code.co_name)

    model, applied = case.fitted()
    before = sys.getprofile()
    sys.setprofile(profiler)
    case.train(model, STEPS)
    stays = sys.getprofile() is profiler
    sys.setprofile(before)

    assert stays
    assert "plain" in seen
    assert reused(model) > 0
    applied.remove()


def test_beside_a_profiler_written_in_c_calls_are_recorded(lab):
    case = lab.Case(lambda: lab.stack_of(plain))
    model, applied = case.fitted()
    profiler = cProfile.Profile()
    profiler.enable()
    case.train(model, STEPS)
    profiler.disable()
    names = {entry.code.co_name for entry in profiler.getstats() if hasattr(entry.code, "co_name")}

    assert "plain" in names
    # Since 3.12 it leaves the interpreter's profiling to others, and calls can be watched.
    assert sys.version_info >= (3, 12) or reused(model) == 0
    case.train(model, STEPS)
    assert reused(model) > 0
    applied.remove()
    assert sys.getprofile() is None


def test_a_tracer_of_the_user_stays(lab):
    case = lab.Case(lambda: lab.stack_of(plain))
    model, applied = case.fitted()
    before, seen = sys.gettrace(), []

    def trace(frame, event, arg):
        if frame.f_code is plain.__code__:
            seen.append(event)

    sys.settrace(trace)
    try:
        case.train(model, STEPS)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert len(seen) == 2 * STEPS
    applied.remove()
