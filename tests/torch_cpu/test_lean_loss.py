"""The loss of a lazily fitted model: seen in the first step, in chunks from the second on."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from encoders import Encoder, encoding
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import leanstep
from leanstep.engines import loss as engine
from leanstep.engines import witnessed_loss
from leanstep.engines.attach import is_attached
from leanstep.engines.witnessed_loss import WitnessedLoss
from leanstep.errors import BudgetError
from leanstep.step.training import make_step
from leanstep.truth import peak_rise_bytes, resident_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def whole(model, batch):
    return model(**batch)


def in_bfloat16(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch)


def one_step(model, batch, optimizer, loss=whole):
    value = loss(model, batch)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def trained(model, batch, optimizer, loss=whole, steps=4):
    torch.manual_seed(5)
    seen = []
    for _ in range(steps):
        seen.append(one_step(model, batch, optimizer, loss))
        seen += [p.detach().clone() for p in model.parameters()]
    return [*seen, torch.get_rng_state()]


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def lean_after_a_step(budget, **choices):
    model, batch = encoding()
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget=budget, **choices)
    one_step(model, batch, optimizer)
    return lean


def notes_of(lean):
    return " ".join(lean.plan.notes)


@pytest.mark.parametrize("loss", [whole, in_bfloat16])
def test_from_the_second_step_on_it_is_computed_in_chunks_with_the_same_bits(loss):
    model, batch = encoding()
    expected = trained(model, batch, optimizer_of(model), loss)
    model, batch = encoding()
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget="50%")

    found = trained(model, batch, optimizer, loss)

    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert lean.plan.loss is not None and lean._applied.rounds.window.runs == 3
    assert "rows at a time" in str(lean)
    step = make_step(model, batch, loss, optimizer)
    measured = peak_rise_bytes(step.run, step.device) + resident_bytes(step)
    assert measured <= lean.plan.peak_bytes <= lean.plan.budget_bytes
    lean.remove()
    assert not any(is_attached(module) for module in model.modules())


def test_the_loss_stays_whole_where_that_is_asked_for():
    with pytest.raises(BudgetError):
        lean_after_a_step("50%", chunks=False)
    lean = lean_after_a_step("90%", chunks=False)

    assert lean.plan.loss is None and lean.plan.changed


def test_other_bits_of_the_loss_are_not_taken(monkeypatch):
    compute = engine.loss_of

    def slightly_more(*given):
        loss, total = compute(*given)
        return loss * 1.001, total

    monkeypatch.setattr(engine, "loss_of", slightly_more)

    lean = lean_after_a_step("90%")

    assert lean.plan.loss is None
    assert "not computed in chunks: in chunks it had other bits" in notes_of(lean)


def test_other_bits_of_the_gradient_are_not_taken(monkeypatch):
    compute = witnessed_loss.put_gradient

    def slightly_more(place, *given):
        compute(place, *given)
        place[-1, -1] *= 1.001

    monkeypatch.setattr(witnessed_loss, "put_gradient", slightly_more)

    lean = lean_after_a_step("90%")

    assert lean.plan.loss is None
    assert "not computed in chunks: in chunks its gradient had other bits" in notes_of(lean)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, torch.OutOfMemoryError])
def test_a_device_that_cannot_do_it_trains_with_the_loss_as_a_whole(monkeypatch, error):
    def cannot(*_):
        raise error("no kernel for that")

    monkeypatch.setattr(witnessed_loss, "put_gradient", cannot)

    lean = lean_after_a_step("90%")

    assert lean.plan.loss is None and lean.plan.changed
    assert "no kernel for that" in notes_of(lean)


def test_a_host_that_does_not_call_the_model_has_the_loss_as_a_whole():
    """Lightning calls a method of it, where nothing stands in front."""
    model, batch = encoding()
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget="90%")
    lean.watch(optimizer, calls=False)

    lean.begin_step(batch)
    loss = model.forward(**batch)
    lean.end_forward()
    loss.backward()
    optimizer.step()

    assert lean.plan.loss is None
    assert "its host trains without calling the model that computes it" in notes_of(lean)


def test_the_last_of_several_batches_is_looked_at():
    model, batch = encoding()
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget="50%")

    for _ in range(3):
        model(**batch).backward()
    optimizer.step()

    assert lean.plan.loss is not None


class Watch(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_others_may_come_and_go_with_the_call():
    model, batch = encoding()
    own = Watch()
    model.register_forward_pre_hook(lambda *_: own.__enter__() and None)
    model.register_forward_hook(lambda *_: own.__exit__(None, None, None))
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget="50%")

    for _ in range(3):
        one_step(model, batch, optimizer)

    assert lean.plan.loss is not None and lean._applied.rounds.window.runs == 2
    assert _get_current_function_mode_stack() == []


class Listening(Encoder):
    """With a part that is frozen: torch has a faster kernel for it where no function mode is on."""

    def __init__(self, way):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.tower = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tower.eval().requires_grad_(False)
        self.hidden_away, self.way = [copy.deepcopy(self.tower)], way

    def forward(self, tokens, labels):
        hidden = self.words(tokens)
        with torch.no_grad():
            heard = self.way(self, hidden)
        for layer in self.layers:
            hidden = layer(hidden + heard)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def listening(way):
    torch.manual_seed(7)
    model = Listening(LISTENING[way])
    return model, encoding()[1]


def layer_by_layer(model, hidden):
    for layer in model.tower.layers:
        hidden = layer(hidden)
    return hidden


def attention(model, hidden):
    layer = model.tower.layers[0].self_attn
    return layer(hidden, hidden, hidden, need_weights=False)[0]


def replaced(model, hidden):
    model.tower = copy.deepcopy(model.tower)
    return model.tower(hidden)


LISTENING = {
    "as a whole": lambda model, hidden: model.tower(hidden),
    "its forward": lambda model, hidden: model.tower.forward(hidden),
    "layer by layer": layer_by_layer,
    "not a child": lambda model, hidden: model.hidden_away[0](hidden),
    "replaced": replaced,
    "attention": attention,
}
# How often torch's fast kernels run in four untouched steps, and in four of which the first is
# recorded: layers have hooks there, for which torch has no fast way, but the same bits.
CALLS = dict.fromkeys(LISTENING, (8, 6)) | {
    "not a child": (8, 8),
    "replaced": (8, 8),
    "attention": (4, 4),
}


@pytest.mark.parametrize("way", LISTENING)
def test_frozen_attention_computes_what_it_did(way, monkeypatch):
    calls = []
    name = (
        "_native_multi_head_attention" if way == "attention" else "_transformer_encoder_layer_fwd"
    )
    fast = getattr(torch, name)

    def counted(*args, **kwargs):
        calls.append(1)
        return fast(*args, **kwargs)

    monkeypatch.setattr(torch, name, counted)
    found, counts = {}, []
    for is_lean in (False, True):
        model, batch = listening(way)
        optimizer = optimizer_of(model)
        lean = leanstep.lean(model, optimizer, budget="60%") if is_lean else None
        found[is_lean] = trained(model, batch, optimizer)
        counts.append(len(calls))
        calls.clear()

    assert tuple(counts) == CALLS[way] and lean.plan.loss is not None
    assert not any(inner._forward_hooks for inner in model.tower.modules())
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


@pytest.mark.parametrize("way", LISTENING)
def test_so_it_does_in_a_fit(way):
    model, batch = listening(way)

    fitted = leanstep.fit(model, batch, budget="60%")

    assert fitted.plan.loss is not None and not fitted.verdict.different


def test_logits_that_are_written_to_in_every_step_leave_the_loss_whole():
    """Autograd does not see it: chunks would compute the gradient of others from the next step."""
    model, batch = encoding()
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget="90%")
    logits = []
    model.head.register_forward_hook(lambda *given: logits.append(given[2]))

    loss = model(**batch)
    (held,) = logits
    held.detach().numpy()[:] = 0
    loss.backward()
    optimizer.step()

    assert lean.plan.loss is None
    assert "its logits are written to before backward" in notes_of(lean)


def test_logits_that_are_written_to_later_raise_with_what_to_do():
    model, batch = encoding()
    optimizer = optimizer_of(model)
    leanstep.lean(model, optimizer, budget="60%")
    one_step(model, batch, optimizer)
    logits = []
    model.head.register_forward_hook(lambda *given: logits.append(given[2]))

    loss = model(**batch)
    logits.pop().detach().clamp_(min=0)
    with pytest.raises(RuntimeError, match="chunks=False"):
        loss.backward()


def test_a_gradient_of_the_gradient_leaves_the_loss_whole():
    """Sums at the logits are made in another order, if both pass them."""
    model, batch = encoding()
    optimizer = optimizer_of(model)
    lean = leanstep.lean(model, optimizer, budget="120%")

    loss = model(**batch)
    with warnings.catch_warnings():
        # Of a graph that holds itself.
        warnings.simplefilter("ignore")
        loss.backward(create_graph=True)
    optimizer.step()

    assert lean.plan.loss is None
    assert "its gradient has a gradient" in notes_of(lean)


def seen_by_a_witness(loss_of, logits, labels):
    """What it says of a loss whose ops it is told."""
    witness = WitnessedLoss(nullcontext)

    class Teller(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            witness(func, args, out)
            return out

    with Teller():
        loss_of(logits, labels).sum().backward()
    return witness.doubt


def some_logits(rows=512, words=2048):
    torch.manual_seed(3)
    logits = torch.randn(rows, words, requires_grad=True)
    return logits, torch.randint(words, (rows,))


SAME = [
    lambda x, y: functional.cross_entropy(x, y),
    lambda x, y: functional.cross_entropy(x, y, reduction="none"),
    lambda x, y: functional.cross_entropy(x, y, reduction="sum", ignore_index=7),
    lambda x, y: functional.cross_entropy(x * 2, y) * 65536,
    lambda x, y: functional.cross_entropy(x[1:], y[1:]),
    lambda x, y: functional.cross_entropy(x.bfloat16(), y),
    lambda x, y: functional.cross_entropy(x, y) + x.mean(),
]


@pytest.mark.parametrize("loss_of", SAME)
def test_losses_that_have_the_same_bits_in_chunks_are_known(loss_of):
    assert seen_by_a_witness(loss_of, *some_logits()) == ""


OTHERS = [
    lambda x, y: functional.nll_loss(functional.log_softmax(x, 1), y),
    lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1),
    lambda x, y: functional.cross_entropy(x[:8], y[:8]),
    lambda x, y: functional.cross_entropy(x.view(8, 64, -1).transpose(1, 2), y.view(8, 64)),
]


@pytest.mark.parametrize("loss_of", OTHERS)
def test_of_others_it_is_said_that_none_was_seen(loss_of):
    assert "no call of it was seen" in seen_by_a_witness(loss_of, *some_logits())


def test_a_loss_that_backward_does_not_reach_was_not_seen():
    def forgotten(logits, labels):
        functional.cross_entropy(logits, labels)
        return logits.mean()

    assert "its gradient was not asked for" in seen_by_a_witness(forgotten, *some_logits())


def test_to_look_takes_hardly_more_memory_than_the_loss_as_a_whole():
    logits, labels = some_logits(rows=2048)

    def peak(is_seen):
        def run():
            scaled = logits * 2
            if is_seen:
                assert seen_by_a_witness(functional.cross_entropy, scaled, labels) == ""
            else:
                functional.cross_entropy(scaled, labels).backward()
            logits.grad = None

        return peak_rise_bytes(run, torch.device("cpu"))

    assert peak(is_seen=True) < 1.03 * peak(is_seen=False)
