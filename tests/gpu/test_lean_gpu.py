"""Lazy mode on a GPU: the loop's own first step, its kernels, and the allocator's peak."""

import gc

import pytest

torch = pytest.importorskip("torch")

import leanstep  # noqa: E402
from leanstep import models  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    # What has no deterministic form says so.
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 6


def trained(name, sizes, budget=None):
    """The parameters after some steps, and the peak of the last two."""
    gc.collect()
    torch.manual_seed(0)
    model, batch, loss, optimizer = models.build(
        name, device="cuda", autocast="bf16", fused=True, **sizes
    )
    lean = None if budget is None else leanstep.lean(model, optimizer, budget=budget)
    torch.manual_seed(5)
    for step in range(STEPS):
        if step == STEPS - 2:
            torch.cuda.reset_peak_memory_stats()
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    peak_bytes = torch.cuda.max_memory_allocated()
    tensors = [p.detach().cpu() for p in (*model.parameters(), *model.buffers())]
    return tensors, torch.cuda.get_rng_state(), peak_bytes, lean


@pytest.mark.parametrize(
    ("name", "sizes", "warn_only"),
    [
        # Attention repeats itself only where everything must.
        ("bert-base", {"batch": 16, "seq": 512}, False),
        ("gpt2-medium", {"batch": 8, "seq": 512}, False),
        ("resnet50", {"batch": 64, "image": 224}, True),
    ],
)
def test_one_line_gives_the_same_numbers_in_less_memory(name, sizes, warn_only, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        expected, state, peak_bytes, _ = trained(name, sizes)
        got, lean_state, lean_bytes, lean = trained(name, sizes, budget="85%")
    finally:
        torch.use_deterministic_algorithms(False)

    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(state, lean_state)
    assert lean.plan is not None and lean.plan.changed
    assert lean_bytes <= 0.86 * peak_bytes
