"""The recorded graph is the step as it ran: its ops, its values, its memory to the byte."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import leanstep
from leanstep import models
from leanstep.errors import MeasureError
from leanstep.ir import Category, Fact, Graph, Phase, Profile
from leanstep.ir.check import check_blocks, check_graph
from leanstep.simulator import simulate, static_bytes
from leanstep.step.state import untouched
from leanstep.step.training import TrainingStep, make_step
from leanstep.truth import peak_rise_bytes, resident_bytes

TINY = [name for name in models.names() if name.endswith("-tiny")]
CPU = torch.device("cpu")


@functools.cache
def profile_of(name: str, optimizer: str = "adamw", *, gradients_kept: bool = False) -> Profile:
    built = models.build(name, optimizer=optimizer)
    return leanstep.profile(
        built.model,
        built.batch,
        built.loss,
        optimizer=built.optimizer,
        gradients_kept=gradients_kept,
    )


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def profile_squares(model: nn.Module, batch: Any, **options: Any) -> Profile:
    return leanstep.profile(model, batch, squares, **options)


def measured_peak_bytes(step: TrainingStep, profile: Profile) -> int:
    with untouched(step):
        step.first_run()
        resident = max(resident_bytes(step), static_bytes(profile))
        return resident + peak_rise_bytes(step.run, step.device)


class Layers(nn.Module):
    """A few residual layers, to build odd models from."""

    def __init__(self, num_layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


# Ops and values.


@pytest.mark.parametrize("name", TINY)
def test_the_graph_of_every_model_is_well_formed(name: str) -> None:
    profile = profile_of(name)

    check_graph(profile.graph)
    check_blocks(profile.graph, profile.blocks)
    assert len(profile.costs) == 1 + max(op.cost for op in profile.graph.ops)


@pytest.mark.parametrize("name", TINY)
def test_every_op_says_what_it_is_and_what_it_touches(name: str) -> None:
    graph = profile_of(name).graph

    phases = [op.phase for op in graph.ops]
    order = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert phases == sorted(phases, key=order.index) and set(phases) == set(order)
    for op in graph.ops:
        assert op.name.count(".") >= 2 and (op.reads or op.writes), op
        if op.phase is Phase.FORWARD:
            assert ".py:" in op.source, op
    # Every value that is read was there before the step or written in it, exactly once.
    written = Counter(value for op in graph.ops for value in op.writes)
    assert set(written.values()) == {1}
    for value in {value for op in graph.ops for value in op.reads}:
        assert value in written or graph.storages[value.storage].birth == -1


@pytest.mark.parametrize("name", TINY)
def test_backward_ops_carry_the_module_and_line_of_their_forward_op(name: str) -> None:
    graph = profile_of(name).graph
    forward = {(graph.path(op), op.source) for op in graph.ops if op.phase is Phase.FORWARD}

    backward = [op for op in graph.ops if op.phase is Phase.BACKWARD]
    lost = {op.name for op in backward if (graph.path(op), op.source) not in forward}

    # What hands a finished gradient to its parameter has no forward op.
    assert lost <= {"aten.detach.default"}
    inside = {graph.path(op) for op in backward}
    for block in profile_of(name).blocks:
        assert any(path.startswith(block.path) for path in inside), block.name


def test_an_op_of_the_users_file_has_its_line() -> None:
    model = Layers(1)

    graph = profile_squares(model, torch.randn(4, 32)).graph

    line = squares.__code__.co_firstlineno + 1
    powers = [op for op in graph.ops if op.name == "aten.pow.Tensor_Scalar"]
    assert [(op.phase, op.source) for op in powers] == [
        (Phase.FORWARD, f"test_recorder.py:{line}"),
        (Phase.BACKWARD, f"test_recorder.py:{line}"),
    ]


@pytest.mark.parametrize("as_batch", ["tensor", "tuple", "list", "dict"])
def test_a_batch_may_be_a_tensor_a_tuple_or_a_dict(as_batch: str) -> None:
    class Scalar(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    x = torch.randn(4, 32)
    batch = {"tensor": x, "tuple": (x,), "list": [x], "dict": {"x": x}}[as_batch]
    profile = leanstep.profile(Scalar(), batch)

    inputs = [s for s in profile.graph.storages if s.category is Category.INPUT]
    assert [storage.nbytes for storage in inputs] == [x.nbytes]


# Storages.


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_storage_has_the_category_a_person_would_give_it(name: str, optimizer: str) -> None:
    built = models.build(name, optimizer=optimizer)
    graph = profile_of(name, optimizer).graph
    parameters = list(built.model.parameters())
    nbytes = sorted(parameter.nbytes for parameter in parameters)

    assert sizes(graph, Category.PARAMETER) == nbytes
    assert sizes(graph, Category.GRADIENT) == nbytes
    assert sizes(graph, Category.BUFFER) == sorted(b.nbytes for b in built.model.buffers())
    per_parameter = {"sgd": [1], "adamw": [1, 1]}[optimizer]
    steps = [4] * len(parameters) if optimizer == "adamw" else []
    state = [n for n in nbytes for _ in per_parameter] + steps
    assert sizes(graph, Category.OPTIMIZER_STATE) == sorted(state)
    assert sizes(graph, Category.INPUT) and sizes(graph, Category.ACTIVATION)


def sizes(graph: Graph, category: Category) -> list[int]:
    return sorted(s.nbytes for s in graph.storages if s.category is category)


@pytest.mark.parametrize("gradients_kept", [False, True])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_optimizer_state_is_there_before_the_recorded_step(
    gradients_kept: bool, steps_before: int
) -> None:
    model, batch = Layers(), torch.randn(4, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps_before):
        squares(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()

    profile = profile_squares(model, batch, optimizer=optimizer, gradients_kept=gradients_kept)

    state = [s for s in profile.graph.storages if s.category is Category.OPTIMIZER_STATE]
    assert len(state) == 3 * len(list(model.parameters()))
    assert all(s.birth == -1 and s.death == len(profile.graph.ops) for s in state)


def test_gradients_are_born_in_the_step_unless_they_are_kept() -> None:
    births = {}
    for kept in (False, True):
        graph = profile_squares(Layers(), torch.randn(4, 32), gradients_kept=kept).graph
        births[kept] = {s.birth >= 0 for s in graph.storages if s.category is Category.GRADIENT}

    assert births == {False: {True}, True: {False}}


def test_an_activation_lives_until_backward_and_could_go_in_forward() -> None:
    graph = profile_of("gpt2-tiny").graph
    start = next(n for n, op in enumerate(graph.ops) if op.phase is Phase.BACKWARD)
    saved = {save.value.storage for save in graph.saves}

    held = [s for n, s in enumerate(graph.storages) if n in saved and s.birth >= 0]

    assert all(s.category is Category.ACTIVATION and s.death >= start - 1 for s in held)
    assert sum(s.natural_death < start for s in held) > 0.9 * len(held)


def test_a_storage_that_its_owner_empties_and_fills_with_other_numbers_is_written() -> None:
    class Refilled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                self.scratch.untyped_storage().resize_(0)
                self.scratch.untyped_storage().resize_(4 * 8)
                self.scratch.copy_(x.detach()[0])
            return super().forward(x * self.scratch.clone())

    model = Refilled(8, 8)
    model.register_buffer("scratch", torch.zeros(8))
    graph = leanstep.profile(model, torch.randn(4, 8), lambda m, b: m(b).sum()).graph

    copies = [op for op in graph.ops if op.name == "aten.copy_.default"]
    assert [value.version for op in copies for value in op.writes] == [1, 2]


def test_what_backward_never_reaches_is_held_to_the_end() -> None:
    class Aside(Layers):
        def forward(self, x: Tensor) -> Tensor:
            self.aside = self.layers[0](x).exp()
            return self.layers[1](x)

    graph = profile_squares(Aside(), torch.randn(4, 32)).graph

    check_graph(graph)
    asked = {unpack.save for unpack in graph.unpacks}
    unasked = [save for n, save in enumerate(graph.saves) if n not in asked]
    assert unasked and all(save.release == len(graph.ops) for save in unasked)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda x: x * torch.rand_like(x), Fact.RANDOM),
        (lambda x: x * torch.rand(32, generator=torch.Generator()), Fact.OWN_GENERATOR),
        (lambda x: x / (1 + abs(x.mean().item())), Fact.HOST_READ),
        (lambda x: x[x > 0], Fact.DYNAMIC_SHAPE),
    ],
    ids=["random", "own generator", "host read", "dynamic shape"],
)
def test_facts_about_ops_are_recorded(make: Callable[[Tensor], Tensor], fact: Fact) -> None:
    class Odd(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return make(super().forward(x))

    graph = profile_squares(Odd(1), torch.randn(4, 32)).graph

    assert fact in {fact for op in graph.ops for fact in op.facts}


def test_draws_form_a_chain_of_versions_of_the_generator() -> None:
    graph = profile_of("bert-tiny").graph
    (generator,) = (n for n, s in enumerate(graph.storages) if s.category is Category.GENERATOR)

    draws = [op for op in graph.ops if Fact.RANDOM in op.facts]
    reads = [v.version for op in draws for v in op.reads if v.storage == generator]
    writes = [v.version for op in draws for v in op.writes if v.storage == generator]

    assert reads == list(range(len(draws))) and writes == list(range(1, len(draws) + 1))


def test_batch_norm_writes_its_running_statistics() -> None:
    graph = profile_of("resnet-tiny").graph

    norms = [op for op in graph.ops if op.name == "aten.native_batch_norm.default"]

    assert norms and all(Fact.WRITES_BUFFER in op.facts for op in norms)


# The peak.


@pytest.mark.parametrize("gradients_kept", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", TINY)
def test_the_predicted_unplanned_peak_is_the_measured_one_to_the_byte(
    name: str, optimizer: str, gradients_kept: bool
) -> None:
    built = models.build(name, optimizer=optimizer)
    profile = profile_of(name, optimizer, gradients_kept=gradients_kept)

    measured = measured_peak_bytes(make_step(*built, gradients_kept=gradients_kept), profile)

    assert profile.peak_bytes == simulate(profile).peak_bytes == measured


def penalised(x: Tensor, model: Layers) -> Tensor:
    x = x.detach().requires_grad_()
    y = Layers.forward(model, x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope


ODD_FORWARDS: dict[str, Callable[[Tensor, Layers], Tensor]] = {
    "in place": lambda x, model: Layers.forward(model, x).mul_(2.0).relu_(),
    "host read": lambda x, model: Layers.forward(model, x) / (1 + abs(x.mean().item())),
    "dynamic shape": lambda x, model: (y := Layers.forward(model, x))[y > 0],
    "gradient penalty": penalised,
    "no gradients": lambda x, model: Layers.forward(model, x) + no_grad_forward(model, x),
    "one layer thrice": lambda x, model: model.layers[0](model.layers[0](model.layers[0](x))),
}


def no_grad_forward(model: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        return Layers.forward(model, x)


@pytest.mark.parametrize("forward", ODD_FORWARDS.values(), ids=ODD_FORWARDS)
def test_the_peak_is_exact_for_odd_models_too(forward: Callable[[Tensor, Layers], Tensor]) -> None:
    class Odd(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x, self)

    model, batch = Odd(), torch.randn(16, 32)
    profile = profile_squares(model, batch)

    assert profile.peak_bytes == measured_peak_bytes(
        make_step(model, batch, squares, None), profile
    )


@pytest.mark.parametrize(
    "batch",
    [torch.randn(16, 32, requires_grad=True), torch.randn(1, 32).expand(16, 32)],
    ids=["with a gradient", "expanded"],
)
def test_the_peak_is_exact_for_odd_batches_too(batch: Tensor) -> None:
    model = Layers()
    profile = profile_squares(model, batch)

    assert profile.peak_bytes == measured_peak_bytes(
        make_step(model, batch, squares, None), profile
    )


def test_a_model_that_checkpoints_by_itself_is_recorded_as_it_runs() -> None:
    class Checkpointed(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
            return x

    model, batch = Checkpointed(), torch.randn(16, 32)
    profile = profile_squares(model, batch)

    # What runs again inside backward is no block, and nothing is left in forward to drop.
    assert all(block.occurrence == 0 and not block.saves for block in profile.blocks)
    assert profile.peak_bytes == measured_peak_bytes(
        make_step(model, batch, squares, None), profile
    )


# The instrument.


class LiveStorages(TorchDispatchMode):
    """A second witness: follow every new storage by a weak reference and add up what lives."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.highest = 0
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in known:
                self.born(tensor.untyped_storage())
        return out

    def born(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage._cdata, storage.nbytes()
        if address in self.references:
            return

        def died(_: object) -> None:
            self.level -= nbytes
            del self.references[address]

        self.references[address] = weakref.ref(storage, died)
        self.level += nbytes
        self.highest = max(self.highest, self.level)


@pytest.mark.parametrize("widths", [(64, 256, 8), (32, 32, 32), (128, 16, 64)])
def test_a_second_instrument_sees_the_same_rise(widths: tuple[int, int, int]) -> None:
    first, second, last = widths
    model = nn.Sequential(
        nn.Linear(16, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.Tanh(),
        nn.Linear(second, last),
    )
    batch = torch.randn(24, 16)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad(set_to_none=True)

    with LiveStorages() as witness:
        step()

    assert witness.level == 0
    assert peak_rise_bytes(step, CPU) == witness.highest


def test_the_rise_is_what_lives_at_once() -> None:
    def step() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(2000, dtype=torch.uint8)
        del a
        c = torch.empty(500, dtype=torch.uint8)
        del b, c

    assert peak_rise_bytes(step, CPU) == 3000


def test_a_step_that_leaks_is_refused() -> None:
    kept: list[Tensor] = []

    def step() -> None:
        kept.append(torch.empty(4096, dtype=torch.uint8))

    with pytest.raises(MeasureError, match=r"\+4,096 bytes.*keep tensors from step to step"):
        peak_rise_bytes(step, CPU)


def test_a_model_that_leaks_is_refused_by_verify_not_by_profile() -> None:
    model = Layers()
    kept: list[Tensor] = []

    def leaking(model: nn.Module, batch: Tensor) -> Tensor:
        kept.append(model(batch).detach())
        return squares(model, batch)

    profile = leanstep.profile(model, torch.randn(4, 32), leaking)

    step = make_step(model, torch.randn(4, 32), leaking, None)
    with pytest.raises(MeasureError), untouched(step):
        peak_rise_bytes(step.run, step.device)
    assert profile.peak_bytes > 0


def test_what_was_allocated_before_the_profiler_started_does_not_disturb() -> None:
    """Trap one: the return of such a block is not reported."""
    held = [torch.empty(10_000, dtype=torch.uint8) for _ in range(8)]

    def step() -> None:
        held.pop()
        torch.empty(3000, dtype=torch.uint8)

    assert peak_rise_bytes(step, CPU) == 3000


def test_readings_do_not_depend_on_readings_before() -> None:
    """Trap two: a size remembered from an earlier run of the profiler is stale."""

    def step_of(nbytes: int) -> Callable[[], None]:
        held = [torch.empty(nbytes, dtype=torch.uint8)]

        def step() -> None:
            held[0] = torch.empty(nbytes, dtype=torch.uint8)

        return step

    orders = [[1000, 5000, 3000], [5000, 1000, 3000], [3000, 3000, 1000]]
    for sizes_in_order in orders:
        steps = [step_of(nbytes) for nbytes in sizes_in_order]

        assert [peak_rise_bytes(step, CPU) for step in steps] == sizes_in_order
