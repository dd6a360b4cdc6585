"""A plan is applied to what it was made for, and to nothing else; a refusal says what differs."""

import dataclasses
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import leanstep  # noqa: E402
from leanstep.errors import PlanError  # noqa: E402
from leanstep.ir import Plan  # noqa: E402

WIDTH, ROWS = 32, 48


class Block(nn.Module):
    """Two layers and an activation that no parameter tells of."""

    def __init__(self, width: int = WIDTH, activation: Callable = F.gelu) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.activation = activation

    def forward(self, x):
        return x + self.dropout(self.narrow(self.activation(self.widen(self.norm(x)))))


class Net(nn.Module):
    """Equal blocks, each called some times."""

    def __init__(self, width=WIDTH, depth=3, activation=F.gelu, calls=1) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width, activation) for _ in range(depth))
        self.calls = calls

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            for _ in range(self.calls):
                x = layer(x)
        return x


class OtherNet(Net):
    """The same under another name."""


class Renamed(Net):
    """The same with another name for a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = self.first
        del self.first

    def forward(self, x):
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return x


Renamed.__name__ = "Net"


def build(kind: type[nn.Module] = Net, **sizes) -> nn.Module:
    torch.manual_seed(0)
    return kind(**sizes)


def batch_of(rows: int = ROWS, width: int = WIDTH, dtype=torch.float32):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss(model: nn.Module, batch):
    return model(batch).float().pow(2).mean()


def leanest(profile: leanstep.Profile, engine: str = "auto") -> Plan:
    """A plan that drops all it can."""
    return leanstep.plan(profile, "100%", engine=engine, overrides={"layers.*": "recompute"})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return leanest(leanstep.profile(build(), batch_of(), loss))


def step(model: nn.Module) -> list[bytes]:
    """The bits of one training step."""
    torch.manual_seed(5)
    result = loss(model, batch_of())
    result.backward()
    found = [result.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [tensor.numpy().tobytes() for tensor in found]


def traces(model: nn.Module) -> tuple:
    """Everything that applying a plan could have changed."""
    return (
        [type(module) for module in model.modules()],
        [module.training for module in model.modules()],
        [tensor.float().numpy().tobytes() for tensor in model.state_dict().values()],
        [parameter.grad for parameter in model.parameters()],
        torch.get_rng_state().numpy().tobytes(),
    )


def test_a_plan_drops_values_by_module_operator_and_occurrence(plan: Plan) -> None:
    again = leanest(leanstep.profile(build(), batch_of(), loss))

    assert [d.drop for d in again.decisions] == [d.drop for d in plan.decisions]
    assert "widen::aten.addmm.default#0:0" in plan.decisions[0].drop
    assert all(d.drop == plan.decisions[0].drop for d in plan.decisions)


OTHERS = {
    "another width": ({"width": 16}, "parameter first.weight is 32×32 float32 in the plan and 16"),
    "fewer layers": ({"depth": 2}, r"layers.2.widen.weight is .* in the plan and missing here"),
    "more layers": ({"depth": 4}, r"layers.3.widen.weight is .* here and missing in the plan"),
    "another class": ({"kind": OtherNet}, "the model is a Net in the plan and a OtherNet here"),
    "another name": ({"kind": Renamed}, "first.weight is 32×32 float32 in the plan and missing"),
}


@pytest.mark.parametrize("with_batch", [True, False])
@pytest.mark.parametrize(("changes", "words"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_refused_by_what_differs(
    plan: Plan, changes: dict, words: str, with_batch: bool
) -> None:
    model = build(**changes)
    batch = batch_of(width=changes.get("width", WIDTH)) if with_batch else None
    before = traces(model)

    with pytest.raises(PlanError, match=rf"the plan is for another model: .*{words}"):
        leanstep.apply(model, plan, batch, loss)

    assert traces(model) == before


@pytest.mark.parametrize("with_batch", [True, False])
def test_another_dtype_or_a_frozen_layer_is_refused(plan: Plan, with_batch: bool) -> None:
    half, frozen = build().to(torch.bfloat16), build()
    frozen.layers[1].norm.weight.requires_grad_(False)

    with pytest.raises(PlanError, match=r"first.weight is 32×32 float32 in the plan and 32×32 bfl"):
        leanstep.apply(half, plan, batch_of(dtype=torch.bfloat16) if with_batch else None, loss)
    with pytest.raises(PlanError, match=r"layers.1.norm.weight is .* and 32 float32, frozen here"):
        leanstep.apply(frozen, plan, batch_of() if with_batch else None, loss)


def test_another_batch_is_refused_by_what_differs(plan: Plan) -> None:
    model = build()
    before = traces(model)

    with pytest.raises(PlanError, match="another batch: the batch is 48×32 float32 in the plan"):
        leanstep.apply(model, plan, batch_of(rows=8), loss)
    with pytest.raises(PlanError, match="another batch: "):
        leanstep.verify(model, batch_of(rows=8), loss, plan=plan)

    assert traces(model) == before


@pytest.mark.parametrize("with_batch", [True, False])
def test_the_right_model_is_accepted_and_trains_the_same_bits(plan, with_batch) -> None:
    expected, model = step(build()), build()
    before = traces(model)

    applied = leanstep.apply(model, plan, batch_of() if with_batch else None, loss)

    assert traces(model)[1:] == before[1:]
    assert [step(model) for _ in range(4)] == [expected] * 4
    applied.remove()
    assert step(model) == expected and traces(model)[0] == before[0]


def test_ops_that_no_parameter_tells_of_are_seen_with_a_batch(plan: Plan) -> None:
    model = build(activation=torch.relu)
    before = traces(model)

    with pytest.raises(PlanError, match=r"layers.0 makes no value .*aten.gelu.default#0:0"):
        leanstep.apply(model, plan, batch_of(), loss)

    assert traces(model) == before


def test_without_a_batch_they_are_seen_at_the_first_call(plan: Plan) -> None:
    model = build(activation=torch.relu)
    expected = step(build(activation=torch.relu))
    applied = leanstep.apply(model, plan)

    for _ in range(2):
        with pytest.raises(PlanError, match=r"drops aten.gelu.default#0:0 of layers.0, and this"):
            step(model)

    applied.remove()
    assert step(model) == expected


def test_the_first_call_in_another_mode_is_not_refused() -> None:
    class Noisy(Block):
        def forward(self, x):
            if self.training:
                x = torch.sigmoid(x)
            return super().forward(x)

    model = build(Net, depth=0)
    model.layers.extend(Noisy() for _ in range(3))
    plan = leanest(leanstep.profile(model, batch_of(), loss))
    assert any("sigmoid" in key for d in plan.decisions for key in d.drop)
    applied = leanstep.apply(model.eval(), plan)

    in_evaluation = step(model)
    model.train()
    trained = [step(model) for _ in range(3)]

    applied.remove()
    assert trained == [step(model)] * 3
    assert in_evaluation == step(model.eval())


def test_what_a_hook_of_the_block_makes_is_not_missed() -> None:
    model = build()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: torch.sigmoid(out))
    plan = leanest(leanstep.profile(model, batch_of(), loss))
    expected = step(model)
    applied = leanstep.apply(model, plan)

    assert [step(model) for _ in range(3)] == [expected] * 3
    applied.remove()


def test_another_number_of_calls_is_seen_with_a_batch() -> None:
    twice = build(calls=2)
    plan = leanest(leanstep.profile(twice, batch_of(), loss))

    with pytest.raises(PlanError, match=r"decides about layers.0 \(call 1\), which this step"):
        leanstep.apply(build(), plan, batch_of(), loss)
    with pytest.raises(PlanError, match=r"this step runs layers.0 \(call 2\), about which it"):
        leanstep.apply(build(calls=3), plan, batch_of(), loss)
    leanstep.apply(twice, plan, batch_of(), loss).remove()


def test_another_size_is_seen_with_a_batch(plan: Plan) -> None:
    rows = (row._replace(dropped_bytes=row.dropped_bytes + 8) for row in plan.decisions[0].rows)
    first = dataclasses.replace(plan.decisions[0], rows=tuple(rows))
    edited = dataclasses.replace(plan, decisions=(first, *plan.decisions[1:]))

    with pytest.raises(PlanError, match=r"it drops \d+ bytes made by .* of layers.0, which makes"):
        leanstep.apply(build(), edited, batch_of(), loss)


def test_another_torch_is_refused_without_a_batch_and_checked_with_one(plan: Plan) -> None:
    old = dataclasses.replace(plan, torch_version="2.0.1+cu118")

    with pytest.raises(PlanError, match=r"torch 2\.0\.1 in the plan, .* here. Pass batch="):
        leanstep.apply(build(), old)
    leanstep.apply(build(), old, batch_of(), loss).remove()
    with pytest.raises(PlanError, match=r"no value .*\(torch 2\.0\.1 in the plan, "):
        leanstep.apply(build(activation=torch.relu), old, batch_of(), loss)


def test_whole_blocks_are_compared_by_their_bytes() -> None:
    plan = leanest(leanstep.profile(build(), batch_of(), loss), engine="module")
    leanstep.apply(build(), plan, batch_of(), loss).remove()

    with pytest.raises(PlanError, match=r"it drops \d+ bytes made by layers.0, which makes"):
        leanstep.apply(build(activation=torch.relu), plan, batch_of(), loss)


def test_a_saved_plan_is_applied_as_it_was(plan: Plan, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    model = build()
    applied = leanstep.apply(model, Plan.load(tmp_path / "plan.json"), batch_of(), loss)

    assert step(model) == step(build())
    applied.remove()


def test_a_module_of_several_blocks_is_named_by_its_one_path() -> None:
    model = build()
    for layer in model.layers:
        layer.norm = model.layers[0].norm

    plan = leanest(leanstep.profile(model, batch_of(), loss))
    keys = [key for d in plan.decisions[1:] for key in d.drop if "norm" in key]
    assert keys and all(key.startswith("/layers.0.norm::") for key in keys)
    expected = step(model)
    applied = leanstep.apply(model, plan, batch_of(), loss)

    assert [step(model) for _ in range(4)] == [expected] * 4
    applied.remove()


def test_equal_blocks_may_have_other_names_inside() -> None:
    class Twin(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = self.widen, self.narrow
            del self.widen, self.narrow

        def forward(self, x):
            return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))

    model = build(depth=2)
    model.layers.extend([Twin(), Twin()])
    plan = leanest(leanstep.profile(model, batch_of(), loss))

    assert any(key.startswith("up::") for key in plan.decisions[3].drop)
    applied = leanstep.apply(model, plan, batch_of(), loss)
    applied.remove()


def test_a_block_that_takes_the_path_its_data_say_is_not_refused() -> None:
    class Router(Block):
        def forward(self, x):
            if x.sum().item() > 0:
                return super().forward(torch.tanh(x))
            return super().forward(torch.sigmoid(x))

    model = build(Net, depth=0)
    model.first = nn.Identity()
    model.layers.extend(Router() for _ in range(3))
    positive = batch_of().abs()
    plan = leanest(leanstep.profile(model, positive, loss))
    applied = leanstep.apply(model, plan)

    loss(model, -positive).backward()

    applied.remove()


def test_the_explanation_names_modules_and_lines(plan: Plan) -> None:
    explained = plan.explain()
    text = str(explained)

    assert "layers.0 … layers.2 (3 calls): replay" in text
    assert "widen::aten.addmm" in text and "test_apply.py:" in text
    assert explained.planned.peak_bytes == plan.peak_bytes
    assert repr(plan).count("OpRow") == 0
