"""A profile for a device that is not there: nothing allocated, ops as on CUDA, no trace left."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import leanstep
from leanstep import models
from leanstep.devices import known_devices
from leanstep.ir import Category, Fact, Phase, Profile
from leanstep.rebuild.block import BlockGraph

FLASH = "aten._scaled_dot_product_flash_attention.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


def estimate(name: str, device: str = "h200", **options: object) -> Profile:
    return leanstep.profile(lambda: models.build(name, **options), device=device)


def estimate_loss(loss, *parameters: nn.Parameter, batch=None) -> Profile:
    """A profile of a function of a batch and some parameters."""
    model = nn.Module()
    for index, parameter in enumerate(parameters):
        model.register_parameter(f"p{index}", parameter)
    return leanstep.profile(model, batch, lambda model, batch: loss(batch), device="h200")


def names(profile: Profile, phase: Phase | None = None) -> Counter[str]:
    return Counter(op.name for op in profile.graph.ops if phase is None or op.phase is phase)


def bits(tensors) -> list[bytes]:
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


# What it is like.


def test_profile_is_marked_and_says_so() -> None:
    profile = estimate("gpt2-tiny")

    assert profile.estimated
    assert profile.device == "NVIDIA H200"
    assert "estimated for NVIDIA H200" in profile.notes[0]
    assert profile.peak_bytes == leanstep.simulate(profile).peak_bytes
    assert profile.step_seconds == pytest.approx(
        sum(map(profile.seconds, range(len(profile.graph.ops))))
    )


def test_measured_profile_is_not_marked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    profile = leanstep.profile(model, torch.randn(2, 4), lambda m, b: m(b).sum())

    assert not profile.estimated


@pytest.mark.parametrize("device", sorted(known_devices()))
def test_every_device_gives_a_profile(device: str) -> None:
    assert estimate("resnet-tiny", device).step_seconds > 0


def test_slower_device_takes_longer() -> None:
    sizes = {"batch": 64, "autocast": "bf16"}

    fast, slow = (estimate("gpt2", device, **sizes) for device in ("h200", "rtx3090"))

    assert 4 * fast.step_seconds < slow.step_seconds
    assert fast.peak_bytes == slow.peak_bytes


def test_survives_a_file(tmp_path: Path) -> None:
    profile = estimate("bert-tiny")
    profile.save(tmp_path / "profile.json")

    assert leanstep.Profile.load(tmp_path / "profile.json") == profile


def test_plan_of_it_drops_values_and_repeats_the_note() -> None:
    profile = estimate("bert-tiny", batch=64)
    plan = leanstep.plan(profile, "60%")

    assert plan.peak_bytes <= 0.6 * profile.peak_bytes
    assert any(decision.drop for decision in plan.decisions)
    assert any("estimated for NVIDIA H200" in note for note in plan.notes)


def test_same_model_as_measured_for_ops_that_are_the_same_everywhere() -> None:
    """Where no op differs between devices, both ways of recording see the same step."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()]
    model, batch = nn.Sequential(*layers, nn.Linear(64, 64)), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        once = model(batch)
        return (once * once + model(once)).mean()

    real = leanstep.profile(model, batch, loss, optimizer=optimizer)
    fake = leanstep.profile(model, batch, loss, optimizer=optimizer, device="h200")

    def lives(profile: Profile):
        skipped = (Category.GENERATOR, Category.OTHER)
        return [
            (s.category, s.birth, s.death, s.natural_death)
            for s in profile.graph.storages
            if s.category not in skipped
        ]

    assert [op.name for op in fake.graph.ops] == [op.name for op in real.graph.ops]
    assert lives(fake) == lives(real)
    assert fake.blocks == real.blocks
    assert fake.model == real.model
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=0.05)


# Nothing is allocated and nothing is left.


def test_full_size_model_takes_no_memory_and_little_time() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    profile = estimate("llama-1b", batch=16, autocast="bf16", fused=True)

    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert profile.peak_bytes > 80 * 2**30
    assert grown_bytes < 0.5 * 2**30


def test_model_on_meta_is_enough() -> None:
    on_meta = models.build("bert-tiny", device="meta")
    by_factory = estimate("bert-tiny")

    model, batch, loss, optimizer = on_meta
    profile = leanstep.profile(model, batch, loss, optimizer=optimizer, device="h200")

    assert profile.peak_bytes == by_factory.peak_bytes
    assert names(profile) == names(by_factory)
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_users_model_optimizer_and_random_state_are_untouched() -> None:
    model, batch, loss, optimizer = models.build("resnet-tiny")
    loss(model, batch).backward()
    optimizer.step()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    before = bits([*tensors, *state]), torch.get_rng_state()
    groups = [dict(group) for group in optimizer.param_groups]
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    leanstep.profile(model, batch, loss, optimizer=optimizer, device="h200")

    again = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert all(a is b for a, b in zip(tensors, again, strict=True))
    assert all(type(t) in (torch.Tensor, nn.Parameter) for t in again)
    assert bits([*again, *(t for e in optimizer.state.values() for t in e.values())]) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert [group["foreach"] for group in optimizer.param_groups] == [g["foreach"] for g in groups]
    assert not calls


def test_torch_is_as_it_was_after_a_factory_that_fails() -> None:
    init, apply = torch.autocast.__init__, nn.Module.to

    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        leanstep.profile(fails, device="h200")

    assert torch.autocast.__init__ is init
    assert nn.Module.to is apply
    assert type(torch.ones(1)) is torch.Tensor


def test_tied_weights_are_one_storage() -> None:
    real = models.build("gpt2-tiny")
    profile = leanstep.profile(*real[:3], optimizer=real.optimizer, device="h200")

    count = sum(s.category is Category.PARAMETER for s in profile.graph.storages)
    assert count == len(list(real.model.parameters()))
    assert "52 tensors" in str(profile.model)


def test_views_of_one_storage_stay_views() -> None:
    flat = torch.zeros(8, 4)
    first, second = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])

    profile = estimate_loss(
        lambda x: (x @ first @ second).sum(), first, second, batch=torch.ones(2, 4)
    )

    assert sum(s.category is Category.PARAMETER for s in profile.graph.storages) == 1


def test_gradients_kept_are_there_from_the_start() -> None:
    profile = leanstep.profile(
        lambda: models.build("gpt2-tiny"), device="h200", gradients_kept=True
    )
    gradients = [s for s in profile.graph.storages if s.category is Category.GRADIENT]

    assert gradients and all(s.birth < 0 for s in gradients)


# Ops in the form of the target.


def test_dropout_is_one_op_with_a_mask_of_bytes() -> None:
    profile = estimate("bert-tiny")

    assert names(profile)["aten.native_dropout.default"] == 9
    assert not names(profile)["aten.bernoulli_.float"]
    drawn = [op for op in profile.graph.ops if op.name == "aten.native_dropout.default"]
    assert all(Fact.RANDOM in op.facts for op in drawn)
    assert all(Fact.OWN_GENERATOR not in op.facts for op in drawn)
    # No draw waits for another: each notes its place in the stream.
    assert not any(s.category is Category.GENERATOR for s in profile.graph.storages)


def test_dropout_and_attention_may_be_dropped_and_replayed() -> None:
    profile = estimate("gpt2-tiny", autocast="bf16")
    view = BlockGraph(profile.graph, profile.blocks[1])
    keys = {view.storage_key(storage).split("::")[-1].split("#")[0] for storage in view.candidates}

    assert {"aten.native_dropout.default", FLASH, "aten.gelu.default"} <= keys


@pytest.mark.parametrize(
    ("options", "kernel"),
    [({}, EFFICIENT), ({"autocast": "bf16"}, FLASH), ({"autocast": "fp16"}, FLASH)],
    ids=["float32", "bf16", "fp16"],
)
def test_attention_is_one_kernel(options: dict[str, str], kernel: str) -> None:
    profile = estimate("llama-tiny", **options)

    assert names(profile)[kernel] == 4
    assert names(profile)[kernel.replace(".default", "_backward.default")] == 4
    assert not names(profile)["aten._softmax.default"]


def test_attention_with_a_mask_is_the_efficient_kernel() -> None:
    weight = nn.Parameter(torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)

    profile = estimate_loss(
        lambda _: functional.scaled_dot_product_attention(weight, weight, weight, mask, 0.1).sum(),
        weight,
    )

    assert names(profile)[EFFICIENT] == 1


def test_attention_inside_torchs_own_layer_is_seen() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    profile = leanstep.profile(layer, torch.randn(2, 8, 32), lambda m, b: m(b).sum(), device="h200")

    assert names(profile)[EFFICIENT] == 1
    assert names(profile)["aten.native_dropout.default"] == 3


def test_recomputation_in_backward_has_the_same_form() -> None:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8))

    profile = leanstep.profile(
        layer,
        torch.randn(4, 8),
        lambda m, b: checkpoint(m, b, use_reentrant=False).sum(),
        device="h200",
    )

    assert names(profile, Phase.FORWARD)["aten.native_dropout.default"] == 1
    assert names(profile, Phase.BACKWARD)["aten.native_dropout.default"] == 1


def test_optimizer_works_on_all_tensors_at_once_by_default() -> None:
    default = estimate("gpt2-tiny")
    fused = estimate("gpt2-tiny", fused=True)

    assert names(default, Phase.OPTIMIZER)["aten._foreach_addcdiv_.ScalarList"] == 1
    assert set(names(fused, Phase.OPTIMIZER)) <= {
        "aten._fused_adamw_.default",
        "aten._foreach_add_.Scalar",
    }

    def rise(profile: Profile) -> int:
        return sum(
            s.nbytes
            for s in profile.graph.storages
            if s.birth >= 0 and profile.graph.ops[s.birth].phase is Phase.OPTIMIZER
        )

    parameters = sum(s.nbytes for s in default.graph.storages if s.category is Category.PARAMETER)
    assert rise(default) == pytest.approx(parameters, rel=0.05)
    assert rise(fused) == 0


def test_sgd_is_known_too() -> None:
    assert estimate("resnet-tiny", optimizer="sgd").peak_bytes > 0
    assert estimate("resnet-tiny", optimizer="sgd", fused=True).peak_bytes > 0


def test_storages_are_rounded_as_cudas_allocator_does() -> None:
    profile = estimate("resnet-tiny")

    assert all(storage.nbytes % 512 == 0 for storage in profile.graph.storages)


# Autocast.


def test_autocast_of_cuda_casts_as_cuda_does() -> None:
    profile = estimate("gpt2-tiny", autocast="bf16", device="h200")
    plain = estimate("gpt2-tiny")

    layers = Counter(cost.signature for cost in profile.costs)
    assert (
        layers["aten._to_copy.default"]
        > Counter(c.signature for c in plain.costs)["aten._to_copy.default"]
    )
    # Scores have the type of the logits, and the loss is computed of a cast of them.
    graph = profile.graph
    (loss,) = [op for op in graph.ops if op.name == "aten.nll_loss_forward.default"]
    read = graph.storages[loss.reads[0].storage]
    cast = graph.ops[read.birth]
    assert cast.name == "aten._to_copy.default" and read.nbytes == 4 * 32 * 512 * 4
    scores = graph.storages[cast.reads[0].storage]
    assert graph.ops[scores.birth].name == "aten._log_softmax.default"
    assert scores.nbytes == read.nbytes / 2
    (back,) = [op for op in graph.ops if op.name == "aten._log_softmax_backward_data.default"]
    assert back.rise_bytes == scores.nbytes


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_autocast_casts_a_weight_once_and_says_nothing(kind: str) -> None:
    weight = nn.Parameter(torch.zeros(16, 16))

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, dtype=torch.bfloat16):
            hidden = functional.linear(functional.linear(batch, weight), weight)
            assert hidden.dtype is torch.bfloat16
            normal = functional.layer_norm(hidden, (16,))
            assert normal.dtype is torch.float32
            assert functional.softmax(hidden, -1).dtype is torch.float32
            assert hidden.relu().dtype is torch.bfloat16
            assert hidden.pow(2).dtype is torch.float32
            return normal.sum()

    profile = estimate_loss(loss, weight, batch=torch.ones(4, 16))

    storages = {
        s: i for i, s in enumerate(profile.graph.storages) if s.category is Category.PARAMETER
    }
    (number,) = storages.values()
    casts = [
        op
        for op in profile.graph.ops
        if op.name == "aten._to_copy.default" and any(v.storage == number for v in op.reads)
    ]
    assert len(casts) == 1


def test_factory_may_move_its_model_to_cuda() -> None:
    def factory():
        model, batch, _, _ = models.build("resnet-tiny", device="cuda")
        model = model.to("cuda").bfloat16()
        return model, batch.cuda().bfloat16(), lambda m, b: m(b).float().sum()

    profile = leanstep.profile(factory, device="h200")

    assert profile.peak_bytes > 0


# What cannot be done is said in a sentence.


def reads_a_number():
    model, batch, loss, optimizer = models.build("resnet-tiny")
    if batch.sum().item() > 0:
        batch = -batch
    return model, batch, loss, optimizer


def picks_by_data():
    model, batch, loss, optimizer = models.build("resnet-tiny")
    return model, batch[batch[:, 0, 0, 0] > 0], loss, optimizer


def goes_to_numpy():
    model, batch, loss, optimizer = models.build("resnet-tiny")
    return model, torch.from_numpy(batch.numpy()), loss, optimizer


@pytest.mark.parametrize(
    ("factory", "asked"),
    [
        (reads_a_number, "_local_scalar_dense"),
        (picks_by_data, "nonzero|index"),
        (goes_to_numpy, "numpy"),
    ],
)
def test_factory_that_needs_data_is_told_where(factory, asked: str) -> None:
    line = factory.__code__.co_firstlineno

    with pytest.raises(leanstep.LeanstepError, match=asked) as caught:
        leanstep.profile(factory, device="h200")

    assert "the factory asks for data" in str(caught.value)
    assert f"test_estimated.py:{line + 2}" in str(caught.value)


def test_step_that_needs_data_is_told_where() -> None:
    model = nn.Linear(4, 1)

    with pytest.raises(leanstep.LeanstepError, match=r"the step asks for data.*test_estimated"):
        leanstep.profile(
            model, torch.ones(2, 4), lambda m, b: m(b).sum() * float(b.sum()), device="h200"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h2000"}, "did you mean 'h200'"),
        ({"device": "tpu"}, "known are h200"),
        ({"device": None}, "goes with device="),
        ({"device": "h200", "batch": 1}, "leave the arguments out"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict, message: str) -> None:
    with pytest.raises(leanstep.LeanstepError, match=message):
        leanstep.profile(lambda: models.build("resnet-tiny"), **arguments)


def test_factory_that_returns_something_else_is_told() -> None:
    with pytest.raises(leanstep.LeanstepError, match="not \\(model, batch, loss, optimizer\\)"):
        leanstep.profile(lambda: nn.Linear(2, 2), device="h200")
