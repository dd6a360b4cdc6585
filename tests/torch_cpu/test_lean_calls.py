"""Which calls of a lazily fitted model are its first step, and which are not."""

import gc
import io
import threading
import weakref

import pytest
import torch
from encoders import Encoder, encoding
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import leanstep
from leanstep.errors import MeasureError
from leanstep.firststep import FirstStep


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
