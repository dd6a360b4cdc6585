"""Forms that compute pointwise values again inside backward, and what draws of Inductor's cost."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from leanstep.engines.inductor import PRECISE, CompiledForm  # noqa: E402
from leanstep.engines.joint import is_draw  # noqa: E402
from leanstep.errors import MeasureError  # noqa: E402
from leanstep.forms import compiled, cuts  # noqa: E402
from leanstep.forms.capture import capture  # noqa: E402
from leanstep.forms.costs import is_own_kernel, is_reduction, node_bytes, node_seconds  # noqa: E402
from leanstep.forms.cuts import Candidate, kept_bytes, unplanned  # noqa: E402
from leanstep.forms.kinds import Example, Sighting  # noqa: E402
from leanstep.forms.pointwise import pointwise_again  # noqa: E402
from leanstep.torch_private import compiler as torch_compiler  # noqa: E402

# Dynamo looks at the gradient of every tensor it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        inner = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(inner))


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x):
        return x + self.second(torch.relu(self.norm(self.first(x))))


def captured(module, *shape):
    x = torch.randn(*shape, requires_grad=True)
    return x, capture(Example(module, (), (x,), {}, ()), PRECISE)


def everything_kept(joint):
    kept, _ = joint.closed([node.name for node in joint.needed if node.op != "placeholder"])
    return Candidate("everything", kept, kept_bytes(joint, kept), 0.0)


def large(joint, candidate):
    """What is kept and as large as an activation."""
    return {name for name in candidate.kept if node_bytes(joint.by_name[name]) >= 64 * 256 * 4}


def test_backward_computes_again_what_takes_no_product_and_no_sum():
    _, joint = captured(Block(), 64, 256)
    first = unplanned(joint)
    all_gone, norm_kept = pointwise_again(joint, first)
    for one in (all_gone, norm_kept):
        _, again = joint.closed(one.kept)
        assert not any(is_own_kernel(node) or is_reduction(node) for node in again), one
    # The output of GELU goes in both, the normalized input in one; a product stays.
    assert all_gone.nbytes < norm_kept.nbytes < first.nbytes
    assert len(large(joint, first)) - 1 == len(large(joint, norm_kept))
    assert len(large(joint, first)) - 2 == len(large(joint, all_gone)) == 1


def test_statistics_are_kept_for_it_where_torch_does_not_keep_them():
    _, joint = captured(ConvBlock(), 4, 32, 16, 16)
    whole = everything_kept(joint)
    smaller, *_ = pointwise_again(joint, whole)
    _, again = joint.closed(smaller.kept)
    assert smaller.nbytes < whole.nbytes
    assert not any(is_reduction(node) for node in again)


def test_masks_are_not_drawn_again_for_nothing():
    _, joint = captured(Block(dropout=0.1), 64, 256)
    first = unplanned(joint)
    smaller = pointwise_again(joint, first)
    assert smaller
    for one in smaller:
        _, again = joint.closed(one.kept)
        assert not any(is_draw(node) for node in again), one


def test_an_input_that_nobody_else_holds_is_not_held_for_it():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            return self.inner(torch.tanh(x))

    _, joint = captured(Scaled(), 32, 64)
    first = unplanned(joint)
    # Of its input all that is kept could be made.
    assert first.nbytes and not pointwise_again(joint, first)


def test_a_chain_may_be_longer_than_python_s_stack():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x):
            first = y = self.inner(x)
            for number in range(600):
                y = y + number
            return self.inner(y.sin() * first)

    _, joint = captured(Chain(), 32, 64)
    whole = everything_kept(joint)
    assert pointwise_again(joint, whole)


def test_its_bits_are_those_of_the_whole(without_compiler):
    module = Block()
    x, joint = captured(module, 64, 256)
    whole = everything_kept(joint)
    smaller = pointwise_again(joint, whole)
    assert smaller
    results = []
    for one in (whole, *smaller):
        out = CompiledForm(Block.forward, one.kept, PRECISE)(module, (x,), {})
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        results.append([out, *grads])
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_draws_of_inductor_are_timed_each_size_once(monkeypatch):
    _, joint = captured(Block(dropout=0.1), 64, 256)
    draws = [node for node in joint.forward if is_draw(node)]
    assert draws
    compiled_graphs = []

    def compile_alone(graph, settings):
        compiled_graphs.append(graph)
        return torch_compiler.compile_alone_to_python(graph, settings)

    monkeypatch.setattr(CompiledForm, "compile_alone", staticmethod(compile_alone))
    seconds = node_seconds(joint, CPU)
    assert len(compiled_graphs) == len({tuple(node.meta["val"].shape) for node in draws})
    assert all(seconds[node] > 0.0 for node in draws)


def test_a_block_whose_draws_cannot_be_compiled_is_left_out(monkeypatch):
    def no_compiler(graph, settings):
        raise torch._dynamo.exc.TorchDynamoException("no working C++ compiler found")

    monkeypatch.setattr(CompiledForm, "compile_alone", staticmethod(no_compiler))
    example = Example(Block(dropout=0.1), (), (torch.randn(64, 256, requires_grad=True),), {}, ())
    sighting = Sighting("Block", example, [0])
    # What leaves a block out, and lets the profile go on.
    with pytest.raises(MeasureError, match="no working C"):
        compiled._kind(sighting, CPU, compiled._effort(1), exact=True)


def test_what_is_rebuilt_apart_starts_from_the_smaller_form(without_compiler, monkeypatch):
    # Which form is the faster here says nothing.
    monkeypatch.setattr(compiled, "without_beaten", tuple)
    module = Block()
    x = torch.randn(64, 256, requires_grad=True)
    example = Example(module, (), (x,), {}, ())
    sighting = Sighting("Block", example, [0])
    kind = compiled._kind(sighting, CPU, compiled._effort(1), exact=True)
    joint = capture(example, PRECISE)
    first = unplanned(joint)
    wholes = {form.whole for form in kind.forms if form.whole}
    assert all(form.exact for form in kind.forms)
    assert wholes and all(set(whole) < set(first.kept) for whole in wholes)


def test_no_form_keeps_more_than_torch_does_unasked():
    first, less = Candidate("first", ("a",), 200, 2.0), Candidate("less", (), 100, 3.0)
    more = [Candidate("more", ("a", "b"), 300, firm, is_firm=bool(firm)) for firm in (0.0, 1.0)]
    assert cuts._spread(first, [*more, less], 8) == [less]
