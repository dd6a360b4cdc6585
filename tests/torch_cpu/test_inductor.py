"""Compiled blocks, by a backend that needs no compiler: all of leanstep's own code runs."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import leanstep  # noqa: E402
from leanstep import models  # noqa: E402
from leanstep.engines import inductor  # noqa: E402
from leanstep.engines.attach import detach, is_attached, original_class  # noqa: E402
from leanstep.forms import compiled as forms_compiled  # noqa: E402
from leanstep.ir import Engine, Link  # noqa: E402
from leanstep.ir.plan import check_plan  # noqa: E402
from leanstep.simulator import simulate  # noqa: E402
from leanstep.torch_private import compiler as torch_compiler  # noqa: E402

# Dynamo looks at the gradient of every tensor it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

WIDTH = 48


@pytest.fixture(scope="module", autouse=True)
def without_compiler():
    with pytest.MonkeyPatch.context() as patch:
        plain = staticmethod(torch_compiler.compile_to_python)
        patch.setattr(inductor.CompiledForm, "compile_graph", plain)
        alone = staticmethod(torch_compiler.compile_alone_to_python)
        patch.setattr(inductor.CompiledForm, "compile_alone", alone)
        patch.setattr(forms_compiled, "MOST_FORMS", 4)
        patch.setattr(forms_compiled, "MOST_FORMS_OF_MANY", 4)
        inductor.compiled_form.cache_clear()
        yield
    inductor.compiled_form.cache_clear()


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, scale=1.0):
        inner = torch.tanh(self.up(self.norm(x))) * scale
        return x + self.dropout(self.down(inner.sin() * inner))


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack_of(number, kind=Block):
    torch.manual_seed(1)
    return Stack(*(kind() for _ in range(number)))


def rows(number=64):
    torch.manual_seed(2)
    return torch.randn(number, WIDTH)


def step_of(model, batch):
    torch.manual_seed(3)
    loss = model(batch)
    loss.backward()
    found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return [*found, torch.get_rng_state()]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def profiled(without_compiler):
    """A small model with its compiled profile."""
    model, batch = stack_of(4), rows()
    profile = leanstep.profile(model, batch, engine="inductor")
    assert not profile.exclusions
    return model, batch, profile


@pytest.fixture(autouse=True)
def left_as_found(profiled):
    """A failed test shall not spoil the next one."""
    yield
    model, _, _ = profiled
    for module in model.modules():
        detach(module)
    model.train()
    model.zero_grad()


def captures_of(fitted, model):
    """How often the forms that a plan uses were captured: trials and steps must look alike."""
    found = set()
    for decision in fitted.plan.decisions:
        kind = fitted.plan.kind_of(decision)
        forward = original_class(model.get_submodule(decision.path)).forward
        form = kind.form(decision.form)
        names = form.kept, form.whole
        how = {"precise": True, "joins_kernels": False}
        found.add(inductor.compiled_form(forward, kind.name, *names, **how).captures)
    return found


def lean(profiled, share=0.75):
    """The plan that keeps about so much of what compiled blocks may free."""
    _, _, profile = profiled
    floor = leanstep.frontier(profile, solvers=["optimal"], points=2).floors[0][1]
    return leanstep.plan(profile, int(floor + share * (profile.peak_bytes - floor)))


def test_equal_blocks_are_one_kind_and_share_one_capture(profiled):
    model, batch, profile = profiled
    (kind,) = profile.kinds
    assert [block.kind for block in profile.blocks] == [0] * 4
    applied = leanstep.apply(model, leanstep.plan(profile, profile.peak_bytes))
    step_of(model, batch)
    applied.remove()
    names = kind.unplanned.kept, ()
    how = {"precise": True, "joins_kernels": False}
    first = inductor.compiled_form(Block.forward, kind.name, *names, **how)
    assert first.captures == 1
    assert first.runs > 4


def test_forms_are_measured_and_none_beats_another(profiled):
    _, _, profile = profiled
    (kind,) = profile.kinds
    assert len(kind.forms) >= 2
    assert all(form.exact for form in kind.forms)
    kept = [form.kept_bytes for form in kind.forms]
    assert kept == sorted(kept, reverse=True)
    assert not any(a.is_beaten_by(b) for a in kind.forms[1:] for b in kind.forms)


def test_the_condensed_step_has_one_op_for_each_pass_of_a_block(profiled):
    _, _, profile = profiled
    names = [op.name for op in profile.graph.ops]
    assert names.count("compiled.Block") == 2 * 4
    assert profile.is_compiled


def test_a_planned_step_has_the_bits_of_the_unplanned_compiled_one(profiled):
    model, batch, _ = profiled
    plan = lean(profiled)
    assert {d.engine for d in plan.decisions} == {Engine.INDUCTOR}
    applied = leanstep.apply(model, plan)
    try:
        planned = step_of(model, batch)
        with applied.paused():
            unplanned = step_of(model, batch)
    finally:
        applied.remove()
    assert any(d.dropped_bytes > 0 for d in plan.decisions)
    assert equal(planned, unplanned)


@pytest.mark.parametrize(
    ("name", "sizes", "budget"),
    [
        ("bert-tiny", {"batch": 8}, "85%"),
        ("gpt2-tiny", {"batch": 8, "autocast": "bf16"}, "85%"),
        # Batch norm writes its statistics: without Inductor's decompositions it is never repeated.
        ("resnet-tiny", {"batch": 4}, "99%"),
    ],
)
def test_fit_keeps_promise_and_numbers(name, sizes, budget):
    model, batch, loss, _ = models.build(name, **sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, engine="inductor", budget=budget)
    verdict = fitted.verdict
    assert verdict.exact, verdict.different
    assert verdict.within_budget
    assert verdict.measured_peak_bytes <= verdict.predicted_peak_bytes * 1.001
    assert verdict.predicted_peak_bytes <= 1.05 * verdict.measured_peak_bytes
    assert captures_of(fitted, model) == {1}
    assert list(model.state_dict()) == keys
    assert "inductor" in str(fitted)
    fitted.remove()
    assert not any(is_attached(module) for module in model.modules())


def test_a_saved_plan_is_applied_to_a_fresh_model(profiled, tmp_path):
    _, batch, _ = profiled
    plan = lean(profiled)
    plan.save(tmp_path / "plan.json")
    loaded = leanstep.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    model = stack_of(4)
    applied = leanstep.apply(model, loaded, batch)
    planned = step_of(model, batch)
    with applied.paused():
        assert equal(planned, step_of(model, batch))
    applied.remove()


def test_a_profile_survives_the_disk(profiled, tmp_path):
    _, _, profile = profiled
    profile.save(tmp_path / "profile.json")
    loaded = leanstep.Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert leanstep.plan(loaded, "100%") == leanstep.plan(profile, "100%")


def test_verify_compares_with_the_unplanned_compiled_step(profiled):
    model, batch, _ = profiled
    verdict = leanstep.verify(model, batch, plan=lean(profiled))
    assert verdict.exact
    assert verdict.within_budget


def test_copies_and_pickles_know_nothing_of_the_plan(profiled):
    model, batch, _ = profiled
    applied = leanstep.apply(model, lean(profiled))
    twin = copy.deepcopy(model)
    assert type(twin.blocks[0]) is Block
    assert pickle.loads(pickle.dumps(twin.blocks[0])) is not None
    applied.remove()
    assert type(model.blocks[0]) is Block
    assert equal(step_of(model, batch), step_of(twin, batch))


def test_without_gradients_the_user_s_own_code_runs(profiled):
    model, batch, _ = profiled
    model.eval()
    plain = model(batch)
    applied = leanstep.apply(model, lean(profiled))
    with torch.no_grad():
        assert torch.equal(model(batch), plain)
    applied.remove()
    model.train()


def test_hooks_around_a_call_see_what_is_kept(profiled):
    model, batch, profile = profiled
    plan = lean(profiled, share=0.0)
    (kind,) = profile.kinds
    form = kind.form(plan.decisions[0].form)
    applied = leanstep.apply(model, plan)
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = batch.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.blocks[0](x)
    own = {t.untyped_storage().data_ptr() for t in (x, out, *model.parameters())}
    assert sum(nbytes for address, nbytes in seen.items() if address not in own) == form.kept_bytes
    out.sum().backward()
    applied.remove()
    model.zero_grad()


def test_a_checkpoint_of_the_user_s_around_a_planned_block_works(profiled):
    model, batch, _ = profiled
    applied = leanstep.apply(model, lean(profiled))
    plain = step_of(model, batch)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(3)
    loss = Around()(batch)
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    applied.remove()
    assert equal(plain[1:-1], grads)


def test_under_a_dispatch_mode_a_block_runs_twice_and_says_so(profiled):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, batch, profile = profiled
    (kind,) = profile.kinds
    plan = lean(profiled)
    applied = leanstep.apply(model, plan)
    before = step_of(model, batch)
    planned = kind.form(plan.decisions[0].form)
    form = inductor.compiled_form(
        Block.forward, kind.name, planned.kept, planned.whole, precise=True, joins_kernels=False
    )
    runs = form.runs
    with Watching(), pytest.warns(UserWarning, match="a dispatch mode is active"):
        model(batch).backward()
    assert form.runs == runs
    model.zero_grad()
    assert equal(before, step_of(model, batch))
    assert form.runs > runs
    applied.remove()


def test_a_graph_break_leaves_a_block_eager_and_named():
    class Breaking(Block):
        def forward(self, x):
            if float(x.detach().sum()) > 1e9:
                return x
            return super().forward(x)

    torch.manual_seed(1)
    model = Stack(Block(), Breaking(), Block(), Breaking())
    profile = leanstep.profile(model, rows(), engine="inductor")
    assert {one.path for one in profile.exclusions} == {"blocks.1", "blocks.3"}
    plan = leanstep.plan(profile, "100%")
    assert any("not compiled: blocks.1 and blocks.3" in n or "blocks.1" in n for n in plan.notes)
    assert {d.engine for d in plan.decisions if d.path in ("blocks.1", "blocks.3")} == {
        Engine.UNTOUCHED
    }


def test_a_sequential_is_captured(profiled):
    torch.manual_seed(1)
    parts = [nn.Sequential(nn.Linear(WIDTH, 192), nn.GELU(), nn.Linear(192, WIDTH), nn.Tanh())]
    model = Stack(*parts, copy.deepcopy(parts[0]))
    profile = leanstep.profile(model, rows(), engine="inductor")
    assert any(block.is_compiled for block in profile.blocks)
    fitted = leanstep.fit(model, rows(), engine="inductor", budget="95%")
    assert fitted.verdict.exact
    fitted.remove()


@pytest.fixture
def forgetful():
    """A compiler that knows nothing yet, and nothing afterwards."""
    torch._dynamo.reset()
    inductor.compiled_form.cache_clear()
    yield
    torch._dynamo.reset()
    inductor.compiled_form.cache_clear()


def test_other_shapes_are_captured_anew_and_beyond_the_limit_run_twice(profiled, forgetful):
    model, _, _ = profiled
    applied = leanstep.apply(model, lean(profiled))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(10, 20):
            step_of(model, rows(number))
    said = [str(one.message) for one in caught if "uncompiled" in str(one.message)]
    applied.remove()
    assert len(said) == 1
    assert "this is the ninth" in said[0]


def test_evaluation_with_gradients_is_not_run_by_a_plan_for_training(profiled):
    model, batch, _ = profiled
    applied = leanstep.apply(model, lean(profiled))
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = step_of(model, batch)
    applied.remove()
    plain = step_of(model, batch)
    model.train()
    for a, b in zip(planned, plain, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=1e-5)


def test_a_block_called_several_times_follows_its_decisions():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.other = Block(), Block()

        def forward(self, x):
            for _ in range(3):
                x = self.other(self.block(x))
            return x.square().mean()

    torch.manual_seed(1)
    model, batch = Twice(), rows()
    fitted = leanstep.fit(model, batch, engine="inductor", budget="85%")
    assert len(fitted.plan.decisions) == 6
    assert fitted.verdict.exact
    for _ in range(2):
        planned = step_of(model, batch)
        with fitted.applied.paused():
            assert equal(planned, step_of(model, batch))
    fitted.remove()


def test_marks_and_overrides_have_the_last_word(profiled):
    _, _, profile = profiled
    (kind,) = profile.kinds
    wanted = {"blocks.0": "recompute", "blocks.1": "keep"}
    plan = leanstep.plan(profile, "100%", overrides=wanted)
    forms = {decision.path: decision.form for decision in plan.decisions}
    assert forms["blocks.0"] == kind.forms[-1].name
    assert forms["blocks.1"] == kind.unplanned.name
    lowest = lean(profiled, share=0.0)
    with pytest.raises(leanstep.BudgetError, match=r"blocks.*keep"):
        leanstep.plan(profile, lowest.peak_bytes, overrides={"blocks.*": "keep"})


def test_engines_and_profiles_must_match(profiled):
    model, batch, profile = profiled
    with pytest.raises(leanstep.LeanstepError, match="profile with engine='inductor'"):
        leanstep.plan(leanstep.profile(model, batch), engine="inductor")
    with pytest.raises(leanstep.LeanstepError, match="compiled step"):
        leanstep.plan(profile, engine="replay")
    with pytest.raises(leanstep.LeanstepError, match="no engine is called"):
        leanstep.profile(model, batch, engine="fast")


def test_no_setting_of_torch_is_changed(profiled):
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    before = functorch_config.get_config_copy(), inductor_config.get_config_copy()
    model, batch, _ = profiled
    fitted = leanstep.fit(model, batch, engine="inductor", budget="90%")
    assert before == (functorch_config.get_config_copy(), inductor_config.get_config_copy())
    fitted.remove()


def with_link(profile):
    """The same on a device with a fast link, where the forms that keep less take longer."""
    (kind,) = profile.kinds
    forms = tuple(
        replace(form, forward_seconds=1e-3, backward_seconds=1e-3 * (1 + number))
        for number, form in enumerate(kind.forms)
    )
    link = Link(1e12, 1e12, 1 << 40)
    return replace(profile, link=link, kinds=(replace(kind, forms=forms),))


def test_what_compiled_blocks_keep_may_wait_on_the_host(profiled, monkeypatch):
    model, batch, profile = profiled
    monkeypatch.setattr("leanstep.planner.whole.LEAST_SECONDS", 0.0)
    linked = with_link(profile)
    plan = leanstep.plan(linked, "94%")
    assert plan.host_bytes > 0
    assert any(decision.offload for decision in plan.decisions)
    check_plan(plan)
    assert simulate(linked, plan).peak_bytes == plan.peak_bytes <= plan.budget_bytes
    dear = leanstep.plan(replace(linked, copy_seconds=1e-6), "94%")
    assert any(decision.offload for decision in dear.decisions)
    by_decision = sum(decision.extra_seconds for decision in dear.decisions)
    assert by_decision == pytest.approx(dear.extra_seconds, rel=1e-9)
    unplanned = leanstep.apply(model, leanstep.plan(profile, "100%"))
    expected = [step_of(model, batch) for _ in range(3)]
    unplanned.remove()
    applied = leanstep.apply(model, plan)
    got = [step_of(model, batch) for _ in range(3)]
    applied.remove()
    assert all(equal(a, b) for a, b in zip(expected, got, strict=True))


def test_hooks_that_park_do_not_compile_anew(profiled, monkeypatch):
    model, batch, profile = profiled
    monkeypatch.setattr("leanstep.planner.whole.LEAST_SECONDS", 0.0)
    plan = leanstep.plan(with_link(profile), "94%")
    applied = leanstep.apply(model, plan)
    step_of(model, batch)
    captured = []
    monkeypatch.setattr(
        inductor.CompiledForm, "compile_graph", staticmethod(lambda *parts: captured.append(parts))
    )
    for _ in range(3):
        step_of(model, batch)
    applied.remove()
    assert captured == []
