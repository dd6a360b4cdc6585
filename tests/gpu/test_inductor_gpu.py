"""Compiled blocks on a GPU: Triton's kernels, and memory that the allocator counts."""

import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # noqa: E402

import leanstep  # noqa: E402
from leanstep import models  # noqa: E402
from leanstep.engines.inductor import CompiledForm  # noqa: E402
from leanstep.models.resnet import Bottleneck  # noqa: E402
from leanstep.torch_private.programs import ShortProgram, _launcher  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

SIZES = [
    ("bert-base", {"batch": 16, "seq": 256}),
    ("gpt2", {"batch": 4, "seq": 512}),
    ("resnet50", {"batch": 32, "image": 224}),
]


@pytest.fixture(autouse=True)
def clean_device():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_a_compiled_step_fits_its_budget_with_the_same_numbers(name, sizes):
    model, batch, loss, optimizer = models.build(
        name, device="cuda", autocast="bf16", fused=True, **sizes
    )
    fitted = leanstep.fit(model, batch, loss, optimizer=optimizer, engine="inductor", budget="85%")
    assert not fitted.profile.exclusions
    assert not fitted.verdict.different
    assert fitted.verdict.within_budget
    assert fitted.verdict.predicted_peak_bytes <= 1.02 * fitted.verdict.measured_peak_bytes
    fitted.remove()


# Without the last: eight kinds of blocks take minutes to compile.
@pytest.mark.parametrize(("name", "sizes"), SIZES[:2])
def test_without_exactness_more_can_be_dropped_and_rounding_is_all_that_differs(name, sizes):
    model, batch, loss, optimizer = models.build(
        name, device="cuda", autocast="bf16", fused=True, **sizes
    )
    fitted = leanstep.fit(
        model, batch, loss, optimizer=optimizer, engine="inductor", budget="70%", exact=False
    )
    assert fitted.verdict.within_budget
    assert not fitted.verdict.beyond_tolerance
    fitted.remove()


def programs():
    return [held for held in gc.get_objects() if type(held) is ShortProgram]


@pytest.mark.parametrize("shape", [(16, 64, 16, 16), (3, 64, 7, 5)], ids=str)
def test_programs_past_what_they_have_seen_to_have_the_same_bits(shape):
    before = programs()
    torch.manual_seed(0)
    blocks = [Bottleneck(64, 16, 1).cuda() for _ in range(2)]
    form = CompiledForm(Bottleneck.forward, (), {})
    batch = torch.randn(shape, device="cuda", requires_grad=True)

    def step():
        x = batch
        for block in blocks:
            x = form(block, (x,), {})
        parameters = [p for block in blocks for p in block.parameters()]
        return x.detach(), *torch.autograd.grad(x.square().mean(), [batch, *parameters])

    step()
    own = [program for program in programs() if not any(program is old for old in before)]
    assert len(own) >= 2
    assert all(program._short is not program._compiled for program in own)
    launched = [held for held in gc.get_objects() if type(held) is CachingAutotuner]
    launched = [kernel for kernel in launched if kernel.launchers]
    assert launched and all(_launcher(kernel) is not None for kernel in launched)
    short = step()
    for program in own:
        program._short = program._compiled

    assert all(map(torch.equal, short, step()))


def test_blocks_of_small_kernels_are_issued_late_and_have_them_joined():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 1), *(Bottleneck(64, 16, 1) for _ in range(3))).cuda()
    batch = torch.randn(16, 3, 16, 16, device="cuda")
    fitted = leanstep.fit(
        model, batch, lambda model, batch: model(batch).mean(), engine="inductor", budget="100%"
    )
    assert all(kind.joins_kernels for kind in fitted.profile.kinds)
    assert not fitted.verdict.different
    fitted.remove()
