"""Cheap replays on the CPU: tried when profiling, run by the engine, with the same bits."""

import dataclasses
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import different

import leanstep
from leanstep.effects import replay_effect
from leanstep.engines.apply import apply
from leanstep.ir import Cost, Decision, Engine, Identity, Plan, Profile, RecipeCost
from leanstep.planner.cut import find_projects
from leanstep.profiler.recipes import dry_run, estimated, with_recipes
from leanstep.rebuild import recipes as table
from leanstep.rebuild.block import BlockGraph
from leanstep.rebuild.recipes import Recipe, usable_recipes
from leanstep.recorder import recipes as calls
from leanstep.recorder import record
from leanstep.recorder.blocks import find_blocks
from leanstep.recorder.recipes import RecipeCall
from leanstep.recorder.signatures import Signatures
from leanstep.simulator import plan_effects, simulate
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep
from leanstep.torch_private.modes import TorchDispatchMode
from leanstep.truth import peak_rise_bytes, resident_bytes

CPU = torch.device("cpu")
DROPOUT = "aten.native_dropout.default"
REBUILT = "aten.native_dropout_backward.default"


def dropout(x, rate: float = 0.3):
    return torch.native_dropout(x, rate, True)[0]


def residual(s, x):
    return s.norm(x + dropout(s.b(F.gelu(s.a(x)))))


def saved_output(s, x):
    return s.b(dropout(F.gelu(s.a(x))))


def two_draws(s, x):
    return s.b(dropout(s.a(x).sigmoid(), 0.2)) * dropout(x, 0.5)


def in_place_after(s, x):
    h = dropout(s.a(x))
    h.add_(1).mul_(2)
    return s.b(h.sigmoid()) * h


def input_overwritten(s, x):
    h = s.a(x)
    dropped = dropout(h)
    return s.b(dropped * h.mul_(2.0).sigmoid())


def autocast(s, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = s.a(x)
    return s.b(dropout(h.float()).tanh())


BODIES = [residual, saved_output, two_draws, in_place_after, input_overwritten, autocast]


class OpCounter(TorchDispatchMode):
    """Count the ops that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def profile_of(case) -> Profile:
    """A profile with recipes as the device has them, and times that make them worth it."""
    signatures = Signatures()
    model = case.fresh()
    step = TrainingStep(model, case.batch, case.loss, torch.optim.SGD(model.parameters(), lr=0.05))
    with untouched(step):
        step.run()
        graph = record(step, signatures)
    costs = [Cost(str(spec.func), 1.0) for spec in signatures.specs]
    return Profile(
        graph=graph,
        blocks=find_blocks(model, graph),
        costs=tuple(with_recipes(costs, signatures.specs, CPU)),
        step_seconds=1.0,
        other_bytes=0,
        peak_bytes=0,
        device="cpu",
        torch_version=torch.__version__,
        model=Identity(""),
    )


def is_mask(view: BlockGraph, storage: int) -> bool:
    return view.storage_key(storage).startswith(DROPOUT) and view.storage_key(storage)[-1] == "1"


def views_of(profile: Profile) -> list[BlockGraph]:
    return [
        BlockGraph(profile.graph, block, usable_recipes(profile, block, exact=True))
        for block in profile.blocks
    ]


def all_but_masks(view: BlockGraph) -> list[int]:
    return [storage for storage in view.candidates if not is_mask(view, storage)]


def everything(view: BlockGraph) -> list[int]:
    return list(view.candidates)


def some(seed: int):
    chance = random.Random(seed)
    return lambda view: [storage for storage in view.candidates if chance.random() < 0.5]


def plan_of(profile: Profile, pick=all_but_masks) -> Plan:
    """Drop what is picked of each block, with every recipe that then applies."""
    decisions = []
    for view in views_of(profile):
        block, dropped = view.block, pick(view)
        cheap = [op for op in view.program(dropped).reruns.values() if op.is_recipe]
        decisions.append(
            Decision(
                block.path,
                block.occurrence,
                block.children,
                Engine.REPLAY,
                tuple(view.storage_key(s) for s in dropped),
                *(0, 0, 0.0, ""),
                recipes=tuple(view.storage_key(op.writes[0].storage) for op in cheap),
            )
        )
    draft = Plan("test", 1 << 40, 0, 0, 0, 1.0, 0.0, 0.0, tuple(decisions), Identity(""), "")
    return dataclasses.replace(draft, peak_bytes=simulate(profile, draft).peak_bytes)


def differences(case, plan: Plan, steps: int) -> list[str]:
    expected = case.train(case.fresh(), steps)
    model = case.fresh()
    applied = apply(model, plan)
    got = case.train(model, steps)
    applied.remove()
    return different(expected, got)


def replayed_ops(case, plan: Plan, *, warm_steps: int) -> dict[str, int]:
    """What runs in the backward pass of a planned step, less what runs in the untouched one."""
    counted = []
    for planned in (False, True):
        model = case.fresh()
        applied = apply(model, plan) if planned else None
        case.train(model, warm_steps)
        loss = case.loss(model, case.batch)
        with OpCounter() as counter:
            loss.backward()
        counted.append(counter.counts)
        if applied is not None:
            applied.remove()
    untouched_counts, planned_counts = counted
    return {
        name: count - untouched_counts.get(name, 0)
        for name, count in planned_counts.items()
        if count > untouched_counts.get(name, 0)
    }


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("keep_masks", [True, False])
def test_dropout_rebuilt_from_its_mask_has_the_bits_of_the_untouched_model(
    lab, body, keep_masks: bool
) -> None:
    case = lab.Case(lambda: lab.stack_of(body))
    plan = plan_of(profile_of(case), all_but_masks if keep_masks else everything)

    assert any(decision.recipes for decision in plan.decisions) is keep_masks
    assert differences(case, plan, steps=7) == []


@pytest.mark.parametrize("warm_steps", [0, 3], ids=["recorded", "by a recording"])
def test_recipe_runs_instead_of_the_op(lab, warm_steps: int) -> None:
    case = lab.Case(lambda: lab.stack_of(residual))
    profile = profile_of(case)

    cheap = replayed_ops(case, plan_of(profile), warm_steps=warm_steps)
    full = replayed_ops(case, plan_of(profile, everything), warm_steps=warm_steps)

    assert cheap[REBUILT] == 2 and DROPOUT not in cheap
    assert full[DROPOUT] == 2 and REBUILT not in full


@pytest.mark.parametrize("keep_masks", [True, False])
def test_predicted_peak_is_the_measured_one_or_just_above(lab, keep_masks: bool) -> None:
    case = lab.Case(lambda: lab.stack_of(residual), batch=torch.randn(1024, lab.WIDTH))
    profile = profile_of(case)
    plan = plan_of(profile, all_but_masks if keep_masks else everything)
    model = case.fresh()
    applied = apply(model, plan)
    step = TrainingStep(model, case.batch, case.loss, torch.optim.SGD(model.parameters(), lr=0.05))

    step.run()
    measured = peak_rise_bytes(step.run, CPU) + resident_bytes(step)
    applied.remove()

    assert measured <= plan.peak_bytes <= 1.01 * measured


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_is_predicted_is_what_runs(lab, body) -> None:
    case = lab.Case(lambda: lab.stack_of(body))
    profile = profile_of(case)

    for seed in range(4):
        plan = plan_of(profile, some(seed))
        predicted = Counter(
            REBUILT if replay.recipe else profile.graph.ops[replay.op].name
            for effect in plan_effects(profile, plan)
            for replay in effect.replays
        )
        ran = replayed_ops(case, plan, warm_steps=3)
        assert {name: ran.get(name, 0) for name in predicted} == predicted
        assert ran.get(DROPOUT, 0) == predicted[DROPOUT]
        assert ran.get(REBUILT, 0) == predicted[REBUILT]
        assert differences(case, plan, steps=2) == []


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_planner_prices_sets_as_the_simulator_does(lab, body) -> None:
    profile = profile_of(lab.Case(lambda: lab.stack_of(body)))
    view = views_of(profile)[0]
    projects = find_projects(profile, view, view.candidates)
    places = {storage: place for place, storage in enumerate(projects.storages)}

    for seed in range(20):
        dropped = some(seed)(view)
        priced = projects.seconds([places[storage] for storage in dropped])
        assert priced == pytest.approx(replay_effect(view, dropped).seconds(profile))


def spec_of(func, *args):
    signatures = Signatures()
    signatures.add(func, args, {})
    return signatures.specs[0]


def dropout_spec(x, rate: float = 0.1, train: bool | None = True):
    return spec_of(torch.ops.aten.native_dropout.default, x, rate, train)


@pytest.mark.parametrize(
    "x",
    [torch.empty(64, 96), torch.empty(96, 64).t(), torch.empty(4, 3, 5, 7, dtype=torch.float64)],
    ids=["float32", "transposed", "float64"],
)
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.37])
def test_dry_run_finds_dropout_exact(x, rate: float) -> None:
    found = dry_run(dropout_spec(x, rate), CPU)

    assert found is not None and found.exact and found.seconds > 0


def test_dry_run_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()

    dry_run(dropout_spec(torch.empty(64, 96)), CPU)

    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(64, 96), (2,)])
def test_dry_run_sees_other_bits(shape: tuple[int, ...]) -> None:
    # On the CPU, forward and backward of dropout round the scale of half precision differently.
    found = dry_run(dropout_spec(torch.empty(shape, dtype=torch.bfloat16)), CPU)

    assert found is not None and not found.exact


@pytest.mark.parametrize(
    "spec",
    [
        dropout_spec(torch.empty(8, 8), train=False),
        dropout_spec(torch.empty(8, 8), rate=1.0),
        dropout_spec(torch.empty(1, 8).expand(4, 8)),
        spec_of(
            torch.ops.aten.native_batch_norm.default,
            *(torch.empty(2, 3, 4, 4), None, None, None, None, True, 0.1, 1e-5),
        ),
        spec_of(torch.ops.aten.add.Tensor, torch.empty(3), torch.empty(3)),
    ],
    ids=["evaluation", "rate 1", "expanded", "batch norm on the CPU", "no recipe"],
)
def test_dry_run_finds_nothing_where_the_recipe_does_not_hold(spec) -> None:
    assert dry_run(spec, CPU) is None


def on_cuda(spec):
    """The same call for a GPU that is not there."""
    args = (dataclasses.replace(a, device="cuda") if hasattr(a, "device") else a for a in spec.args)
    return dataclasses.replace(spec, args=tuple(args))


def test_without_a_device_the_table_says_what_is_exact() -> None:
    arguments = (torch.empty(2, 3, 4, 4), torch.empty(3), None, None, None, True, 0.1, 1e-5)
    native = spec_of(torch.ops.aten.native_batch_norm.default, *arguments)
    cudnn = spec_of(torch.ops.aten.cudnn_batch_norm.default, *arguments)

    assert estimated(dropout_spec(torch.empty(8, 8)), 3.0) == RecipeCost(3.0, exact=True)
    assert estimated(on_cuda(native), 3.0) == RecipeCost(2.0, exact=True)
    assert estimated(on_cuda(cudnn), 3.0) == RecipeCost(2.0, exact=False)
    assert estimated(native, 3.0) is None
    assert estimated(dropout_spec(torch.empty(8, 8), train=False), 3.0) is None


class Half(nn.Module):
    """A block whose dropout works in bfloat16, where its recipe is inexact on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        h = dropout(self.a(x).bfloat16())
        return x + self.b(h.tanh().float() * h.float())


def half_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Half() for _ in range(4)))


def test_fit_refuses_inexact_recipes_unless_they_are_allowed(monkeypatch) -> None:
    monkeypatch.setattr("leanstep.api.with_recipes", _fast_recipes)
    batch = torch.randn(2048, 64)

    def loss(model, batch):
        return model(batch).pow(2).mean()

    exact = leanstep.fit(half_model(), batch, loss, budget="60%")
    allowed = leanstep.fit(half_model(), batch, loss, budget="60%", exact=False)

    assert not any(decision.recipes for decision in exact.plan.decisions)
    assert exact.verdict.exact and not exact.verdict.inexact_allowed
    assert any(decision.recipes for decision in allowed.plan.decisions)
    assert allowed.verdict.inexact_allowed and not allowed.verdict.gradients_equal
    assert 0 < allowed.verdict.largest_difference < 0.05
    assert "inexact recipes were allowed" in str(allowed)
    assert "rebuilt with other bits" in str(allowed)
    assert "bit-equal to the untouched model" in str(exact)


def _fast_recipes(costs, specs, device):
    """Recipes as the device has them, in no time: ops this small are all noise."""
    found = with_recipes(costs, specs, device)
    return [
        dataclasses.replace(cost, recipe=dataclasses.replace(cost.recipe, seconds=0.0))
        if cost.recipe
        else cost
        for cost in found
    ]


def sloppy_layer_norm(named, outputs) -> RecipeCall:
    """A recipe for tests: about the layer norm, from its mean and inverse deviation."""
    given = (named["input"], outputs[1], outputs[2], named["weight"], named["bias"])
    return RecipeCall(about_normal, given)


def about_normal(x, mean, rstd, weight, bias):
    return ((x - mean) * rstd * weight + bias) * (1 + 1e-3)


def test_recipe_that_is_far_off_is_called_out(lab, monkeypatch) -> None:
    name = "aten.native_layer_norm.default"
    monkeypatch.setitem(table.RECIPES, name, Recipe(output=0, siblings=(1, 2)))
    monkeypatch.setitem(calls.BUILDERS, name, sloppy_layer_norm)
    monkeypatch.setattr("leanstep.api.with_recipes", _fast_recipes)

    def body(s, x):
        return s.b(F.gelu(s.a(s.norm(x)))) + s.norm(x)

    def model():
        torch.manual_seed(0)
        return lab.stack_of(body, count=3)

    batch = torch.randn(1024, lab.WIDTH)
    exact = leanstep.fit(model(), batch, lab.mean_square, budget="60%")
    allowed = leanstep.fit(model(), batch, lab.mean_square, budget="60%", exact=False)

    assert exact.verdict.exact
    assert any(decision.recipes for decision in allowed.plan.decisions)
    assert allowed.verdict.beyond_tolerance
    assert "FURTHER OFF THAN ROUNDING" in str(allowed)


def normal_again(x, weight, bias, mean, invstd, eps):
    """Stand in for CUDA's elementwise kernel, with the bits that the CPU's forward has."""
    assert mean.shape == invstd.shape == x.shape[1:2]
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


def batch_norm_on_the_cpu(named, outputs) -> RecipeCall:
    given = (named["input"], named["weight"], named["bias"], *outputs[1:3], named["eps"])
    return RecipeCall(normal_again, given)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return x + self.last(F.relu(self.norm(self.first(x)), inplace=True))


def test_batch_norm_comes_back_from_its_statistics(lab, monkeypatch) -> None:
    name = "aten.native_batch_norm.default"
    monkeypatch.setitem(calls.BUILDERS, name, batch_norm_on_the_cpu)
    case = lab.Case(
        lambda: nn.Sequential(Convolutions(), Convolutions()), batch=torch.randn(2, 8, 12, 12)
    )
    profile = profile_of(case)
    # What a plan would do: the large output goes, the small statistics stay.
    plan = plan_of(
        profile,
        lambda view: [s for s in view.candidates if view.graph.storages[s].nbytes > 100],
    )

    assert [len(decision.recipes) for decision in plan.decisions] == [1, 1]
    assert all(key.split("::")[-1].startswith(name) for d in plan.decisions for key in d.recipes)
    assert differences(case, plan, steps=6) == []


def test_profile_of_a_model_with_dropout_has_a_recipe(lab) -> None:
    model = lab.stack_of(residual)

    found = leanstep.profile(model, torch.randn(512, lab.WIDTH), lab.mean_square)

    (cost,) = [cost for cost in found.costs if cost.signature == DROPOUT]
    assert isinstance(cost.recipe, RecipeCost) and cost.recipe.exact
