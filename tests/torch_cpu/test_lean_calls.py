"""Which calls of a lazily fitted model are its first step, and which are not."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from encoders import Encoder, encoding
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

import leanstep
from leanstep.errors import InputError, MeasureError
from leanstep.lazy.firststep import FirstStep
from leanstep.torch_private.autograd import saving_hooks_are_set


class Caller(Encoder):
    """One that does something else when it is called for the first time."""

    first, calls = None, 0

    def forward(self, tokens, labels):
        self.calls += 1
        if self.first is not None and self.calls == 1:
            self.first(tokens, labels)
        return super().forward(tokens, labels)


def calling(first=None):
    model, batch = encoding()
    model.eval()
    model.__class__ = Caller
    model.first = first and (lambda *given: first(model, *given))
    return model, batch, torch.optim.SGD(model.parameters(), 0.1)


def one_step(model, batch, optimizer):
    loss = model(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(model, batch, optimizer):
    losses = [one_step(model, batch, optimizer) for _ in range(3)]
    return [*losses, *(p.detach() for p in model.parameters())]


def assert_trains_lean(lean, model, batch, optimizer):
    """From here on, with the numbers of the untouched model."""
    expected = trained(*calling())

    found = trained(model, batch, optimizer)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert lean.plan is not None and lean.plan.loss is not None
    assert not FirstStep.is_one_open() and not _get_current_dispatch_mode_stack()


def test_a_call_on_another_thread_is_none_of_it():
    failed = []

    def evaluate(model, tokens, labels):
        def call():
            try:
                with torch.no_grad():
                    model(tokens, labels)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    model, batch, optimizer = calling(evaluate)
    lean = leanstep.lean(model, optimizer, budget="60%")

    assert_trains_lean(lean, model, batch, optimizer)
    assert failed == []


@pytest.mark.parametrize("when", ["before", "in it", "after"])
def test_a_model_may_be_saved(when):
    model, batch, optimizer = calling()
    lean = leanstep.lean(model, optimizer, budget="45%")
    if when != "before":
        loss = model(**batch)
    if when == "after":
        loss.backward()
        optimizer.step()
    file = io.BytesIO()

    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)

    assert torch.equal(loaded(**batch), model(**batch))
    assert type(loaded) is Caller
    assert not any(inner._forward_pre_hooks for inner in loaded.modules())
    lean.remove()


def test_a_forward_whose_loss_is_let_go_is_none_of_it():
    model, batch, optimizer = calling()
    lean = leanstep.lean(model, optimizer, budget="60%")

    assert model(**batch).item() > 0

    assert_trains_lean(lean, model, batch, optimizer)


def test_nor_is_one_that_was_interrupted_around_a_call_of_its_own():
    def interrupted(model, tokens, labels):
        with torch.no_grad():
            model(tokens, labels)
        raise KeyboardInterrupt

    model, batch, optimizer = calling(interrupted)
    lean = leanstep.lean(model, optimizer, budget="60%")
    with pytest.raises(KeyboardInterrupt):
        one_step(model, batch, optimizer)

    assert_trains_lean(lean, model, batch, optimizer)


def test_what_the_loop_held_when_it_was_interrupted_is_let_go():
    class Data:
        pass

    def interrupted(*_):
        raise KeyboardInterrupt

    model, batch, optimizer = calling(interrupted)
    leanstep.lean(model, optimizer, budget="60%")

    def loop():
        data = Data()
        held.append(weakref.ref(data))
        one_step(model, batch, optimizer)

    held = []
    with pytest.raises(KeyboardInterrupt):
        loop()
    gc.collect()

    assert held[0]() is None


def test_a_loop_that_is_begun_anew_with_a_new_model_begins_a_new_one():
    model, batch, optimizer = calling()
    leanstep.lean(model, optimizer, budget="60%")
    loss = model(**batch)
    other, batch, its_optimizer = calling()

    lean = leanstep.lean(other, its_optimizer, budget="60%")

    assert_trains_lean(lean, other, batch, its_optimizer)
    del loss


def test_a_model_is_fitted_after_another_s_first_step_was_interrupted():
    model, batch, optimizer = calling()
    leanstep.lean(model, optimizer, budget="60%")
    loss = model(**batch)
    other, batch, its_optimizer = calling()

    fitted = leanstep.fit(other, batch, optimizer=its_optimizer, budget="95%")

    assert fitted.verdict.exact
    fitted.remove()
    del loss


def test_of_two_models_one_is_recorded_after_the_other():
    model, batch, optimizer = calling()
    other, _, its_optimizer = calling()
    leans = [
        leanstep.lean(one, its, budget="100%")
        for one, its in ((model, optimizer), (other, its_optimizer))
    ]

    planned = []
    for _ in range(3):
        (model(**batch) + other(**batch)).backward()
        its_optimizer.step()
        optimizer.step()
        planned.append([lean.plan is not None for lean in leans])

    assert planned == [[True, False], [True, True], [True, True]]


def test_a_profiler_of_the_users_in_the_middle_is_said_to_be_in_the_way():
    model, batch, optimizer = calling()
    leanstep.lean(model, optimizer, budget="60%")
    with torch.profiler.profile(profile_memory=True):
        model(**batch).backward()

    with pytest.raises(MeasureError, match=r"another torch\.profiler was started or stopped"):
        optimizer.step()
    assert not FirstStep.is_one_open() and not _get_current_dispatch_mode_stack()


def small():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return model, torch.optim.SGD(model.parameters(), 0.01)


ROWS = torch.randn(32, 64)


def assert_nothing_is_left(model):
    assert not FirstStep.is_one_open() and not _get_current_dispatch_mode_stack()
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in model.modules())
    assert not saving_hooks_are_set()


def test_models_on_threads_of_their_own_are_recorded_one_after_the_other():
    failed = []

    def loop(model, optimizer):
        try:
            for _ in range(6):
                model(ROWS).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except BaseException as error:
            failed.append(error)

    pairs = [small(), small()]
    leans = [leanstep.lean(*pair, budget="100%") for pair in pairs]
    threads = [threading.Thread(target=loop, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == [] and any(lean.plan is not None for lean in leans)
    assert not FirstStep.is_one_open()


@pytest.mark.parametrize("why", ["an error", "another lean"])
def test_a_first_step_that_failed_waits_for_the_other_models(why):
    (model, optimizer), (other, its) = small(), small()
    lean = leanstep.lean(model, optimizer, budget="100%")
    if why == "an error":
        second = leanstep.lean(other, its, budget="100%")
        with pytest.raises(RuntimeError):
            model(torch.randn(32, 63))
    else:
        loss = model(ROWS).sum()
        second = leanstep.lean(other, its, budget="100%")
        loss.backward()
        optimizer.step()

    for _ in range(3):
        (other(ROWS).sum() + model(ROWS).sum()).backward()
        optimizer.step()
        its.step()

    assert lean.plan is not None and second.plan is not None
    assert_nothing_is_left(model)


def test_inside_hooks_of_the_users_it_waits():
    """They may change what they save: what stands above them would undo that."""
    model, optimizer = small()
    twin = copy.deepcopy(model)
    lean = leanstep.lean(model, optimizer, budget="100%")

    def gradients(one):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            one(ROWS).pow(2).sum().backward()
        found = [p.grad.clone() for p in one.parameters()]
        one.zero_grad()
        return found

    with pytest.warns(UserWarning, match="waits for a step outside of saved-tensor hooks"):
        found = gradients(model)

    assert all(torch.equal(a, b) for a, b in zip(found, gradients(twin), strict=True))
    assert lean.plan is None and not FirstStep.is_one_open()
    model(ROWS).sum().backward()
    optimizer.step()
    assert lean.plan is not None


def test_an_update_on_another_thread_is_refused_and_can_be_undone():
    model, optimizer = small()
    lean = leanstep.lean(model, optimizer, budget="100%")
    model(ROWS).sum().backward()
    failed = []

    def update():
        try:
            optimizer.step()
        except InputError as error:
            failed.append(str(error))

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
    model(ROWS)
    lean.remove()

    assert len(failed) == 1 and "runs on another thread" in failed[0]
    assert_nothing_is_left(model)


@pytest.mark.parametrize("what", ["remove", "an error"])
def test_a_profiler_of_the_users_does_not_disturb_what_gives_back(what):
    model, optimizer = small()
    lean = leanstep.lean(model, optimizer, budget="100%")
    with torch.profiler.profile(profile_memory=True):
        model(ROWS).sum().backward()

    if what == "an error":
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(32, 63))
    lean.remove()

    assert_nothing_is_left(model)


def test_a_mode_of_the_users_above_it_stays():
    model, optimizer = small()
    leanstep.lean(model, optimizer, budget="100%")
    model(ROWS)

    with FlopCounterMode(display=False) as mode:
        model(ROWS).sum().backward()
        assert "FlopCounter" in type(_get_current_dispatch_mode_stack()[-1]).__name__
    optimizer.step()

    assert mode.get_total_flops() > 0 and not _get_current_dispatch_mode_stack()


def test_what_lies_below_a_mode_of_the_users_is_taken_off_when_that_is_gone():
    model, optimizer = small()
    lean = leanstep.lean(model, optimizer, budget="100%")
    loss = model(ROWS).sum()

    with FlopCounterMode(display=False) as mode:
        lean.remove()
        model(ROWS)
    assert mode.get_total_flops() > 0
    loss.backward()
    lean.remove()

    assert_nothing_is_left(model)


@pytest.mark.parametrize("when", ["before", "in the first step"])
def test_to_ask_again_for_the_same_model_begins_anew(when):
    model, optimizer = small()
    leanstep.lean(model, optimizer, budget="60%")
    # Held, as a notebook does.
    loss = None if when == "before" else model(ROWS)

    lean = leanstep.lean(model, optimizer, budget="100%")
    for _ in range(3):
        model(ROWS).sum().backward()
        optimizer.step()

    assert lean.plan is not None
    assert_nothing_is_left(model)
    del loss


def test_a_model_that_was_saved_in_its_first_step_takes_hooks_when_it_is_loaded(monkeypatch):
    model, optimizer = small()
    leanstep.lean(model, optimizer, budget="100%")
    key = next(iter(model._forward_pre_hooks))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded(ROWS)
    # As in a new process.
    monkeypatch.setattr(RemovableHandle, "next_id", key)

    loaded.register_forward_pre_hook(lambda module, args: None)

    assert torch.equal(loaded(ROWS), model(ROWS))


class Critic(nn.Module):
    """A block whose weights are normed by a power iteration, which each call takes further."""

    def __init__(self):
        super().__init__()
        normed = torch.nn.utils.parametrizations.spectral_norm
        self.a, self.b = normed(nn.Linear(64, 256)), normed(nn.Linear(256, 64))

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


def critical_training(make_lean):
    torch.manual_seed(2)
    model = nn.Sequential(*(Critic() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lean = leanstep.lean(model, optimizer, budget="95%") if make_lean else None
    seen = []
    for _ in range(6):
        loss = model(torch.randn(512, 64)).square().mean() - model(torch.randn(512, 64)).mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    assert lean is None or lean.plan.changed
    return [*seen, *model.state_dict().values()]


def test_blocks_that_write_their_buffers_are_called_twice_in_the_first_step():
    expected, got = critical_training(False), critical_training(True)
    assert len(expected) == len(got) and all(map(torch.equal, expected, got))
