"""Compiled blocks with Inductor itself: kernels of C++, fused otherwise in every form."""

import shutil

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import leanstep  # noqa: E402
from leanstep.engines import apart  # noqa: E402
from leanstep.engines.inductor import PRECISE, CompiledForm  # noqa: E402
from leanstep.forms import compiled as forms_compiled  # noqa: E402
from leanstep.forms import cuts  # noqa: E402
from leanstep.forms.capture import capture  # noqa: E402
from leanstep.forms.kinds import Example  # noqa: E402
from leanstep.torch_private import compiler as torch_compiler  # noqa: E402

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(inner))


class Stack(nn.Module):
    def __init__(self, autocast):
        super().__init__()
        torch.manual_seed(1)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.autocast = autocast

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.entry(x)
            for block in self.blocks:
                x = block(x)
        return x.float().square().mean()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_planned_kernels_compute_the_bits_of_the_unplanned_ones(monkeypatch, autocast):
    monkeypatch.setattr(forms_compiled, "MOST_FORMS", 2)
    monkeypatch.setattr(cuts, "FIRM_BUDGETS", (0.2,))
    model, batch = Stack(autocast), torch.randn(256, WIDTH)
    fitted = leanstep.fit(model, batch, engine="inductor", budget="75%")
    assert not fitted.profile.exclusions
    (kind,) = fitted.profile.kinds
    assert kind.forms[0].name.endswith("torch's choice")
    assert fitted.verdict.exact, fitted.verdict.different
    assert fitted.verdict.within_budget
    assert any(decision.dropped_bytes > 0 for decision in fitted.plan.decisions)
    fitted.remove()


def test_masks_that_torch_keeps_are_dropped_with_their_seeds_beside_them():
    torch.manual_seed(0)
    module, x = Block(), torch.randn(64, WIDTH, requires_grad=True)
    joint = capture(Example(module, (), (x,), {}, ()), PRECISE)
    first = cuts.unplanned(joint)
    whole = cuts.with_seeds(joint, first).kept
    masks = {node.name for node in joint.nodes if str(node.target).startswith("aten.gt")}
    without = tuple(name for name in whole if name not in masks)

    def run(kept, whole):
        torch.manual_seed(3)
        form = CompiledForm(Block.forward, kept, PRECISE, whole)
        out = form(module, (x,), {})
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    assert masks & set(first.kept)
    assert set(whole) - set(first.kept) == set(joint.seeds) != set()
    for unplanned, planned in zip(run(first.kept, ()), run(without, whole), strict=True):
        assert torch.equal(unplanned, planned)


class Sum(nn.Module):
    """A product and a sum, of which Inductor makes one node of its own in the place of both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(16, 16)),
            nn.Parameter(torch.randn(16, 16)),
        )

    def forward(self, x, y):
        inner = torch.mm(x, self.first) + y
        return torch.mm(inner.sin() * inner, self.second)


def test_what_is_dropped_is_found_where_inductor_has_renamed_it():
    module, inputs = Sum(), [torch.randn(8, 16, requires_grad=True) for _ in range(2)]
    joint = capture(Example(module, (), tuple(inputs), {}, ()), PRECISE)
    whole = cuts.seeds_kept(joint)
    assert "add" in whole
    forms = [
        CompiledForm(Sum.forward, whole, PRECISE),
        CompiledForm(Sum.forward, (), PRECISE, whole),
    ]
    results = []
    # What Inductor has in its cache it does not rename.
    with torch._inductor.config.patch(fx_graph_cache=False):
        for form in forms:
            out = form(module, tuple(inputs), {})
            grads = torch.autograd.grad(out.square().sum(), [*inputs, *module.parameters()])
            results.append([out, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Bottleneck(nn.Module):
    """Convolutions, which Inductor has save channels last whatever their inputs are."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x):
        return self.wide(self.narrow(x).relu()).relu() + x


def test_a_rebuild_takes_what_forward_saves_as_forward_lays_it_out(monkeypatch):
    torch.manual_seed(0)
    module, x = Bottleneck(), torch.randn(4, 16, 8, 8, requires_grad=True)
    joint = capture(Example(module, (), (x,), {}, ()), PRECISE)
    whole = cuts.seeds_kept(joint)
    products = [node.name for node in joint.nodes if "convolution.default" in str(node.target)]
    kept = tuple(name for name in whole if name in products[:1])
    sources = []
    rebuilt = apart.Dropper._rebuilt

    def seen(dropper, rebuild, arguments, settings):
        saved = [arguments[place].stride() for place in rebuild.sources]
        sources.extend(zip(saved, rebuild.strides, strict=True))
        return rebuilt(dropper, rebuild, arguments, settings)

    monkeypatch.setattr(apart.Dropper, "_rebuilt", seen)

    def run(kept, whole):
        form = CompiledForm(Bottleneck.forward, kept, PRECISE, whole)
        out = form(module, (x,), {})
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    unplanned, planned = run(whole, ()), run(kept, whole)

    assert all(torch.equal(a, b) for a, b in zip(unplanned, planned, strict=True))
    assert any(len(saved) == 4 and saved[1] == 1 for saved, _ in sources), "none channels last"
    assert all(saved == expected for saved, expected in sources)


def test_a_layout_that_depends_on_a_size_is_not_told_beforehand():
    class Compiled:
        output_strides = (("8", "1"), None, ("8*u0", "1"), ())

    assert torch_compiler.result_strides(Compiled()) == [(8, 1), None, None, ()]
    assert torch_compiler.result_strides(len) == []
