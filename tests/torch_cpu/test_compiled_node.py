"""Compiled blocks in autograd's graph without torch's wrappers: same numbers, or torch's way."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from small_blocks import (  # noqa: E402
    PLAIN,
    TORCHS,
    Net,
    SavesView,
    Turned,
    TwoOutputs,
    WithNumber,
    example_of,
    form_of,
    rows,
)
from torch import nn  # noqa: E402
from torch._dynamo import convert_frame  # noqa: E402

from leanstep.engines import inductor, node  # noqa: E402
from leanstep.engines.inductor import CompiledForm  # noqa: E402
from leanstep.forms import cuts  # noqa: E402
from leanstep.forms.capture import capture  # noqa: E402
from leanstep.forms.kinds import Example  # noqa: E402
from leanstep.torch_private.nodes import Parts, is_plain  # noqa: E402
from leanstep.torch_private.tensors import tensor_use_count  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("without_compiler"),
]


def outcome(call, module, x, reduce=lambda out: out[0].square().sum()):
    """Numbers, gradients, buffers, how often they were written, and the random state."""
    torch.manual_seed(3)
    entered = x * 1
    out = call(module, entered)
    out = out if isinstance(out, tuple) else (out,)
    reduce(out).backward()
    found = [*(o.detach() for o in out), entered.detach(), x.grad, torch.get_rng_state()]
    found += [p.grad for p in module.parameters()] + [b.clone() for b in module.buffers()]
    versions = [b._version for b in module.buffers()] + [entered._version]
    needs = [o.requires_grad for o in out]
    return found, versions, needs


def same(some, others):
    pairs = zip(some[0], others[0], strict=True)
    equal = [a is b is None or (a is not None and torch.equal(a, b)) for a, b in pairs]
    return all(equal) and some[1:] == others[1:]


class Programs:
    """Looks at the arguments of every backward program."""

    def __init__(self, patch):
        self.layouts, self.holds = [], []
        original = CompiledForm.compile_graph

        def spied(graph, inputs, partition, key, settings, wrap=None):
            return original(graph, inputs, partition, key, settings, self.wrapped)

        patch.setattr(CompiledForm, "compile_graph", staticmethod(spied))

    def wrapped(self, graph, is_backward):
        return self.backward if is_backward else lambda run: run

    def backward(self, run):
        def look(arguments):
            mine = list(arguments)
            arguments.clear()
            self.layouts.append([(tensor.stride(), tensor._base is None) for tensor in mine])
            # By C++ and by Python; the list's own count in all of them. Who else has a weight
            # differs from day to day.
            others = (tensor for tensor in mine if not isinstance(tensor, nn.Parameter))
            self.holds += [(tensor_use_count(one), sys.getrefcount(one)) for one in others]
            return run(mine)

        return look


@pytest.fixture
def programs(monkeypatch):
    return Programs(monkeypatch)


class Ways:
    """How often a call has gone ours or torch's way."""

    def __init__(self, patch):
        self.ours = self.torchs = 0
        original = node.short_way

        def short_way(run, halves):
            def counted(*inputs):
                self.torchs += 1
                return run(*inputs)

            short = original(counted, halves)

            def call(*inputs):
                before = self.torchs
                out = short(*inputs)
                self.ours += self.torchs == before
                return out

            return call

        patch.setattr(inductor, "short_way", short_way)


@pytest.fixture
def ways(monkeypatch):
    return Ways(monkeypatch)


@pytest.mark.parametrize("kind", [*PLAIN, *TORCHS])
@pytest.mark.parametrize("rest", ["first", "all", "spread"])
def test_both_ways_have_the_same_numbers(kind, rest, ways, monkeypatch):
    example = example_of(kind)
    reduce = {
        "first": lambda out: out[0].square().sum(),
        "all": lambda out: sum(o.square().sum() for o in out if o.requires_grad),
        # A gradient without rows of its own.
        "spread": lambda out: out[0].sum(),
    }[rest]
    twin = copy.deepcopy(example.module)
    ours = form_of(example)
    found = outcome(lambda m, x: ours(m, (x,), {}), example.module, rows(), reduce)
    assert (ways.ours, ways.torchs) == ((1, 0) if kind in PLAIN else (0, 1))
    monkeypatch.setattr(inductor, "short_way", lambda run, halves: run)
    torchs = form_of(Example(twin, (), (rows() * 1,), {}, ()))
    assert same(found, outcome(lambda m, x: torchs(m, (x,), {}), twin, rows(), reduce))


# Products of what is turned round are summed in another order, by torch's compiler too.
@pytest.mark.parametrize("kind", [kind for kind in PLAIN if kind is not Turned])
def test_numbers_are_those_of_eager(kind, ways):
    example = example_of(kind)
    twin, form = copy.deepcopy(example.module), form_of(example)
    found = outcome(lambda m, x: form(m, (x,), {}), example.module, rows())
    assert ways.ours == 1
    (numbers, _, needs), expected = found, outcome(lambda m, x: m(x), twin, rows())
    assert same((numbers, needs), expected[::2])


def test_autocast_is_in_the_graph_and_off_around_it(ways):
    example = example_of(Net, (("cpu", True, torch.bfloat16),))
    twin, form = copy.deepcopy(example.module), form_of(example)

    def cast(call):
        with torch.autocast("cpu", torch.bfloat16):
            return call()

    found = outcome(lambda m, x: cast(lambda: form(m, (x,), {})), example.module, rows())
    assert ways.ours == 1
    assert same(found, outcome(lambda m, x: cast(lambda: m(x)), twin, rows()))


def test_backward_under_autocast_casts_nothing(ways):
    example = example_of(Net)
    twin, form = copy.deepcopy(example.module), form_of(example)
    x = rows()
    out = form(example.module, (x,), {})
    with torch.autocast("cpu", torch.bfloat16):
        out.sum().backward()
    assert ways.ours == 1
    twin(twin_x := rows()).sum().backward()
    assert torch.equal(x.grad, twin_x.grad)


def test_a_saved_tensor_that_was_written_is_noticed():
    example = example_of(Net)
    x = rows()
    out = form_of(example)(example.module, (entered := x * 1,), {})
    entered.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.fixture
def written_over(monkeypatch):
    """Have backward programs write over all that they may."""
    num_written, original = [], node._node_of

    def node_of(halves):
        def backward(arguments):
            mine = list(arguments)
            gradients = halves.backward(arguments)
            for place in halves.donated:
                mine[place].fill_(7.0)
            num_written.append(len(halves.donated))
            return gradients

        return original(replace(halves, backward=backward))

    monkeypatch.setattr(node, "_node_of", node_of)
    return num_written


def test_a_graph_that_is_kept_keeps_what_backward_writes_into(ways, written_over):
    example = example_of(SavesView)
    twin, x, twin_x = copy.deepcopy(example.module), rows(), rows()
    unplanned = cuts.unplanned(capture(example, {})).kept
    out = CompiledForm(example.subject[1], unplanned, {})(example.module, (x * 1,), {})
    assert ways.ours == 1
    expected = torch.autograd.grad(twin(twin_x * 1).sum(), [twin_x, *twin.parameters()])
    for is_last in (False, False, True):
        own = [x, *example.module.parameters()]
        found = torch.autograd.grad(out.sum(), own, retain_graph=not is_last)
        assert all(map(torch.equal, found, expected))
    assert min(written_over) > 0
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), [x])


def test_second_derivatives_raise_instead_of_being_left_out(ways):
    example = example_of(Net)
    x = rows()
    out = form_of(example)(example.module, (x,), {})
    (gradient,) = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
    assert ways.ours == 1
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="differentiated once, not twice"):
        gradient.sum().backward()


def test_algorithms_of_backward_are_those_that_forward_was_compiled_with():
    example = example_of(Net)
    out = form_of(example)(example.module, (rows(),), {})
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="call it before forward"):
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_autograd_gets_the_function_it_knows(ways, monkeypatch):
    example = example_of(Net)
    form = form_of(example)
    form(example.module, (rows(),), {})
    assert (ways.ours, ways.torchs) == (1, 0)
    monkeypatch.setattr(node, "is_backward_compiled", lambda: True)
    form(example.module, (rows(),), {})
    assert (ways.ours, ways.torchs) == (1, 1)


def test_an_unread_version_of_torch_keeps_its_wrappers(ways, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    example = example_of(Net)
    form_of(example)(example.module, (rows(),), {})
    assert (ways.ours, ways.torchs) == (0, 1)


@pytest.mark.parametrize("kind", [Net, TwoOutputs, SavesView, Turned])
def test_backward_gets_what_torch_would_hand_it_and_nothing_else_holds_it(
    kind, programs, monkeypatch
):
    def seen(module):
        form = form_of(Example(module, (), (rows() * 1,), {}, ()))
        out = form(module, (rows() * 1,), {})
        # Nothing is left of the step but its node, and a gradient without rows of its own.
        (out[0] if isinstance(out, tuple) else out).mul(1).sum().backward()
        found = programs.layouts.pop(), list(programs.holds)
        programs.holds.clear()
        return found

    layouts, holds = seen(kind())
    monkeypatch.setattr(inductor, "short_way", lambda run, halves: run)
    torchs_layouts, torchs_holds = seen(kind())
    assert layouts == torchs_layouts
    pairs = zip(holds, torchs_holds, strict=True)
    more = [(ours, torchs) for ours, torchs in pairs if ours[0] > torchs[0] or ours[1] > torchs[1]]
    assert not more


def test_graphs_as_hooks_are_torchs_to_inline(ways):
    pack = torch.fx.symbolic_trace(lambda tensor: tensor.to(torch.bfloat16))
    unpack = torch.fx.symbolic_trace(lambda tensor: tensor.to(torch.float32))

    def gradient():
        example = example_of(Net)
        form, x = form_of(example), rows()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = form(example.module, (x,), {})
        out.square().sum().backward()
        return x.grad

    found = gradient()
    assert (ways.ours, ways.torchs) == (0, 1)
    assert torch.equal(found, gradient())


class SwitchesOn(Net):
    def forward(self, x):
        with torch.enable_grad():
            return super().forward(x)


def test_a_block_may_switch_gradients_on_by_itself():
    example = example_of(SwitchesOn)
    form = form_of(example)
    with torch.no_grad():
        assert form(example.module, (rows(),), {}).requires_grad


def test_a_refused_backward_can_be_called_again():
    example = example_of(Net)
    x = rows()
    out = form_of(example)(example.module, (x,), {}).sum()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="call it before forward"):
            out.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    out.backward()
    assert x.grad is not None


def test_a_gradient_of_another_class_is_refused_by_its_name():
    class Odd(torch.Tensor):
        pass

    example = example_of(Net)
    out = form_of(example)(example.module, (rows(),), {})
    with pytest.raises(RuntimeError, match="gets a Odd for its gradient"):
        out.backward(torch.ones_like(out).as_subclass(Odd))


def test_a_step_that_is_compiled_as_a_whole_does_not_compile_our_node(ways, monkeypatch):
    example = example_of(Net)
    form = form_of(example)
    form(example.module, (rows() * 1,), {}).sum().backward()
    compiled = []
    original = convert_frame._compile

    def noted(code, *args, **kwargs):
        compiled.append(Path(code.co_filename))
        return original(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "_compile", noted)
    call = torch.compiler.disable(lambda x: form(example.module, (x,), {}))

    @torch.compile(backend="eager")
    def step(x):
        call(x * 2).square().sum().backward()

    for _ in range(2):
        step(rows())
    assert ways.ours == 3
    assert Path(__file__) in compiled
    # Those of leanstep lie two folders up from the node's.
    home = Path(node.__file__).parents[1]
    assert not [path for path in compiled if path.is_relative_to(home)]


def test_no_zeros_are_made_for_outputs_without_a_gradient(monkeypatch):
    seen, original = [], node._wanted

    def wanted(halves, gradients):
        seen.extend(gradient is None for gradient in gradients)
        return original(halves, gradients)

    monkeypatch.setattr(node, "_wanted", wanted)
    example = example_of(WithNumber)
    form_of(example)(example.module, (rows(),), {})[0].sum().backward()
    assert seen == [False, True, True]


@pytest.fixture
def metadata(monkeypatch):
    """What torch knows of a plain block, and the parts it was compiled from."""
    found = []
    original = Parts.halves

    def halves(self, num_inputs):
        found.append((self, num_inputs))
        return original(self, num_inputs)

    monkeypatch.setattr(Parts, "halves", halves)
    example = example_of(WithNumber)
    form_of(example)(example.module, (rows(),), {})
    parts, num_inputs = found[-1]
    assert original(parts, num_inputs) is not None
    return parts._metadata, lambda inputs: original(parts, inputs), num_inputs


ODD = {
    "grad_enabled_mutation": False,
    "subclass_inp_meta": [object()],
    "subclass_fw_graph_out_meta": [object()],
    "subclass_tangent_meta": [object()],
    "num_outputs_aliased": 1,
    "num_intermediate_bases": 1,
    "num_symints_saved_for_bw": 1,
    "num_tensors_saved_with_no_vc_check": 1,
    "num_mutated_inp_runtime_indices": 1,
    "is_rng_op_functionalized": True,
    "tokens": {"effect": object()},
    "act_input_indices": [0],
    "output_info": [],
}


@pytest.mark.parametrize("name", ODD)
def test_what_torchs_wrappers_see_to_is_left_to_them(name, metadata):
    known, _, _ = metadata
    assert is_plain(known)
    odd = copy.copy(known)
    setattr(odd, name, ODD[name])
    assert not is_plain(odd)


@pytest.mark.parametrize("name", ["output_type", "raw_type", "requires_grad_for_backward"])
def test_outputs_that_are_no_tensors_of_their_own_are_left_to_torch(name, metadata):
    known, _, _ = metadata
    odd = copy.copy(known)
    info = copy.copy(odd.output_info[0])
    strange = {
        "output_type": type(info.output_type).alias_of_input,
        "raw_type": int,
        "requires_grad_for_backward": not info.requires_grad,
    }
    object.__setattr__(info, name, strange[name])
    odd.output_info = [info, *odd.output_info[1:]]
    assert not is_plain(odd)


def test_inputs_that_torch_has_merged_are_left_to_it(metadata):
    _, halves, num_inputs = metadata
    assert halves(num_inputs) is not None
    assert halves(num_inputs + 1) is None
