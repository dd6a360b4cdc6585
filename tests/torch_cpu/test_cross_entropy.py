"""`leanstep.cross_entropy` has the bits of torch's, in a fraction of its memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import leanstep
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

    assert torch.allclose(twice(leanstep.cross_entropy), twice(functional.cross_entropy))


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
