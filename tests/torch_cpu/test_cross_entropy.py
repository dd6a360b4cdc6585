"""`leanstep.cross_entropy` has the bits of torch's, in a fraction of its memory."""

import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import leanstep
from leanstep.engines import alone
from leanstep.engines import loss as engine
from leanstep.truth import peak_rise_bytes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

ROWS, WORDS = 300, 97


def logits_and_labels(dtype=torch.float32, ignored=-100, words=WORDS):
    torch.manual_seed(3)
    logits = (torch.randn(ROWS, words) * 4).to(dtype).requires_grad_()
    labels = torch.randint(words, (ROWS,))
    labels[::7] = ignored
    return logits, labels


def answers(function, logits, labels, **choices):
    loss = function(logits, labels, **choices)
    weights = torch.linspace(0.5, 1.5, loss.numel()).reshape(loss.shape).to(loss)
    (gradient,) = torch.autograd.grad(loss, logits, weights)
    return loss.detach(), gradient


def assert_same_bits(logits, labels, **choices):
    expected = answers(functional.cross_entropy, logits, labels, **choices)
    found = answers(leanstep.cross_entropy, logits, labels, **choices)
    for own, other in zip(found, expected, strict=True):
        assert own.dtype is other.dtype and torch.equal(own, other)


def runs_in_rows(function, *args, **kwargs) -> bool:
    loss = function(*args, **kwargs)
    return type(loss.grad_fn).__name__ == "_InChunksBackward"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", [-100, 0, 5])
def test_loss_and_gradient_have_the_bits_of_the_whole(dtype, reduction, ignored):
    logits, labels = logits_and_labels(dtype, ignored)

    assert runs_in_rows(leanstep.cross_entropy, logits, labels, reduction=reduction)
    assert_same_bits(logits, labels, reduction=reduction, ignore_index=ignored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [2, 64, 1001, 5003])
def test_so_they_have_under_autocast(dtype, words):
    logits, labels = logits_and_labels(dtype, words=words)

    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(logits, labels)


@pytest.fixture
def first_use(monkeypatch):
    """How torch computes a cross entropy is not known yet."""
    monkeypatch.setattr(engine, "_ways", {})


@pytest.mark.usefixtures("first_use", "cross_entropy_as_on_cuda")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_so_they_have_where_the_scores_are_cast_and_not_the_logits(dtype, reduction):
    logits, labels = logits_and_labels(dtype, ignored=0)

    assert runs_in_rows(leanstep.cross_entropy, logits, labels, reduction=reduction)
    assert_same_bits(logits, labels, reduction=reduction, ignore_index=0)
    if dtype is not torch.float32:
        assert engine._way(logits, labels).recast is torch.float32


says_that_bits_may_differ = pytest.mark.filterwarnings(
    "ignore:leanstep computes the loss some rows at a time, and the gradient:UserWarning"
)


@says_that_bits_may_differ
@pytest.mark.usefixtures("first_use", "cross_entropy_as_on_cuda")
def test_several_gradients_may_be_taken_at_once_there_and_one_of_the_gradient():
    inputs, labels = logits_and_labels(torch.bfloat16)
    found = []
    for function in (functional.cross_entropy, leanstep.cross_entropy):
        loss = function(inputs * 2, labels, reduction="none")
        given = torch.eye(loss.numel())[:3]
        found += torch.autograd.grad(loss, inputs, given, is_grads_batched=True, retain_graph=True)
        (once,) = torch.autograd.grad(loss.sum(), inputs, create_graph=True)
        found += torch.autograd.grad(once.square().sum(), inputs)

    assert torch.equal(found[0], found[2]) and torch.allclose(found[1], found[3])


def test_backward_may_run_outside_of_autocast():
    logits, labels = logits_and_labels(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        whole = functional.cross_entropy(logits, labels)
        chunked = leanstep.cross_entropy(logits, labels)

    assert torch.equal(*(torch.autograd.grad(loss, logits)[0] for loss in (whole, chunked)))


def test_no_label_at_all_is_no_number_either_way():
    logits, labels = logits_and_labels()

    loss = leanstep.cross_entropy(logits, labels.fill_(-100))

    assert loss.isnan()


@pytest.mark.parametrize(
    "choices", [{"weight": torch.rand(WORDS)}, {"label_smoothing": 0.1}, {"reduce": False}]
)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_what_is_not_for_rows_is_torchs(choices):
    logits, labels = logits_and_labels()

    assert not runs_in_rows(leanstep.cross_entropy, logits, labels, **choices)
    assert_same_bits(logits, labels, **choices)


def test_so_are_images_shares_and_a_few_rows():
    image = torch.randn(4, 5, 6, 6, requires_grad=True)
    shares = torch.softmax(torch.randn(ROWS, WORDS), 1)
    logits, labels = logits_and_labels()

    assert_same_bits(image, torch.randint(5, (4, 6, 6)))
    assert_same_bits(logits, shares)
    few = logits.detach()[:10].requires_grad_()
    assert not runs_in_rows(leanstep.cross_entropy, few, labels[:10])
    with torch.no_grad():
        assert leanstep.cross_entropy(logits, labels).grad_fn is None


def test_the_gradient_has_a_gradient():
    logits, labels = logits_and_labels(torch.float64)

    def twice(function):
        (once,) = torch.autograd.grad(function(logits, labels), logits, create_graph=True)
        return torch.autograd.grad(once.square().sum(), logits)[0]

    with pytest.warns(UserWarning, match="the gradient of its gradient is asked for"):
        found = twice(leanstep.cross_entropy)
    assert torch.allclose(found, twice(functional.cross_entropy))


@says_that_bits_may_differ
def test_so_it_has_where_the_logits_come_from_something():
    labels = logits_and_labels(torch.float64)[1]
    factors = torch.rand(WORDS, dtype=torch.float64)

    def twice(function):
        inputs = logits_and_labels(torch.float64)[0]
        loss = function(inputs * factors, labels)
        (once,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return once, *torch.autograd.grad(once.square().sum() + loss, inputs)

    found, expected = twice(leanstep.cross_entropy), twice(functional.cross_entropy)
    assert all(torch.allclose(own, other) for own, other in zip(found, expected, strict=True))


def scaled(logits):
    """Logits that something has made, and a way to the gradient of what it was made from."""
    return logits.detach().requires_grad_(), lambda given: given * 1.5


@pytest.mark.parametrize("is_view", [False, True])
def test_backward_may_run_twice(is_view):
    labels = logits_and_labels()[1]
    inputs, make = scaled(logits_and_labels()[0])
    logits = make(inputs).view(ROWS, WORDS) if is_view else make(inputs)
    loss = leanstep.cross_entropy(logits, labels)
    del logits

    first = torch.autograd.grad(loss, inputs, retain_graph=True)[0]

    assert torch.equal(first, torch.autograd.grad(loss, inputs)[0])


# Who else has the bytes of the logits when backward comes; each gives back what it has.
HOLDERS = {
    "the logits": lambda x: x,
    "a view of them": lambda x: x[3:, 1:],
    "what they are a view of": lambda x: x._base,
    "the same, detached": lambda x: x.detach(),
    "their storage": lambda x: x.untyped_storage(),
    "their storage with a type": lambda x: x.storage(),
    "an array": lambda x: x.detach().numpy(),
    "a node": lambda x: x.square().grad_fn,
}


def content(holder) -> torch.Tensor:
    """The numbers that a holder has, as they are now."""
    match holder:
        case torch.autograd.graph.Node():
            return holder._saved_self.detach().clone()
        case torch.UntypedStorage():
            return torch.tensor(holder.tolist())
        case torch.TypedStorage():
            return torch.tensor(holder.tolist())
    return torch.as_tensor(holder).detach().clone()


@pytest.mark.parametrize("who", HOLDERS)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_logits_that_others_hold_stay_as_they_are(who):
    labels = logits_and_labels()[1]
    inputs, make = scaled(logits_and_labels()[0])
    logits = make(inputs).view(ROWS, WORDS)
    holder = HOLDERS[who](logits)
    loss = leanstep.cross_entropy(logits, labels)
    del logits
    before = content(holder)

    loss.backward()

    assert torch.equal(content(holder), before)


class IntoArray(torch.autograd.Function):
    """Numbers in memory that NumPy owns."""

    @staticmethod
    def forward(ctx, given, array):
        array[:] = given.numpy()
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_memory_of_others_stays_as_it_is():
    inputs, labels = logits_and_labels()
    array = np.empty((ROWS, WORDS), np.float32)

    leanstep.cross_entropy(IntoArray.apply(inputs, array), labels).backward()

    assert (array == inputs.detach().numpy()).all()


def test_bytes_that_were_sent_to_another_process_are_not_its_own():
    tensor = torch.ones(3)
    assert alone.is_alone(tensor, alone._holders(tensor))

    tensor.share_memory_()

    assert not alone.is_alone(tensor, alone._holders(tensor))


class Log(TorchDispatchMode):
    """Holds everything that was ever made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.append((args, func(*args, **(kwargs or {}))))
        return self.made[-1][1]


@pytest.mark.parametrize("is_recorded", [False, True])
def test_how_many_hold_what_nobody_else_holds_is_seen_past_everybody(is_recorded):
    look = alone._when_alone.__wrapped__
    seen = look(is_recorded)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: [x], lambda held: held[0])

    with Log(), torch.inference_mode(), hooks:
        assert look(is_recorded) == seen


def test_under_hooks_of_others_it_cannot_be_known():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], lambda held: held[0]):
        assert alone.holders_when_alone(torch.ones(2)) is None


def test_what_a_log_of_all_ops_holds_stays_as_it_is():
    labels = logits_and_labels()[1]
    inputs, make = scaled(logits_and_labels()[0])
    with Log() as log:
        loss = leanstep.cross_entropy(make(inputs), labels)
        logits = next(made for _, made in log.made if made.shape == inputs.shape)
        before = logits.clone()
        loss.backward()

    assert torch.equal(logits, before)


def test_what_hooks_have_taken_stays_as_it_is():
    labels = logits_and_labels()[1]
    inputs, make = scaled(logits_and_labels()[0])
    taken = []

    def take(tensor):
        taken.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(take, lambda tensor: tensor):
        loss = leanstep.cross_entropy(make(inputs), labels)
    before = [tensor.clone() for tensor in taken]
    loss.backward()

    assert all(map(torch.equal, taken, before)) and len(taken) >= 3


@pytest.mark.usefixtures("first_use")
def test_the_first_call_may_be_inside_a_checkpoint():
    alone._when_alone.cache_clear()
    inputs, labels = logits_and_labels()
    loss = checkpoint(lambda x: leanstep.cross_entropy(x * 2, labels), inputs, use_reentrant=False)

    expected = torch.autograd.grad(functional.cross_entropy(inputs * 2, labels), inputs)[0]
    assert torch.equal(torch.autograd.grad(loss, inputs)[0], expected)


@pytest.mark.usefixtures("first_use")
def test_hooks_of_others_see_no_more_than_what_is_saved():
    inputs, labels = logits_and_labels()
    sizes = []

    def take(tensor):
        sizes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(take, lambda tensor: tensor):
        leanstep.cross_entropy(inputs, labels)

    assert sorted(sizes) == [(), (ROWS,), (ROWS, WORDS)]


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_several_gradients_may_be_taken_at_once(reduction):
    inputs, labels = logits_and_labels()
    found = []
    for function in (functional.cross_entropy, leanstep.cross_entropy):
        loss = function(inputs * 2, labels, reduction=reduction)
        given = torch.eye(loss.numel())[:3].reshape(-1, *loss.shape)
        found += torch.autograd.grad(loss, inputs, given, is_grads_batched=True)

    assert torch.equal(*found)


def test_backward_may_have_an_autocast_that_forward_had_not():
    inputs, labels = logits_and_labels(torch.float16, ignored=0)
    found = []
    for function in (functional.cross_entropy, leanstep.cross_entropy):
        loss = function(inputs * 2, labels, ignore_index=0)
        with torch.autocast("cpu"):
            found += torch.autograd.grad(loss, inputs)

    assert torch.equal(*found)


def test_a_backward_that_is_compiled_has_the_same_bits():
    inputs, labels = logits_and_labels()
    expected = torch.autograd.grad(functional.cross_entropy(inputs * 2, labels), inputs)[0]

    def loss():
        return leanstep.cross_entropy(inputs * 2, labels)

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(loss, backend="eager")().backward()

    assert torch.equal(inputs.grad, expected)


def test_a_label_that_is_no_class_gets_torchs_own_words():
    logits, labels = logits_and_labels()
    labels[3] = WORDS

    with pytest.raises(IndexError, match="out of bounds"):
        leanstep.cross_entropy(logits, labels)


def test_the_peak_is_that_of_a_chunk():
    logits, labels = logits_and_labels(words=20_000)

    def peak(function):
        def run():
            torch.autograd.grad(function(logits, labels), logits)

        return peak_rise_bytes(run, torch.device("cpu"))

    whole, chunked = peak(functional.cross_entropy), peak(leanstep.cross_entropy)

    assert whole > 2.9 * logits.nbytes and chunked < 1.6 * logits.nbytes


@pytest.mark.usefixtures("first_use")
def test_it_does_so_from_the_first_call_on():
    inputs, labels = logits_and_labels()
    gradients = []
    logits = inputs * 2
    logits.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
    place = logits.data_ptr()
    loss = leanstep.cross_entropy(logits, labels)
    del logits

    loss.backward()

    assert gradients == [place]


@pytest.mark.usefixtures("first_use")
def test_nothing_of_the_row_that_was_tried_stays():
    """Autograd would hold a node that holds its own result for ever, and logits through it."""
    logits, labels = logits_and_labels(words=1013)

    leanstep.cross_entropy(logits, labels)

    gc.collect()
    # Exactly this type: others, as lazy parameters of other tests, may have no shape.
    tensors = [held for held in gc.get_objects() if type(held) is torch.Tensor]
    assert not [tensor.shape for tensor in tensors if tensor.shape == (1, 1013)]


@pytest.mark.parametrize("is_view", [False, True])
def test_the_gradient_takes_the_place_of_logits_that_nobody_holds(is_view):
    head, hidden = nn.Linear(2, 20_000, bias=False), torch.randn(ROWS, 2)
    labels = torch.randint(20_000, (ROWS,))
    logits_bytes = ROWS * 20_000 * 4

    def peak(is_held):
        def run():
            logits = head(hidden)
            logits = logits.view_as(logits) if is_view else logits
            loss = leanstep.cross_entropy(logits, labels)
            held = logits if is_held else None
            del logits
            loss.backward()
            head.weight.grad = None
            return held

        return peak_rise_bytes(run, torch.device("cpu"))

    assert peak(is_held=True) > 2.2 * logits_bytes
    assert peak(is_held=False) < 1.4 * logits_bytes
