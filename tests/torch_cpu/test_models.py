"""The models are the published ones, their steps run, and building them leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leanstep import models
from leanstep.errors import InputError
from leanstep.models.catalog import CATALOG
from leanstep.models.resnet import ResNet, ResNetSizes
from leanstep.models.tasks import call, match_rows
from leanstep.models.transformer.ends import IGNORED_LABEL
from leanstep.models.transformer.layers import CrossLayer, PostNormLayer, PreNormLayer
from leanstep.models.transformer.rotary import RotaryTables, rotate

TINY = [name for name in models.names() if name.endswith("-tiny")]
TEXT_TINY = ["bert-tiny", "gpt2-tiny", "llama-tiny", "seq2seq-tiny"]
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
}
EXTENTS = {
    "resnet50": (8, 3, 224, 224),
    "unet": (4, 3, 224, 224),
    "bert-large": (4, 512),
    "gpt2": (2, 1024),
    "llama-1b": (1, 2048),
    "seq2seq-base": (4, 512),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_full_size_models_have_the_published_number_of_parameters(name: str) -> None:
    model = models.build(name, device="meta").model

    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_seq2seq_base_is_as_large_as_t5_base() -> None:
    model = models.build("seq2seq-base", device="meta").model

    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        223e6, rel=0.01
    )


def test_model_classes_can_be_constructed_on_meta() -> None:
    sizes = CATALOG["resnet152"].sizes
    assert isinstance(sizes, ResNetSizes)

    with torch.device("meta"):
        model = ResNet(sizes)

    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", EXTENTS)
def test_default_batch_has_the_usual_shape(name: str) -> None:
    batch = models.build(name, device="meta").batch

    assert tensors_of(batch)[0].shape == EXTENTS[name]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", TINY)
def test_a_training_step_runs_and_reaches_every_parameter(name: str, optimizer: str) -> None:
    model, batch, loss, stepper = models.build(name, optimizer=optimizer)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}

    value = loss(model, batch)
    value.backward()
    stepper.step()

    assert value.shape == () and value.isfinite()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key
        assert not torch.equal(parameter, before[key]), key


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_step_saves_between_half_a_megabyte_and_eight(name: str) -> None:
    model, batch, loss, _ = models.build(name)
    kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = loss(model, batch)

    assert value.requires_grad
    assert 2**19 < sum(saved.values()) < 2**23


@pytest.mark.parametrize("name", TEXT_TINY)
def test_language_models_return_logits_without_labels(name: str) -> None:
    model, batch, loss, _ = models.build(name, dropout=0.0)
    assert isinstance(batch, dict)
    inputs = {key: tensor for key, tensor in batch.items() if key != "labels"}

    logits = call(model, inputs)

    assert logits.shape == (*batch["labels"].shape, 512)
    flat = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL
    )
    assert torch.equal(flat, loss(model, batch))
    # Weights start small, so the first guess is close to a uniform one.
    assert flat.item() == pytest.approx(torch.tensor(512.0).log().item(), rel=0.1)


@pytest.mark.parametrize("name", TINY)
def test_every_batch_is_what_the_model_is_called_with_at_any_number_of_rows(name: str) -> None:
    model, batch, loss, _ = models.build(name, batch=3)
    longer = repeat(batch, 2)

    assert len(tensors_of(batch)[0]) == 3
    assert loss(model, batch).isfinite() and loss(model, longer).isfinite()


def test_targets_start_over_when_a_batch_has_more_rows() -> None:
    targets = torch.tensor([7, 8, 9])

    assert match_rows(targets, 3) is targets
    assert match_rows(targets, 2).tolist() == [7, 8]
    assert match_rows(targets, 5).tolist() == [7, 8, 9, 7, 8]


@pytest.mark.parametrize("name", TEXT_TINY)
def test_dropout_is_on_by_default_while_training(name: str) -> None:
    model, batch, loss, _ = models.build(name)

    assert model.training
    assert not torch.equal(loss(model, batch), loss(model, batch))
    assert {part.p for part in model.modules() if isinstance(part, nn.Dropout)} == {0.1}


@pytest.mark.parametrize("name", TEXT_TINY)
def test_dropout_zero_and_eval_mode_are_deterministic(name: str) -> None:
    model, batch, loss, _ = models.build(name, dropout=0.0)
    dropping = models.build(name).model.eval()

    assert torch.equal(loss(model, batch), loss(model, batch))
    assert torch.equal(loss(dropping, batch), loss(model.eval(), batch))


@pytest.mark.parametrize("name", TINY)
def test_a_seed_gives_the_same_weights_data_and_loss(name: str) -> None:
    first, again, other = (models.build(name, seed=seed) for seed in (1, 1, 2))

    assert equal_states(first.model, again.model)
    assert not equal_states(first.model, other.model)
    assert not torch.equal(tensors_of(first.batch)[0], tensors_of(other.batch)[0])
    losses = [built.loss(built.model.eval(), built.batch) for built in (first, again)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", [*TINY, "resnet18"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_building_leaves_the_random_state_alone(name: str, device: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()

    models.build(name, device=device)

    assert torch.equal(torch.get_rng_state(), before)


def test_the_default_device_of_the_caller_is_not_used() -> None:
    with torch.device("meta"):
        model, batch, _, _ = models.build("gpt2-tiny")

    assert not any(tensor.is_meta for tensor in (*model.parameters(), *tensors_of(batch)))


def test_resnet_rectifies_in_place_and_keeps_running_statistics() -> None:
    model, batch, loss, _ = models.build("resnet-tiny")

    rectifiers = [part for part in model.modules() if isinstance(part, nn.ReLU)]
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    loss(model, batch)

    assert len(rectifiers) == 9 and all(part.inplace for part in rectifiers)
    assert all(part.num_batches_tracked == 1 for part in norms)


def test_resnet50_strides_in_the_3x3_convolution_as_version_one_and_a_half_does() -> None:
    model = models.build("resnet50", device="meta").model
    first = model.get_submodule("layer2.0")

    strides = [first.get_submodule(name).stride for name in ("conv1", "conv2", "conv3")]

    assert strides == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("name", "path", "kind", "count"),
    [
        ("bert-tiny", "layers", PostNormLayer, 4),
        ("gpt2-tiny", "layers", PreNormLayer, 4),
        ("llama-tiny", "layers", PreNormLayer, 4),
        ("seq2seq-tiny", "encoder.layers", PreNormLayer, 3),
        ("seq2seq-tiny", "decoder.layers", CrossLayer, 3),
    ],
)
def test_layers_are_in_a_module_list(name: str, path: str, kind: type, count: int) -> None:
    layers = models.build(name).model.get_submodule(path)

    assert isinstance(layers, nn.ModuleList)
    assert [type(layer) for layer in layers] == [kind] * count


@pytest.mark.parametrize(
    ("name", "table", "head"),
    [
        ("bert-tiny", "embeddings.tokens", "head"),
        ("gpt2-tiny", "embeddings.tokens", "head"),
        ("llama-tiny", "tokens", "head"),
        ("seq2seq-tiny", "embeddings.tokens", "head"),
    ],
)
def test_the_head_is_tied_to_the_embedding(name: str, table: str, head: str) -> None:
    model = models.build(name).model

    assert model.get_submodule(head).weight is model.get_submodule(table).weight


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_a_decoder_does_not_read_later_tokens(name: str) -> None:
    model, batch, _, _ = models.build(name, dropout=0.0)
    assert isinstance(batch, dict)
    tokens = batch["tokens"]
    changed = tokens.clone()
    changed[:, 20:] = 0

    logits, other = model(tokens), model(changed)

    torch.testing.assert_close(logits[:, :20], other[:, :20])
    assert not torch.allclose(logits[:, 20:], other[:, 20:])


@pytest.mark.parametrize(("name", "read"), [("bert-tiny", "tokens"), ("seq2seq-tiny", "source")])
def test_masked_positions_are_not_read(name: str, read: str) -> None:
    model, batch, _, _ = models.build(name, dropout=0.0)
    assert isinstance(batch, dict)
    del batch["labels"]
    mask = torch.ones_like(batch[read], dtype=torch.bool)
    mask[:, 20:] = False
    changed = batch | {read: torch.where(mask, batch[read], 0)}

    logits, other = (model(**inputs, mask=mask) for inputs in (batch, changed))

    kept = slice(0, 20) if read == "tokens" else slice(None)
    torch.testing.assert_close(logits[:, kept], other[:, kept])


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryTables(16, 8, 10_000.0)(16)
    query, key = (torch.randn(1, 1, 1, 8).expand(1, 1, 16, 8) for _ in range(2))

    scores = rotate(query, rotary) @ rotate(key, rotary).transpose(-1, -2)

    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1])
    assert not torch.allclose(scores[..., 0, 0], scores[..., 0, 5])


def test_rotary_tables_are_neither_saved_nor_too_short() -> None:
    model, batch, loss, _ = models.build("llama-tiny", seq=100)

    assert not any("rotary" in key for key in model.state_dict())
    assert loss(model, batch).isfinite()


@pytest.mark.parametrize("name", TINY)
def test_models_train_under_autocast(name: str) -> None:
    model, batch, loss, _ = models.build(name)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(model, batch)
    value.backward()

    assert value.isfinite()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet51", {}, "did you mean 'resnet50'.*known are resnet18, .*unet-tiny"),
        ("GPT2", {}, "did you mean 'gpt2'"),
        ("zzz", {}, "no model is called 'zzz': known are"),
        ("gpt2", {"optimizer": "adam"}, "no optimizer is called 'adam': did you mean 'adamw'"),
        ("gpt2", {"image": 32}, "gpt2 takes no image=32: pass seq="),
        ("unet", {"seq": 32}, "unet takes no seq=32: pass image="),
        ("unet", {"image": 30}, "image=30 does not fit unet: use a multiple of 8"),
        ("gpt2", {"seq": 1025}, "seq=1025 does not fit gpt2: it has 1024 learned positions"),
        ("gpt2", {"batch": 0}, "batch=0 is too small"),
        ("gpt2", {"seq": 0}, "seq=0 is too small"),
        ("gpt2", {"dropout": 1.5}, "dropout=1.5 is not a share"),
        ("resnet18", {"dropout": 0.1}, "resnet18 has no dropout"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        models.build(name, device="meta", **options)


def tensors_of(batch: models.Batch) -> list[Tensor]:
    """Return the tensors of a batch in order."""
    match batch:
        case dict():
            return list(batch.values())
        case tuple():
            return list(batch)
        case _:
            return [batch]


def repeat(batch: models.Batch, times: int) -> models.Batch:
    """Return the batch with its rows repeated."""
    match batch:
        case dict():
            return {name: torch.cat([tensor] * times) for name, tensor in batch.items()}
        case tuple():
            return tuple(torch.cat([tensor] * times) for tensor in batch)
        case _:
            return torch.cat([batch] * times)


def equal_states(first: nn.Module, second: nn.Module) -> bool:
    """Say whether two models hold the same bits."""
    ours, theirs = first.state_dict(), second.state_dict()
    return all(torch.equal(ours[key], theirs[key]) for key in ours)
