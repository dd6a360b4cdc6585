"""One rank of many on one machine: what its step needs, without the others and without memory."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import leanstep
from leanstep import models
from leanstep.errors import InputError
from leanstep.ir import Category, Fact, Profile
from leanstep.rebuild.block import views_of


@functools.cache
def ranked(name: str, ranks: int, **options: object) -> Profile:
    return leanstep.profile(lambda: models.build(name, **options), device="h200", ranks=ranks)


def lasting(profile: Profile, category: Category) -> int:
    """The bytes of a category that are there between steps."""
    storages = profile.graph.storages
    return sum(s.nbytes for s in storages if s.category is category and s.is_live(0))


def gathered(profile: Profile) -> list[int]:
    """The bytes of gathered parameters at the start of each op."""
    away = [storage for storage in profile.graph.storages if storage.absences]
    ops = range(len(profile.graph.ops))
    return [sum(s.nbytes for s in away if s.is_live(position)) for position in ops]


def test_rank_has_its_share_of_parameters_and_optimizer_state() -> None:
    whole, shard = (ranked("gpt2-mini", ranks) for ranks in (4, 16))

    for category in (Category.PARAMETER, Category.OPTIMIZER_STATE):
        share = lasting(shard, category) / lasting(whole, category)
        assert share == pytest.approx(1 / 4, rel=0.05)


def test_parameters_are_gathered_for_a_block_or_two_at_a_time() -> None:
    profile = ranked("llama-tiny", 4)
    model = models.build("llama-tiny").model
    block = sum(p.nbytes for p in model.layers[0].parameters())
    rest = sum(p.nbytes for p in model.parameters()) - block * len(model.layers)

    # The root keeps its own from forward to backward; so does the block that is at work.
    assert max(gathered(profile)) == pytest.approx(rest + block, rel=0.1)
    assert gathered(profile)[-1] == 0


def test_largest_shards_are_counted_where_parameters_do_not_divide() -> None:
    def make():
        model = nn.Sequential(nn.Linear(4096, 5, bias=False), nn.Linear(5, 4096, bias=False))
        return model, torch.randn(2, 4096), lambda m, b: m(b).sum(), None

    profile = leanstep.profile(make, device="h200", ranks=4)

    # Two of five rows, and 1024 rows of five.
    assert lasting(profile, Category.PARAMETER) == 4 * (2 * 4096 + 1024 * 5)


def test_peak_falls_with_the_ranks_down_to_what_is_not_sharded() -> None:
    peaks = [ranked("gpt2-mini", ranks).peak_bytes for ranks in (1, 4, 16)]

    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.15 * peaks[1]


def test_a_thousand_ranks_need_what_is_not_sharded() -> None:
    def make():
        blocks = [nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.GELU()) for _ in range(4)]
        model = nn.Sequential(*blocks)
        return model, torch.randn(64, 2048), lambda m, b: m(b).sum(), None

    few, many = (leanstep.profile(make, device="h200", ranks=ranks) for ranks in (64, 1024))

    assert lasting(many, Category.PARAMETER) == lasting(few, Category.PARAMETER) / 16
    assert 0.9 * few.peak_bytes < many.peak_bytes < few.peak_bytes


def test_plan_recomputes_no_collective() -> None:
    profile = ranked("llama-tiny", 16, batch=64)
    plan = leanstep.plan(profile, "60%", offload=False)

    assert plan.peak_bytes <= 0.6 * profile.peak_bytes
    collectives = {op.name for op in profile.graph.ops if Fact.COLLECTIVE in op.facts}
    assert collectives == {"c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"}
    dropped = [key for decision in plan.decisions for key in decision.drop]
    assert any("aten.mm" in key for key in dropped)
    assert not any("c10d" in key or "fsdp" in key for key in dropped)


def test_plan_rebuilds_no_border_from_parameters_that_are_not_gathered_yet() -> None:
    profile = ranked("llama-tiny", 4, batch=64)

    assert all(view.borders == () for view in views_of(profile.graph, profile.blocks))


def test_collective_takes_as_long_as_the_bytes_that_a_rank_receives() -> None:
    profile = ranked("gpt2-mini", 4)
    ops = enumerate(profile.graph.ops)
    found = [i for i, op in ops if "allgather" in op.name]
    sizes = sorted({profile.seconds(index) for index in found})

    model = models.build("gpt2-mini", device="meta").model
    # All but the embeddings: those are tied to the head, and gathered with it.
    block = sum(p.nbytes for p in model.layers[0].parameters())
    assert sizes[0] == pytest.approx(5e-6 + 0.75 * block / 350e9, rel=0.01)


def test_factory_may_shard_its_model_itself() -> None:
    def make(mesh):
        model, batch, loss, _ = models.build("llama-tiny")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, batch, loss, torch.optim.AdamW(model.parameters())

    ours, theirs = ranked("llama-tiny", 4), leanstep.profile(make, device="h200", ranks=4)

    assert lasting(ours, Category.PARAMETER) == lasting(theirs, Category.PARAMETER)
    # Gathered in 16 bits.
    assert max(gathered(theirs)) == pytest.approx(max(gathered(ours)) / 2, rel=0.02)


def test_nothing_is_left_of_the_ranks() -> None:
    resize = torch.UntypedStorage.resize_
    ranked.__wrapped__("llama-tiny", 2)

    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize


def test_profile_with_absences_survives_a_file(tmp_path) -> None:
    profile = ranked("llama-tiny", 2)
    profile.save(tmp_path / "profile.json")

    assert leanstep.Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 2}, "name it, as in device='h200'"),
        ({"ranks": 0, "device": "h200"}, "from 1 to 1024"),
        ({"ranks": 2000, "device": "h200"}, "from 1 to 1024"),
    ],
)
def test_wrong_ranks_are_refused(options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        leanstep.profile(lambda: models.build("gpt2-tiny"), **options)


def test_model_that_goes_on_being_used_is_refused() -> None:
    with pytest.raises(InputError, match="give a function that makes"):
        leanstep.profile(nn.Linear(2, 2), torch.randn(1, 2), device="h200", ranks=2)
