"""What compiled blocks drop and rebuild by a program of its own, with a backend for Python."""

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import leanstep  # noqa: E402
from leanstep.engines import apart, inductor  # noqa: E402
from leanstep.engines.apart import Dropper, Rebuild  # noqa: E402
from leanstep.engines.inductor import PRECISE, CompiledForm  # noqa: E402
from leanstep.engines.joint import LostNodeError  # noqa: E402
from leanstep.forms import costs  # noqa: E402
from leanstep.forms.capture import capture  # noqa: E402
from leanstep.forms.cuts import Candidate, candidates_apart, seeds_kept, unplanned  # noqa: E402
from leanstep.forms.kinds import Example  # noqa: E402
from leanstep.forms.trial import Trial  # noqa: E402
from leanstep.models.resnet import Bottleneck  # noqa: E402

# Dynamo looks at the gradient of every tensor it is given.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("without_compiler"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        inner = torch.tanh(self.up(self.norm(x)))
        inner = torch.nn.functional.dropout(inner, 0.25)
        return x + self.down(inner.sin() * inner)


@pytest.fixture
def joint():
    torch.manual_seed(0)
    module, x = Block(), torch.randn(8, 16, requires_grad=True)
    found = capture(Example(module, (), (x,), {}, ()), PRECISE)
    return module, x, found


def forms(found):
    """The unplanned form, and those that keep less and rebuild the rest."""
    whole = seeds_kept(found)
    first = Candidate("unplanned", whole, 10**9, 0.0)
    seconds = dict.fromkeys(found.forward, 1e-6)
    return whole, candidates_apart(found, seconds, first, 4)


def run(form, module, x, seed=3):
    torch.manual_seed(seed)
    out = form(module, (x,), {})
    grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    return [out.detach(), *grads]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_every_smaller_set_gives_the_bits_of_the_whole(joint):
    module, x, found = joint
    whole, smaller = forms(found)
    wanted = run(CompiledForm(Block.forward, whole, PRECISE), module, x)
    assert smaller
    for one in smaller:
        form = CompiledForm(Block.forward, one.kept, PRECISE, whole)
        assert set(one.kept) < set(whole) == set(one.whole)
        assert equal(wanted, run(form, module, x)), one
        assert form.runs == form.captures == 1


def test_what_is_dropped_is_not_among_what_is_held(joint):
    module, x, found = joint
    whole, smaller = forms(found)
    trial = Trial(Example(module, (), (x,), {}, ()), torch.device("cpu"))
    full = trial.measure(CompiledForm(Block.forward, whole, PRECISE))
    for one in smaller:
        figures = trial.measure(CompiledForm(Block.forward, one.kept, PRECISE, whole))
        assert figures.exact and figures.holds_arguments
        assert sum(figures.saves) < sum(full.saves)
        # It comes back for backward, all at once.
        assert figures.backward_rise_bytes > full.backward_rise_bytes


class Masked(nn.Module):
    """With a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.inner, self.masks = nn.Linear(16, 16), [torch.randn(8, 16)]

    def forward(self, x):
        return torch.tanh(self.inner(x) + self.masks[0]).sin()


def test_what_a_module_holds_anyway_is_not_counted_where_a_rebuild_reads_it():
    module, x = Masked(), torch.randn(8, 16, requires_grad=True)
    example = Example(module, (), (x,), {}, ())
    whole, smaller = forms(capture(example, PRECISE))
    trial = Trial(example, torch.device("cpu"))
    full = trial.measure(CompiledForm(Masked.forward, whole, PRECISE))
    figures = trial.measure(CompiledForm(Masked.forward, smaller[-1].kept, PRECISE, whole))
    assert sum(figures.saves) == 0 < sum(full.saves)


def test_a_graph_that_is_kept_is_rebuilt_each_time(joint):
    module, x, found = joint
    whole, smaller = forms(found)
    form = CompiledForm(Block.forward, smaller[-1].kept, PRECISE, whole)
    out = form(module, (x,), {}).sum()
    first, again = (torch.autograd.grad(out, [x], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_a_rebuild_runs_in_the_precision_that_forward_had(joint, monkeypatch):
    module, x, found = joint
    whole, smaller = forms(found)
    seen = []

    def compile_alone(graph, settings):
        def rebuild(inputs):
            seen.append(torch.get_float32_matmul_precision())
            return graph.forward(*inputs)

        return rebuild

    monkeypatch.setattr(CompiledForm, "compile_alone", staticmethod(compile_alone))
    form = CompiledForm(Block.forward, smaller[-1].kept, PRECISE, whole)
    torch.set_float32_matmul_precision("medium")
    try:
        out = form(module, (x,), {})
    finally:
        torch.set_float32_matmul_precision("highest")
    out.sum().backward()
    assert seen == ["medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_write_to_what_a_rebuild_starts_from_is_seen(joint):
    module, x, found = joint
    whole, smaller = forms(found)
    form = CompiledForm(Block.forward, smaller[-1].kept, PRECISE, whole)
    given = x.detach().clone().requires_grad_()
    out = form(module, (given,), {})
    with torch.no_grad():
        given.mul_(2.0)
    # Autograd sees it itself: nothing of ours stands between.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_who_does_not_drop_leaves_every_save_to_the_user_s_hooks(joint):
    module, x, found = joint
    whole, smaller = forms(found)
    form = CompiledForm(Block.forward, smaller[-1].kept, PRECISE, whole)
    wanted = run(form, module, x)
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = form(module, (x,), {}, is_dropping=False)
    grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
    assert len(seen) >= len(whole)
    assert equal(wanted, [out.detach(), *grads])


def test_masks_are_drawn_again_from_their_seeds_and_not_kept(joint):
    _, _, found = joint
    drawn = {n.name for n in found.nodes if str(n.target).startswith("prims.inductor_seeds")}
    masks = {n.name for n in found.nodes if str(n.target).startswith("aten.gt")}
    # Without Inductor's passes dropout is an op that must not run twice.
    if drawn:
        assert drawn & set(seeds_kept(found)) and not masks & set(seeds_kept(found))


def test_what_must_not_run_twice_is_kept(joint):
    _, _, found = joint
    whole, smaller = forms(found)
    fixed = {node.name for node in found.fixed}
    for one in smaller:
        assert fixed & set(whole) <= set(one.kept)
    lost = [name for name in whole if name in fixed]
    if lost:
        with pytest.raises(LostNodeError, match="must not be computed again"):
            found.apart(whole, [name for name in whole if name not in lost])


def test_a_rebuild_draws_nothing_that_it_does_not_need(joint):
    module, x, _ = joint
    with torch._inductor.config.patch(fallback_random=True):
        found = capture(Example(module, (), (x,), {}, ()), PRECISE)
        whole, smaller = forms(found)
        for one in smaller:
            out = CompiledForm(Block.forward, one.kept, PRECISE, whole)(module, (x,), {})
            state = torch.get_rng_state()
            out.sum().backward()
            assert torch.equal(state, torch.get_rng_state()), one


class Overlapping(nn.Module):
    """Two buffers of one storage, of which one is written: to the compiler they are one input."""

    def __init__(self):
        super().__init__()
        both = torch.zeros(32)
        self.register_buffer("count", both[:20])
        self.register_buffer("scale", both[16:])
        self.first, self.second = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, x):
        self.count.add_(1.0)
        y = x * (self.scale + 1.0)
        return torch.sin(torch.tanh(y * self.first) * self.second)


def test_inputs_that_the_compiler_has_numbered_anew_are_not_mistaken():
    x = torch.randn(8, 16, requires_grad=True)
    found = capture(Example(Overlapping(), (), (x,), {}, ()), PRECISE)
    whole, smaller = forms(found)
    wanted = run(CompiledForm(Overlapping.forward, whole, PRECISE), Overlapping(), x)
    assert smaller
    for one in smaller:
        form = CompiledForm(Overlapping.forward, one.kept, PRECISE, whole)
        assert equal(wanted, run(form, Overlapping(), x)), one


def test_a_rebuild_gets_and_gives_layouts_as_they_were_compiled():
    def forward(arguments):
        (x,) = arguments
        # As Inductor lays out what convolutions make: channels last.
        across = x.t().contiguous().t()
        return [x.clone(), across, across * 2.0]

    def rebuilt(tensors):
        (source,) = tensors
        assert source.stride() == (3, 1)
        return [source * 2.0]

    def backward(arguments):
        _, doubled, gradient = arguments
        assert doubled.stride() == (1, 4)
        return [gradient * doubled]

    drop, make_whole = wrapped(Rebuild((2,), (1,), (0,), ((3, 1),), rebuilt))
    x, gradient = torch.randn(4, 3), torch.randn(4, 3)
    _, *saved = drop(forward)([x])
    assert saved[1].numel() == 0
    (found,) = make_whole(backward)([*saved, gradient])
    assert torch.equal(found, gradient * x * 2.0)


def test_nobody_holds_what_backward_lets_go_of_what_was_rebuilt():
    def rebuilt(tensors):
        return [tensors.pop() * 2.0]

    def backward(arguments):
        doubled = weakref.ref(arguments[1])
        arguments.clear()
        return [doubled() is None]

    drop, make_whole = wrapped(Rebuild((2,), (1,), (0,), ((1,),), rebuilt))
    _, *saved = drop(lambda arguments: [*arguments, *arguments, arguments[0] * 2.0])(
        [torch.ones(3)]
    )
    assert make_whole(backward)([*saved, torch.ones(3)]) == [True]


def wrapped(rebuild):
    """What makes programs of forward and backward those that drop and rebuild."""
    dropper = Dropper(lambda: True)
    dropper.rebuild = rebuild
    graph = torch.fx.symbolic_trace(lambda x: (x,))
    return dropper.wrapped(graph, False), dropper.wrapped(graph, True)


def test_settings_that_two_threads_note_at_once_keep_their_numbers(monkeypatch):
    monkeypatch.setattr(apart, "_settings", [])
    monkeypatch.setattr(apart, "_notes", {})
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    every = [[(thread, number) for number in range(2000)] for thread in range(4)]
    try:
        with ThreadPoolExecutor(len(every)) as pool:
            notes = list(pool.map(lambda own: list(map(apart._note_of, own)), every))
    finally:
        sys.setswitchinterval(interval)
    for own, noted in zip(every, notes, strict=True):
        assert [apart._settings[note.shape[0]] for note in noted] == own


def test_nothing_of_autograd_s_is_hooked_to_drop(joint, monkeypatch):
    module, x, found = joint
    whole, smaller = forms(found)
    wanted = run(CompiledForm(Block.forward, whole, PRECISE), module, x)

    def refused(*_):
        raise AssertionError("hooks cost the host some microseconds for each save")

    monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__enter__", refused)
    form = CompiledForm(Block.forward, smaller[-1].kept, PRECISE, whole)
    assert equal(wanted, run(form, module, x))


class _OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.product = torch.mm(x, weight)
        ctx.save_for_backward(x, weight)
        return ctx.product.sin()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        inner = gradient * ctx.product.cos()
        return inner @ weight.t(), x.t() @ inner


class WithContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return _OnContext.apply(torch.tanh(self.inner(x)), self.weight)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_a_function_puts_on_its_context_is_not_counted_among_saves():
    module, x = WithContext(), torch.randn(8, 16, requires_grad=True)
    found = capture(Example(module, (), (x,), {}, ()), PRECISE)
    whole, smaller = forms(found)
    wanted = run(CompiledForm(WithContext.forward, whole, PRECISE), module, x)
    assert smaller
    for one in smaller:
        form = CompiledForm(WithContext.forward, one.kept, PRECISE, whole)
        assert equal(wanted, run(form, module, x)), one


class _OnContextWithInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class WithInputOnContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return torch.tanh(_OnContextWithInput.apply(x, self.weight)).sin()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_nothing_is_rebuilt_of_an_input_that_autograd_does_not_watch():
    x = torch.randn(8, 16, requires_grad=True)
    found = capture(Example(WithInputOnContext(), (), (x,), {}, ()), PRECISE)
    whole, smaller = forms(found)
    with pytest.raises(LostNodeError, match="nobody would see a write"):
        found.apart(whole, smaller[-1].kept)


def test_compiled_autograd_looks_past_rebuilds_and_is_told_before():
    from torch._dynamo import compiled_autograd

    assert inductor.obstacle(rebuilds=True) is None
    with compiled_autograd._enable(lambda graph: graph):
        assert "compiled autograd is on" in inductor.obstacle(rebuilds=True)
        assert inductor.obstacle(rebuilds=False) is None


def test_statistics_and_casts_are_rebuilt_in_the_smallest_form_alone():
    module, x = Bottleneck(64, 16, 1), torch.randn(16, 64, 14, 14, dtype=torch.bfloat16)
    autocast = (("cpu", True, torch.bfloat16),)
    joint = capture(Example(module, (), (x.requires_grad_(),), {}, autocast), {})
    whole = unplanned(joint)
    seconds = {n: 1e-6 * 10 ** str(n.target).count("convolution") for n in joint.forward}
    sizes = {name: costs.node_bytes(joint.by_name[name]) for name in whole.kept}
    tiny = {name for name, nbytes in sizes.items() if nbytes * 64 <= max(sizes.values())}

    *larger, least = candidates_apart(joint, seconds, whole, 6)
    assert len(tiny) > 6 and len(larger) > 1
    assert all(tiny <= set(candidate.kept) for candidate in larger)
    assert least.nbytes < min(candidate.nbytes for candidate in larger)
    assert tiny - set(least.kept)


class Tower(nn.Module):
    """One wide value, and many that are small by themselves and large together."""

    def __init__(self):
        super().__init__()
        self.small = nn.ModuleList(nn.Linear(16, 16) for _ in range(48))
        self.wide, self.back = nn.Linear(16, 1024), nn.Linear(1024, 16)

    def forward(self, x):
        for layer in self.small:
            x = torch.tanh(layer(x))
        return self.back(torch.tanh(self.wide(x)))


def test_many_small_values_are_not_tiny_together():
    x = torch.randn(2048, 16, requires_grad=True)
    found = capture(Example(Tower(), (), (x,), {}, ()), {})
    whole = unplanned(found)
    largest = max(map(costs.node_bytes, found.forward))
    # The wide ones are dear to rebuild, so it is the small ones that go.
    seconds = {n: 1e-6 if costs.node_bytes(n) < largest else 1.0 for n in found.forward}
    counts = [len(candidate.kept) for candidate in candidates_apart(found, seconds, whole, 6)]

    assert any(0 < count < len(whole.kept) / 2 for count in counts), counts


def test_a_forward_that_is_put_in_the_place_of_another_is_the_one_that_runs(monkeypatch):
    torch.manual_seed(0)
    model, batch = nn.Sequential(Block(), Block()), torch.randn(64, 16)

    def gradients():
        model.zero_grad()
        torch.manual_seed(3)
        model(batch).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def loss(model, batch):
        return model(batch).square().mean()

    profile = leanstep.profile(model, batch, loss, engine="inductor")
    applied = leanstep.apply(model, leanstep.plan(profile, profile.peak_bytes))
    before, forward = gradients(), Block.forward
    monkeypatch.setattr(Block, "forward", lambda self, x: 2 * forward(self, x))
    planned = gradients()
    applied.remove()
    expected = gradients()

    assert all(torch.allclose(a, b) for a, b in zip(planned, expected, strict=True))
    assert not torch.allclose(planned[0], before[0])
