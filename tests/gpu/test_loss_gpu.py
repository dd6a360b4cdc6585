"""The loss in chunks on a GPU, where rows have other kernels for other sizes of vocabulary."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import leanstep  # noqa: E402
from leanstep import models  # noqa: E402

pytestmark = pytest.mark.gpu

# Rows of 1,000 stay in a warp's registers, of 30,522 in shared memory, of 128,256 in neither; an
# odd number of classes has rows that begin anywhere.
CLASSES = [1_000, 30_522, 50_257, 128_256]


def logits_and_labels(words, dtype, ignored):
    torch.manual_seed(3)
    logits = torch.randn(2048, words, device="cuda").mul_(4).to(dtype).requires_grad_()
    labels = torch.randint(words, (2048,), device="cuda")
    labels[::7] = ignored
    return logits, labels


@pytest.mark.parametrize("words", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize("is_strict", [False, True])
def test_loss_and_gradient_have_the_bits_of_the_whole(words, dtype, ignored, is_strict):
    inputs, labels = logits_and_labels(words, dtype, ignored)
    found, names = [], []
    torch.use_deterministic_algorithms(is_strict)
    try:
        for function in (functional.cross_entropy, leanstep.cross_entropy):
            for reduction in ("mean", "sum"):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = function(inputs * 1, labels, reduction=reduction, ignore_index=ignored)
                names.append(type(loss.grad_fn).__name__)
                found += [loss.detach(), torch.autograd.grad(loss, inputs)[0]]
    finally:
        torch.use_deterministic_algorithms(False)

    # What is left to torch has torch's bits, too.
    assert names == [*["NllLossBackward0"] * 2, *["_InChunksBackward"] * 2]
    assert all(map(torch.equal, found[:4], found[4:]))


@pytest.mark.parametrize("name", ["bert-large", "gpt2-medium"])
def test_a_fit_computes_it_so_and_keeps_its_promise(name):
    model, batch, loss, optimizer = models.build(
        name, batch=8, seq=512, device="cuda", autocast="bf16", fused=True
    )
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, budget="75%", offload=False)

    verdict = fitted.verdict
    assert fitted.plan.loss is not None and fitted.applied.rounds.window.runs > 0
    assert not verdict.different and verdict.within_budget
    assert verdict.predicted_peak_bytes <= 1.01 * verdict.measured_peak_bytes
    fitted.remove()
