"""Somebody stands in for torch's cross entropy, on one thread, and for nothing else."""

import copy
import functools
import gc
import threading

import pytest
import torch
from encoders import encoding
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import leanstep
from leanstep.engines import stand_in
from leanstep.engines.loss import Window
from leanstep.engines.stand_in import standing_in
from leanstep.ir import LossInChunks
from leanstep.torch_private.loss import CROSS_ENTROPY_CODE

LOGITS, LABELS = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
ANSWER = torch.tensor(-1.0)


def is_answered(call=cross_entropy) -> bool:
    return call(LOGITS, LABELS) is ANSWER


@pytest.fixture
def given():
    """What was asked for, while somebody stands in."""
    asked = []

    def answer(given):
        asked.append(given)
        return ANSWER

    with standing_in(answer):
        yield asked
    assert functional.cross_entropy.__code__ is CROSS_ENTROPY_CODE


def test_it_answers_under_every_name(given):
    held = functools.partial(cross_entropy, label_smoothing=0.5)

    assert is_answered(functional.cross_entropy) and is_answered(nn.CrossEntropyLoss())
    assert is_answered(cross_entropy) and is_answered(held)
    assert [one["label_smoothing"] for one in given] == [0.0, 0.0, 0.0, 0.5]
    assert given[0]["input"] is LOGITS and given[0]["ignore_index"] == -100


def test_another_thread_gets_torchs_own(given):
    found = []
    thread = threading.Thread(target=lambda: found.append(is_answered()))

    thread.start()
    thread.join()

    assert found == [False] and not given


def test_what_is_not_answered_is_torchs_own():
    expected = cross_entropy(LOGITS, LABELS, None, None, 1, None, "sum", 0.1)

    with standing_in(lambda given: None):
        found = cross_entropy(LOGITS, LABELS, None, None, 1, None, "sum", 0.1)

    assert torch.equal(expected, found)


def test_the_innermost_answers_and_the_last_gives_the_code_back():
    with standing_in(lambda given: ANSWER):
        with standing_in(lambda given: None):
            assert not is_answered()
        assert is_answered()
    assert not is_answered() and cross_entropy.__code__ is CROSS_ENTROPY_CODE


def test_an_error_inside_gives_the_code_back():
    with pytest.raises(ValueError, match="inside"), standing_in(lambda given: ANSWER):
        raise ValueError("inside")

    assert not is_answered() and cross_entropy.__code__ is CROSS_ENTROPY_CODE


def test_modes_of_others_see_the_call_first(given):
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        assert is_answered()
    assert seen == [cross_entropy] and len(given) == 1


def test_no_mode_is_on_while_it_does(given):
    assert torch.overrides._get_current_function_mode_stack() == []


def trained(model, batch, *, is_lean, budget="60%"):
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    lean = leanstep.lean(model, optimizer, budget=budget) if is_lean else None
    losses = []
    for _ in range(3):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return lean, [*losses, *(p.detach() for p in model.parameters())]


def assert_lean_has_the_bits(model, batch, **choices):
    _, expected = trained(copy.deepcopy(model), batch, is_lean=False)
    lean, found = trained(model, batch, is_lean=True, **choices)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return lean


def test_a_function_that_the_user_has_wrapped_takes_effect_once(monkeypatch):
    plain = functional.layer_norm
    monkeypatch.setattr(functional, "layer_norm", lambda *a, **k: plain(*a, **k) * 0.5)

    lean = assert_lean_has_the_bits(*encoding())

    assert lean.plan.loss is not None and lean._applied.rounds.window.runs == 2


WRAPPERS = {
    "halved": lambda plain: lambda *args, **kwargs: plain(*args, **kwargs) * 0.5,
    "partial": lambda plain: functools.partial(plain, ignore_index=3),
    "smoothed": lambda plain: functools.partial(plain, label_smoothing=0.1),
}


@pytest.mark.parametrize("way", WRAPPERS)
def test_so_does_a_wrapped_cross_entropy(way, monkeypatch):
    model, batch = encoding()
    monkeypatch.setattr(functional, "cross_entropy", WRAPPERS[way](cross_entropy))

    lean = assert_lean_has_the_bits(model, batch, budget="95%" if way == "smoothed" else "60%")

    assert (lean.plan.loss is None) == (way == "smoothed")


@pytest.mark.parametrize("way", WRAPPERS)
def test_a_fit_takes_a_wrapped_cross_entropy(way, monkeypatch):
    monkeypatch.setattr(functional, "cross_entropy", WRAPPERS[way](cross_entropy))
    model, batch = encoding()

    fitted = leanstep.fit(model, batch, budget="95%" if way == "smoothed" else "60%")

    assert not fitted.verdict.different and (fitted.plan.loss is None) == (way == "smoothed")


def test_a_loss_that_is_checkpointed_later_is_torchs():
    model, batch = encoding()

    class Checkpointed(type(model)):
        calls = 0

        def forward(self, tokens, labels):
            self.calls += 1
            hidden = self.words(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            if self.calls < 2:
                return self.loss(hidden, labels)
            return checkpoint(self.loss, hidden, labels, use_reentrant=False)

        def loss(self, hidden, labels):
            return cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    model.__class__ = Checkpointed

    lean = assert_lean_has_the_bits(model, batch)

    assert lean.plan.loss is not None and lean._applied.rounds.window.runs == 0


@pytest.mark.parametrize("forbids", ["transform", "setting"])
def test_where_nobody_may_look_at_what_is_saved_the_loss_is_torchs(forbids):
    model, batch = encoding()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    leanstep.lean(model, optimizer, budget="60%")
    model(**batch).backward()
    optimizer.step()

    def other(weight):
        return cross_entropy(torch.ones(200, 4) @ weight, torch.zeros(200).long())

    if forbids == "transform":

        def transform(*_):
            torch.func.grad(other)(torch.ones(4, 50))

        model.head.register_forward_pre_hook(transform)
        model(**batch).backward()
    else:
        with torch.autograd.graph.disable_saved_tensors_hooks("none of that"):
            model(**batch)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_trace_inside_is_of_torchs_own(given):
    def loss(logits):
        return cross_entropy(logits, LABELS)

    traced = torch.jit.trace(loss, LOGITS, check_trace=False)

    assert given == [] and torch.isfinite(traced(LOGITS))


def test_what_others_make_of_the_function_stays():
    def other(input, target, *_, **__):
        return "theirs"

    with standing_in(lambda given: ANSWER):
        cross_entropy.__code__, ours = other.__code__, cross_entropy.__code__
        with standing_in(lambda given: None):
            assert cross_entropy(LOGITS, LABELS) == "theirs"
    left, cross_entropy.__code__ = cross_entropy.__code__, CROSS_ENTROPY_CODE

    assert left is other.__code__ and ours is not other.__code__


def test_one_whose_end_was_interrupted_answers_no_more():
    place = standing_in(lambda given: ANSWER)
    place.__enter__()
    known = stand_in._known_here()
    assert is_answered() and len(known) == 1
    # Its generator goes, and its end is not run through.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand_in, "_set_code", lambda: None)
        del place
        gc.collect()
    assert not is_answered()

    with standing_in(lambda given: None):
        pass

    assert cross_entropy.__code__ is CROSS_ENTROPY_CODE


ODD = [{"reduction": []}, {"label_smoothing": torch.zeros(3)}, {"ignore_index": 2**70}]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: next(iter(odd)))
def test_odd_arguments_raise_what_they_raise_in_torch(odd):
    logits, labels = torch.randn(64, 8, requires_grad=True), torch.zeros(64).long()
    window = Window(LossInChunks("", 16, freed_bytes=0, extra_seconds=0.0))
    with pytest.raises(Exception) as expected:
        cross_entropy(logits, labels, **odd)

    with standing_in(window.answer), pytest.raises(expected.type):
        cross_entropy(logits, labels, **odd)
