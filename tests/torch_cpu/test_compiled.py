"""torch.compile, torch.jit and torch.fx around a fit: the plan holds, or the user is told."""

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import leanstep
from leanstep.truth import peak_rise_bytes

CPU = torch.device("cpu")
ENGINES = ("replay", "module")
WIDTH, ROWS = 32, 256
WARNING = r"leanstep: blocks\.\d has a plan and is called from code that torch\.compile"


# torch 2.13 warns of what its compiler does itself: it asks tensors inside a model for their .grad,
# and makes some of its own functions with torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self, act=functional.gelu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.act = act

    def forward(self, hidden):
        return hidden + self.dropout(self.down(self.act(self.up(hidden))))


class Stack(nn.Module):
    def __init__(self, act=functional.gelu) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(act) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden):
        hidden = torch.tanh(self.stem(hidden))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).square().mean()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def stack(act=functional.gelu) -> Stack:
    torch.manual_seed(0)
    return Stack(act)


def batch():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def fitted_stack(engine="replay"):
    model = stack()
    fitted = leanstep.fit(model, batch(), budget="60%", engine=engine, verify=False)
    assert fitted.plan.changed
    return model, fitted


def numbers(call, model):
    torch.manual_seed(5)
    loss = call(batch())
    loss.backward()
    found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [*found, torch.get_rng_state()]


def assert_same(old, new):
    assert len(old) == len(new)
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def peak(call, model) -> int:
    def step():
        call(batch()).backward()
        model.zero_grad(set_to_none=True)

    step()
    return peak_rise_bytes(step, CPU)


def compiled_whole(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compiled_blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def replaced_blocks(model, backend):
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend=backend)
    return model


def compiled_function(model, backend):
    return torch.compile(lambda rows: model(rows) * 1.0, backend=backend)


WAYS = (compiled_whole, compiled_in_place, compiled_blocks, replaced_blocks, compiled_function)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", WAYS)
def test_compiling_after_fit_keeps_the_plan_and_the_numbers(way, engine):
    plain, (model, fitted) = stack(), fitted_stack(engine)
    full, lean = peak(plain, plain), peak(model, model)
    call = way(model, "aot_eager" if engine == "replay" else "eager")

    with pytest.warns(UserWarning, match=WARNING) as caught:
        assert_same(numbers(plain, plain), numbers(call, model))

    assert len(caught) == 1
    for _ in range(4):
        assert_same(numbers(plain, plain), numbers(call, model))
    assert peak(call, model) <= 1.02 * lean < 0.8 * full
    fitted.remove()
    assert_same(numbers(plain, plain), numbers(call, model))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:leanstep:UserWarning")
def test_a_compiled_training_step_keeps_the_plan_and_the_numbers(engine):
    # Made outside: Dynamo of torch 2.12 does not know generators.
    rows = batch()

    def train(model, optimizer):
        loss = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    plain, (model, _) = stack(), fitted_stack(engine)
    lean = peak(model, model)
    both = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (plain, model)]
    # Torch 2.11 has other last bits in a compiled step than in an eager one, planned or not.
    untouched, compiled = (torch.compile(train, backend="aot_eager") for _ in both)
    for seed in range(5):
        torch.manual_seed(seed)
        expected = untouched(*both[0])
        torch.manual_seed(seed)
        assert torch.equal(expected, compiled(*both[1]))
    assert_same(list(plain.parameters()), list(model.parameters()))
    assert peak_rise_bytes(lambda: compiled(*both[1]), CPU) <= 1.02 * lean


@pytest.mark.filterwarnings("ignore:leanstep:UserWarning")
def test_a_model_that_was_compiled_and_run_before_fit_follows_the_plan_and_its_end():
    plain, model = stack(), stack()
    call = torch.compile(model, backend="aot_eager")
    numbers(call, model)
    full = peak(call, model)

    fitted = leanstep.fit(model, batch(), budget="60%", verify=False)

    assert_same(numbers(plain, plain), numbers(call, model))
    assert peak(call, model) < 0.8 * full
    fitted.remove()
    assert_same(numbers(plain, plain), numbers(call, model))
    assert peak(call, model) == full


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:leanstep:UserWarning")
def test_a_compiled_backward_asks_the_plan_too(engine):
    plain, (model, _) = stack(), fitted_stack(engine)

    def backward_too(rows):
        loss = model(rows)
        loss.backward()
        return loss

    call = torch.compile(backward_too, backend="eager")
    expected = numbers(plain, plain)
    with torch._dynamo.config.patch(compiled_autograd=True):
        for _ in range(2):
            torch.manual_seed(5)
            found = [call(batch()).detach(), *(p.grad.clone() for p in model.parameters())]
            assert_same(expected[:-1], found)
            model.zero_grad(set_to_none=True)


@pytest.mark.filterwarnings("ignore:leanstep:UserWarning")
def test_more_blocks_than_torch_compiles_one_function_for_stay_right():
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(12)))
    model = copy.deepcopy(plain)
    leanstep.fit(model, batch(), lambda m, b: m(b).mean(), budget="60%", verify=False)
    calls = torch.compile(model, backend="eager"), torch.compile(model.forward, backend="eager")
    for call in calls:
        expected = numbers(lambda rows: plain(rows).mean(), plain)
        assert_same(expected, numbers(lambda rows, call=call: call(rows).mean(), model))


def test_a_whole_graph_is_refused_with_the_reason():
    model, _ = fitted_stack()
    call = torch.compile(model, backend="eager", fullgraph=True)

    with pytest.raises(Exception, match="a block with a plan runs uncompiled") as caught:
        call(batch())

    assert "Compile without fullgraph=True, or call remove()" in str(caught.value)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:leanstep:UserWarning")
def test_inductor_around_fitted_blocks_is_close_to_eager():
    plain, (model, _) = stack(), fitted_stack()
    for m in (plain, model):
        m.blocks.eval()
    lean = peak(model, model)
    call = torch.compile(model)
    for _ in range(2):
        pairs = zip(numbers(plain, plain), numbers(call, model), strict=True)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
    assert peak(call, model) <= 1.02 * lean


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_compiled_inside_a_fitted_block_runs_uncompiled(engine):
    plain, (model, _) = stack(), fitted_stack(engine)
    for _ in range(3):
        assert_same(numbers(plain, plain), numbers(model, model))
    for block in model.blocks:
        block.up.compile(backend="aot_eager")
        block.down = torch.compile(block.down, backend="aot_eager")
    for _ in range(6):
        assert_same(numbers(plain, plain), numbers(model, model))


def branching(hidden):
    if torch.compiler.is_compiling():
        return functional.relu(hidden)
    return functional.gelu(hidden)


@pytest.mark.filterwarnings("ignore:leanstep:UserWarning")
def test_a_block_that_asks_for_the_compiler_hears_that_there_is_none():
    plain, model = stack(branching), stack(branching)
    for block in model.blocks:
        leanstep.recompute(block)
    leanstep.fit(model, batch(), budget="90%")
    call = torch.compile(model, backend="eager")
    for _ in range(4):
        assert_same(numbers(plain, plain), numbers(call, model))


def test_fit_does_not_warn_and_an_uncompiled_model_hears_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = fitted_stack()
        for _ in range(3):
            numbers(model, model)


def test_with_the_compiler_switched_off_all_is_as_it_was():
    plain, model = stack(), stack()
    model.compile(backend="eager")
    with torch._dynamo.config.patch(disable=True):
        fitted = leanstep.fit(model, batch(), budget="60%")
        assert fitted.verdict.gradients_equal
        assert_same(numbers(plain, plain), numbers(model, model))


def compiled_act(calls):
    """A compiled function that counts how often its compiled form runs."""

    def backend(graph, _):
        def run(*args):
            calls.append(1)
            return graph.forward(*args)

        return run

    @torch.compile(backend=backend)
    def act(hidden):
        return functional.gelu(hidden) * torch.sigmoid(hidden)

    return act


def test_a_compiled_function_in_a_block_is_refused_and_stays_compiled():
    calls = []
    model = stack(compiled_act(calls))

    with pytest.raises(leanstep.LeanstepError) as caught:
        leanstep.fit(model, batch(), budget="60%")

    assert str(caught.value).startswith(
        "blocks.0 runs code that torch.compile has compiled (test_compiled.py:"
    )
    assert str(caught.value).endswith(
        "and a planned block runs uncompiled: take the torch.compile away, or call "
        'torch.compiler.set_stance("force_eager") before fit'
    )
    calls.clear()
    numbers(model, model)
    assert len(calls) == 3


def test_with_the_compiler_told_to_step_aside_such_a_model_is_fitted():
    model, plain = stack(compiled_act([])), stack(lambda x: functional.gelu(x) * torch.sigmoid(x))
    with torch.compiler.set_stance("force_eager"):
        fitted = leanstep.fit(model, batch(), budget="60%")
        assert fitted.verdict.gradients_equal
        assert_same(numbers(plain, plain), numbers(model, model))
    assert_same(numbers(plain, plain)[-1:], numbers(model, model)[-1:])


def test_a_compiled_loss_around_the_model_is_refused_as_compiled_blocks():
    @torch.compile(backend="eager")
    def loss(model, rows):
        return model(rows)

    with pytest.raises(leanstep.LeanstepError, match="runs code that torch"):
        leanstep.fit(stack(), batch(), loss)


def test_compiled_code_outside_of_the_blocks_is_noted():
    calls = []
    act = compiled_act(calls)
    model = stack()

    fitted = leanstep.fit(model, batch(), lambda m, rows: act(m(rows)), budget="60%")

    assert any(
        note.startswith("code outside of the blocks is compiled (test_compiled.py:")
        for note in fitted.plan.notes
    )
    assert fitted.verdict.gradients_equal
    calls.clear()
    act(model(batch())).backward()
    assert calls


class Scriptable(Block):
    """The same block in the words that torch.jit understands."""

    def __init__(self) -> None:
        super().__init__()
        del self.act

    def forward(self, hidden):
        return hidden + self.dropout(self.down(functional.gelu(self.up(hidden))))


def with_scripted(place):
    """A stack in which torch.jit made some blocks, or some layers of the blocks."""
    model = stack()
    for number, block in enumerate(model.blocks):
        block.__class__ = Scriptable
        if place == "layers":
            block.up = torch.jit.script(nn.Sequential(block.up, nn.GELU(), nn.Sigmoid()))
        elif number == 0:
            model.blocks[number] = torch.jit.script(Scriptable())
    return model


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("place", "first"), [("blocks", "blocks.0"), ("layers", "blocks.0.up")])
def test_modules_made_by_torch_jit_are_left_alone_and_named(place, first, engine):
    model, plain = with_scripted(place), with_scripted(place)
    plain.load_state_dict(model.state_dict())

    fitted = leanstep.fit(model, batch(), budget="90%", engine=engine)

    assert fitted.plan.changed
    assert all(d.path != "blocks.0" for d in fitted.plan.changed) or place == "layers"
    assert any(f"made by torch.jit ({first}" in note for note in fitted.plan.notes)
    assert fitted.verdict.gradients_equal
    for _ in range(8):
        assert_same(numbers(plain, plain), numbers(model, model))


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, batch())])
def test_a_model_made_by_torch_jit_is_refused(make):
    model = make(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)))
    with pytest.raises(leanstep.LeanstepError) as caught:
        leanstep.fit(model, batch())
    assert str(caught.value) == (
        "the model was made by torch.jit, whose calls cannot be planned: "
        "fit the module that it was made from"
    )


def test_a_graph_module_is_fitted_as_any_other():
    plain, model = stack(), torch.fx.symbolic_trace(stack())
    fitted = leanstep.fit(model, batch(), budget="70%")
    assert fitted.verdict.gradients_equal
    for _ in range(4):
        assert_same(numbers(plain, plain), numbers(model, model))
