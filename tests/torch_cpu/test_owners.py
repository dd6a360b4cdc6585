"""A model that somebody else already checkpoints or compiles: refused by name, or taken over."""

import functools
import sys

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

import leanstep
from leanstep.errors import InputError

WIDTH, ROWS = 32, 256
TAKEOVER = ", or let leanstep.fit(..., takeover=True) switch it off until remove()"
plain_checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        inner = torch.nn.functional.gelu(self.up(hidden))
        return hidden + self.dropout(self.down(inner))


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(hidden).square().mean()

    def call(self, block, hidden):
        return block(hidden)


class Flagged(Stack):
    """Checkpoints when a flag says so, as models of Hugging Face and timm do."""

    flag = "gradient_checkpointing"

    def __init__(self) -> None:
        super().__init__()
        setattr(self, self.flag, False)

    def call(self, block, hidden):
        if getattr(self, self.flag) and self.training:
            return plain_checkpoint(block, hidden)
        return block(hidden)


class LikeTransformers(Flagged):
    def gradient_checkpointing_disable(self):
        self.gradient_checkpointing = False


class LikeDiffusers(Flagged):
    def disable_gradient_checkpointing(self):
        self.gradient_checkpointing = False


class LikeTimm(Flagged):
    flag = "grad_checkpointing"

    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable


class LikeMmcv(Flagged):
    flag = "with_cp"


def made(kind=Stack):
    torch.manual_seed(0)
    return kind()


def batch():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def numbers(model):
    torch.manual_seed(5)
    loss = model(batch())
    loss.backward()
    found = [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return [*found, torch.get_rng_state()]


def assert_same(old, new):
    assert len(old) == len(new)
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


def flagged(kind):
    model = made(kind)
    setattr(model, kind.flag, True)
    return model


def wrapped_by_torch(**options):
    model = made()
    apply_activation_checkpointing(
        model,
        functools.partial(checkpoint_wrapper, **options),
        check_fn=lambda module: isinstance(module, Block),
    )
    return model


def composed():
    model = made()
    for block in model.blocks:
        composable_checkpoint(block)
    return model


def with_forwards():
    model = made()
    for block in model.blocks:
        block.forward = functools.partial(plain_checkpoint.func, block.forward, use_reentrant=False)
    return model


def _checkpointed_forward(forward, module, hidden):
    return plain_checkpoint(functools.partial(forward, module), hidden)


def with_forwards_as_fairscale():
    model = made()
    for block in model.blocks:
        block.forward = functools.partial(_checkpointed_forward, Block.forward, block)
    return model


def compiled_in_place():
    model = made()
    model.compile(backend="eager")
    return model


def compiled_blocks():
    model = made()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def replaced_blocks():
    model = made()
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend="eager")
    return model


HF = "Hugging Face's gradient checkpointing (the model itself)"
WRAPPED = (
    "torch's CheckpointWrapper (blocks.0 and 2 more modules): leave out the call that wrapped it"
)
HERE = f"{__name__}._checkpointed_forward"
CASES = {
    "transformers": (
        lambda: flagged(LikeTransformers),
        f"{HF}: call model.gradient_checkpointing_disable() first",
    ),
    "diffusers": (
        lambda: flagged(LikeDiffusers),
        f"{HF}: call model.disable_gradient_checkpointing() first",
    ),
    "bare flag": (
        lambda: flagged(Flagged),
        f"{HF}: set model.gradient_checkpointing = False first",
    ),
    "timm": (
        lambda: flagged(LikeTimm),
        "timm's gradient checkpointing (the model itself): call model.set_grad_checkpointing(",
    ),
    "mmcv": (
        lambda: flagged(LikeMmcv),
        "MMCV's checkpointing (the model itself): set model.with_cp = False first",
    ),
    "wrapper": (wrapped_by_torch, WRAPPED),
    "reentrant wrapper": (
        lambda: wrapped_by_torch(checkpoint_impl=CheckpointImpl.REENTRANT),
        WRAPPED,
    ),
    "composable": (
        composed,
        "torch.distributed's composable checkpoint (blocks.0 and 2 more modules): "
        "leave out the call checkpoint(model.blocks[0])",
    ),
    "forward": (
        with_forwards,
        "a forward that calls torch.utils.checkpoint.checkpoint (blocks.0 and 2 more modules): "
        "del model.blocks[0].forward first",
    ),
    "fairscale": (
        with_forwards_as_fairscale,
        f"a forward that calls {HERE} (blocks.0 and 2 more modules): del model.blocks[0].forward",
    ),
    "compiled in place": (
        compiled_in_place,
        "torch.compile (the model itself): set model._compiled_call_impl = None, and compile after",
    ),
    "compiled blocks": (
        compiled_blocks,
        "torch.compile (blocks.0 and 2 more modules): "
        "set model.blocks[0]._compiled_call_impl = None, and compile after fit",
    ),
    "replaced blocks": (
        replaced_blocks,
        "torch.compile (blocks.0 and 2 more modules): put model.blocks[0]._orig_mod in its place",
    ),
    "compiled": (
        lambda: torch.compile(made(), backend="eager"),
        "torch.compile (the model itself): fit model._orig_mod and compile after that",
    ),
}
each = pytest.mark.parametrize("name", CASES)
pytestmark = [
    # torch 2.13: what Dynamo asks of tensors inside a model, and a reentrant checkpoint of a model
    # whose input needs no gradient.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]


def state_of(model):
    """Everything that a module holds, by identity, and the classes."""
    modules = list(model.modules())
    return [(module, type(module), dict(vars(module))) for module in modules]


def assert_unchanged(model, before):
    for (module, kind, own), (old_module, old_kind, old) in zip(
        state_of(model), before, strict=True
    ):
        assert module is old_module
        assert kind is old_kind
        assert own.keys() == old.keys()
        assert all(own[name] is old[name] for name in old)


@each
def test_another_owner_is_refused_by_name_and_place_with_the_call_that_switches_it_off(name):
    make, sentence = CASES[name]
    model = make()
    before = state_of(model)
    calls = (
        lambda: leanstep.fit(model, batch()),
        lambda: leanstep.profile(model, batch()),
        lambda: leanstep.profile(model, batch(), device="h200"),
    )
    for call in calls:
        with pytest.raises(InputError) as caught:
            call()

        message = str(caught.value)
        assert message.startswith(f"this model is already under {sentence}")
        assert message.endswith(TAKEOVER)
    assert_unchanged(model, before)


@each
def test_takeover_switches_it_off_and_remove_gives_the_same_objects_back(name):
    model, plain = CASES[name][0](), made()
    before, keys = state_of(model), list(model.state_dict())
    names = [path for path, _ in model.named_parameters()]

    fitted = leanstep.fit(model, batch(), budget="60%", takeover=True)

    assert fitted.plan.changed
    assert fitted.verdict.gradients_equal
    assert "switched off until remove(): " in str(fitted)
    assert list(model.state_dict()) == keys
    assert [path for path, _ in model.named_parameters()] == names
    for _ in range(4):
        assert_same(numbers(plain), numbers(model))
    fitted.remove()
    fitted.remove()
    assert_unchanged(model, before)
    assert "switched off" not in str(fitted)


@each
def test_a_fit_that_fails_gives_the_model_back(name):
    model = CASES[name][0]()
    before = state_of(model)
    with pytest.raises(leanstep.BudgetError):
        leanstep.fit(model, batch(), budget=1, takeover=True)
    assert_unchanged(model, before)
    if name != "reentrant wrapper":
        assert_same(numbers(made()), numbers(model))


def test_takeover_of_a_model_that_nobody_holds_is_a_plain_fit():
    model = made()
    before = state_of(model)
    fitted = leanstep.fit(model, batch(), takeover=True)
    assert "switched off" not in str(fitted)
    fitted.remove()
    assert_unchanged(model, before)


def test_takeover_of_a_fitted_model_is_refused_as_before():
    model = made()
    leanstep.fit(model, batch(), verify=False)
    with pytest.raises(InputError, match="already fitted: call remove"):
        leanstep.fit(model, batch(), takeover=True)


def test_a_plan_is_not_applied_to_a_model_that_somebody_else_holds():
    model = made(LikeTransformers)
    plan = leanstep.plan(leanstep.profile(model, batch()), "60%")
    model.gradient_checkpointing = True
    with pytest.raises(InputError, match="Hugging Face's gradient checkpointing"):
        leanstep.apply(model, plan)
    with pytest.raises(InputError, match="Hugging Face's gradient checkpointing"):
        leanstep.verify(model, batch(), plan=plan)


def test_a_factory_that_makes_such_a_model_is_refused_too():
    with pytest.raises(InputError, match="Hugging Face's gradient checkpointing"):
        leanstep.profile(lambda: (flagged(LikeTransformers), batch()), device="h200")


def test_a_flag_inside_a_larger_model_is_named_by_its_path():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), flagged(LikeTransformers))
    with pytest.raises(InputError) as caught:
        leanstep.fit(model, batch())
    assert "checkpointing (1): call model[1].gradient_checkpointing_disable()" in str(caught.value)


def test_offloaded_activations_are_an_owner_too():
    model = made()
    model.blocks[1] = offload_wrapper(model.blocks[1])
    with pytest.raises(InputError, match=r"under torch's OffloadWrapper \(blocks\.1\): leave out"):
        leanstep.fit(model, batch())


def test_a_forward_with_an_unknown_function_behind_it_cannot_be_taken_over():
    def checkpoint(hidden):
        return plain_checkpoint(functools.partial(Block.forward, model.blocks[0]), hidden)

    model = made()
    model.blocks[0].forward = checkpoint
    with pytest.raises(InputError) as refused:
        leanstep.fit(model, batch())
    assert not str(refused.value).endswith(TAKEOVER)
    with pytest.raises(InputError, match="takeover=True cannot switch that off from outside"):
        leanstep.fit(model, batch(), takeover=True)


class TheirCheckpointWrapper(nn.Module):
    def __init__(self, module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden):
        return plain_checkpoint(self.module, hidden)


def test_a_wrapper_that_torch_does_not_know_is_named_and_not_taken_over():
    model = made()
    model.blocks[1] = TheirCheckpointWrapper(model.blocks[1])
    with pytest.raises(InputError) as caught:
        leanstep.fit(model, batch(), takeover=True)
    assert str(caught.value).endswith(
        "TheirCheckpointWrapper (blocks.1), and takeover=True cannot switch that off from outside: "
        "put the module that model.blocks[1] wraps in its place"
    )


class ByItself(Stack):
    """Calls torch's checkpoint in its own code: there is no switch."""

    def call(self, block, hidden):
        return torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)


@pytest.mark.parametrize("takeover", [False, True])
def test_a_model_that_checkpoints_in_its_own_code_is_planned_as_it_runs_and_says_so(takeover):
    model = made(ByItself)
    profile = leanstep.profile(model, batch())
    (note,) = profile.company
    assert note.startswith(
        "the model checkpoints by itself (torch.utils.checkpoint.checkpoint at test_owners.py:"
    )

    fitted = leanstep.fit(model, batch(), budget="100%", takeover=takeover)

    assert note in fitted.plan.notes
    assert fitted.verdict.gradients_equal
    assert_same(numbers(made(ByItself)), numbers(model))


def their_checkpoint(function, *args, **kwargs):
    """Stand in for what some libraries put in the place of torch's function."""
    return function(*args)


def test_a_replaced_checkpoint_function_is_named_where_the_model_calls_it(monkeypatch):
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", their_checkpoint)
    for takeover in (False, True):
        with pytest.raises(InputError) as caught:
            leanstep.fit(made(ByItself), batch(), takeover=takeover)
        assert str(caught.value).startswith(
            f"torch.utils.checkpoint.checkpoint was replaced by {__name__}.their_checkpoint, and "
            "the model calls it (test_owners.py:"
        )
        assert str(caught.value).endswith(
            "put torch's own back, or switch the model's checkpointing off"
        )


def test_a_replaced_checkpoint_function_that_the_model_does_not_call_is_nobodys_business(
    monkeypatch,
):
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", their_checkpoint)
    fitted = leanstep.fit(made(), batch(), budget="60%")
    assert fitted.verdict.gradients_equal
    assert not fitted.profile.company


def test_blocks_do_not_run_through_a_function_that_is_not_torchs(monkeypatch):
    monkeypatch.setattr(sys.modules["leanstep.engines.module"], "checkpoint", their_checkpoint)
    model = made()
    before = state_of(model)
    with pytest.raises(InputError, match="before leanstep was loaded, and the plan runs blocks"):
        leanstep.fit(model, batch(), budget="60%", engine="module")
    assert_unchanged(model, before)


def test_a_compiler_that_steps_aside_owns_nothing():
    model = compiled_blocks()
    with torch.compiler.set_stance("force_eager"):
        fitted = leanstep.fit(model, batch(), budget="60%")
    assert fitted.verdict.gradients_equal


def test_a_model_of_transformers_in_all_its_forms():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (4, 16))
    text = {"input_ids": ids, "labels": ids, "use_cache": False}
    forms = (
        {},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    )
    for options in forms:
        model.gradient_checkpointing_enable(**options)
        with pytest.raises(InputError, match=r"call model\.gradient_checkpointing_disable\(\)"):
            leanstep.fit(model, text)
    before = state_of(model)
    fitted = leanstep.fit(model, text, budget="85%", takeover=True)
    assert fitted.verdict.gradients_equal
    assert not model.is_gradient_checkpointing
    fitted.remove()
    assert_unchanged(model, before)
    assert model.is_gradient_checkpointing
