"""Compiled blocks that the CPU issues late have kernels joined, if that changes no bit."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import leanstep  # noqa: E402
from leanstep.engines import inductor  # noqa: E402
from leanstep.forms import compiled as forms_compiled  # noqa: E402
from leanstep.forms.trial import Trial  # noqa: E402
from leanstep.torch_private import compiler as torch_compiler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

WIDTH = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        inner = torch.tanh(self.up(x))
        return x + self.down(inner.sin() * inner)


def model_of(number=3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(number))))


def loss_of(model, batch):
    return model(batch).square().mean()


class Compiler:
    """Takes the place of Inductor, and can do to joined kernels what that might do."""

    def __init__(self):
        self.settings = []
        self.spoil = None
        self.spared = 0

    def compile_graph(self, graph, inputs, partition, key, settings, wrap=None):
        self.settings.append(settings)
        if self.spoil and sum(self.are_joined) > self.spared and "combo_kernels" in settings:
            graph = self.spoil(graph)
        given = (graph, inputs, partition, key, settings, wrap)
        return torch_compiler.compile_to_python(*given)

    @property
    def are_joined(self):
        return [bool(settings.get("combo_kernels")) for settings in self.settings]


@pytest.fixture
def compiler(monkeypatch):
    found = Compiler()
    monkeypatch.setattr(inductor.CompiledForm, "compile_graph", found.compile_graph)
    alone = staticmethod(torch_compiler.compile_alone_to_python)
    monkeypatch.setattr(inductor.CompiledForm, "compile_alone", alone)
    monkeypatch.setattr(forms_compiled, "MOST_FORMS", 4)
    inductor.compiled_form.cache_clear()
    yield found
    inductor.compiled_form.cache_clear()


def race_to(monkeypatch, share):
    """Let joined kernels take so much of the time of the separate ones."""
    race = Trial.race

    def raced(self, forms):
        are_joined = ["combo_kernels" in form._settings for form in forms]
        is_choice = are_joined == [False, True]
        return [(1.0, 1.0), (share, share)] if is_choice else race(self, forms)

    monkeypatch.setattr(Trial, "race", raced)


@pytest.fixture
def late(monkeypatch):
    """A device that runs every block sooner than the CPU issues it, and joined ones as soon."""
    monkeypatch.setattr(Trial, "is_issued_late", lambda self, form: True)
    race_to(monkeypatch, 1.0)


def kind_of(model):
    batch = torch.randn(512, WIDTH)
    profile = leanstep.profile(model, batch, loss_of, engine="inductor")
    assert not profile.exclusions
    (kind,) = profile.kinds
    return kind


def test_a_cpu_that_is_early_has_nothing_joined(compiler):
    kind = kind_of(model_of())

    assert not kind.joins_kernels
    assert not any(compiler.are_joined)


def test_late_blocks_are_joined_in_every_form_and_in_the_step(compiler, late, tmp_path):
    model, batch = model_of(), torch.randn(512, WIDTH)
    fitted = leanstep.fit(model, batch, loss_of, engine="inductor", budget="80%")
    (kind,) = fitted.profile.kinds
    assert fitted.verdict.exact and kind.joins_kernels and not kind.num_inexact
    # The first of all stands for what the others must compute; a capture compiles nothing.
    _, first, *others = compiler.are_joined
    assert not first and all(others)
    fitted.remove()

    fitted.plan.save(tmp_path / "plan.json")
    inductor.compiled_form.cache_clear()
    compiler.settings.clear()
    applied = leanstep.apply(model, leanstep.Plan.load(tmp_path / "plan.json"))
    loss_of(model, batch).backward()
    applied.remove()
    assert compiler.settings and all(compiler.are_joined)


def raises(graph):
    raise RuntimeError("two kernels that draw cannot be joined")


def with_other_bits(graph):
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    results = output.args[0]
    with graph.graph.inserting_before(output):
        moved = graph.graph.call_function(torch.mul, (results[0], 1 + 2**-20))
    output.args = ((moved, *results[1:]),)
    graph.recompile()
    return graph


@pytest.mark.parametrize("spoil", [raises, with_other_bits])
def test_what_cannot_be_joined_or_has_other_bits_is_left_as_it_was(compiler, late, spoil):
    compiler.spoil = spoil
    kind = kind_of(model_of())

    assert not kind.joins_kernels and not kind.num_inexact
    assert len(kind.forms) > 1
    assert sum(compiler.are_joined) == 1


def test_whatever_joined_kernels_raise_the_form_stays_as_it_was(compiler, late, monkeypatch):
    measure = Trial.measure

    def measured(self, form):
        if "combo_kernels" in form._settings:
            raise KeyError("a name that the compiler has lost")
        return measure(self, form)

    monkeypatch.setattr(Trial, "measure", measured)
    kind = kind_of(model_of())

    assert not kind.joins_kernels
    assert len(kind.forms) > 1


def test_a_form_that_cannot_be_joined_has_its_kind_done_again_without(compiler, late):
    compiler.spoil, compiler.spared = raises, 1
    kind = kind_of(model_of())
    assert sum(compiler.are_joined) > 1

    assert not kind.joins_kernels
    assert len(kind.forms) > 1


@pytest.mark.parametrize(("after", "is_joined"), [(1.01, True), (1.03, False)])
def test_joined_kernels_may_take_the_device_as_good_as_no_longer(
    compiler, late, monkeypatch, after, is_joined
):
    measure = Trial.measure

    def higher_when_joined(self, form):
        figures = measure(self, form)
        rise = figures.backward_rise_bytes + 4096 * ("combo_kernels" in form._settings)
        return replace(figures, backward_rise_bytes=rise)

    expected = kind_of(model_of()).unplanned.backward_rise_bytes
    inductor.compiled_form.cache_clear()
    race_to(monkeypatch, after)
    monkeypatch.setattr(Trial, "measure", higher_when_joined)
    kind = kind_of(model_of())

    assert kind.joins_kernels is is_joined
    # The account is that of the form which runs.
    assert kind.unplanned.backward_rise_bytes == expected + 4096 * is_joined


@pytest.mark.parametrize(
    ("issued", "ran", "is_late"),
    [
        ((1.0, 1.0), (2.0, 2.0), False),
        ((3.0, 1.0), (2.0, 2.0), True),
        ((1.0, 3.0), (2.0, 2.0), True),
        ((3.0, 3.0), (2.0, 2.0), True),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_issued_after_it_could_have_run_is_late(monkeypatch, device, issued, ran, is_late):
    trial = object.__new__(Trial)
    trial.device = torch.device(device)
    monkeypatch.setattr(Trial, "_in_place", lambda self: nullcontext())
    monkeypatch.setattr(Trial, "_laps", lambda self, form: [ran] * 3)
    monkeypatch.setattr(Trial, "_issue_seconds", lambda self, form: issued)

    assert trial.is_issued_late(None) is (is_late and device == "cuda")
