"""What only a GPU can show: its kernels in a dry run, and memory that really ends."""

import gc

import pytest

torch = pytest.importorskip("torch")

import leanstep  # noqa: E402
from leanstep import models  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def clean_device():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def build(name, **kwargs):
    return models.build(name, device="cuda", autocast="bf16", fused=True, **kwargs)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("resnet50", {"batch": 32, "image": 224}),
        ("bert-base", {"batch": 16, "seq": 256}),
        ("gpt2-medium", {"batch": 4, "seq": 512}),
        ("unet", {"batch": 4}),
    ],
)
def test_the_dry_run_leaves_no_block_out(name, sizes):
    model, batch, loss, optimizer = build(name, **sizes)
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="85%")
    assert fitted.profile.exclusions == ()
    assert not fitted.verdict.different
    assert fitted.verdict.within_budget
    fitted.remove()


def test_a_step_larger_than_the_device_is_fitted_and_verified():
    model, batch, loss, optimizer = build("bert-base", batch=32, seq=512)
    known = leanstep.profile(model, batch, loss, optimizer=optimizer)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    room = 0.8 * known.peak_bytes
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            loss(model, batch).backward()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        fitted = leanstep.fit(
            model, batch, loss, optimizer=optimizer, budget=int(0.6 * known.peak_bytes)
        )
        assert not fitted.verdict.baseline_fits
        assert not fitted.verdict.different
        assert fitted.verdict.within_budget
        assert fitted.profile.peak_bytes == pytest.approx(known.peak_bytes, rel=0.02)
        loss(model, batch).backward()
        optimizer.step()
        fitted.remove()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("bert-base", {"batch": 32, "seq": 512}), ("resnet50", {"batch": 64, "image": 224})],
)
def test_activations_on_the_host_cost_neither_bits_nor_budget(name, sizes):
    model, batch, loss, optimizer = build(name, **sizes)
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="70%", chunks=False)
    assert fitted.plan.host_bytes > 0
    assert not fitted.verdict.different
    assert fitted.verdict.within_budget
    fitted.remove()
    alone = leanstep.fit(
        model,
        batch,
        loss,
        optimizer=optimizer,
        budget="70%",
        offload=False,
        chunks=False,
        verify=False,
    )
    assert alone.plan.host_bytes == 0
    assert alone.plan.extra_seconds > fitted.plan.extra_seconds
    alone.remove()
