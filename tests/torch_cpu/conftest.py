"""The twins of tests/support, as a fixture, and compiled blocks without a compiler."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import twins  # noqa: E402

from leanstep.engines.inductor import CompiledForm  # noqa: E402
from leanstep.ir import Engine  # noqa: E402
from leanstep.rebuild.block import BlockGraph  # noqa: E402
from leanstep.torch_private import compiler as torch_compiler  # noqa: E402
from leanstep.torch_private.loss import REDUCTIONS  # noqa: E402


@pytest.fixture
def lab() -> Iterator[SimpleNamespace]:
    # Ops this small are faster on one thread, much faster where the machine is busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield SimpleNamespace(
        Case=twins.Case,
        Block=twins.Block,
        Stack=twins.Stack,
        stack_of=twins.stack_of,
        everything=twins.everything,
        some=twins.some,
        rows=twins.rows,
        bits=twins.bits,
        different=twins.different,
        mean_square=twins.mean_square,
        REPLAY=Engine.REPLAY,
        MODULE=Engine.MODULE,
        BlockGraph=BlockGraph,
        WIDTH=twins.WIDTH,
        ROWS=twins.ROWS,
    )
    torch.set_num_threads(threads)


@pytest.fixture
def cross_entropy_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in the type of the logits, cast to float32 for the loss: so CUDA's autocast has it."""
    functional = torch.nn.functional
    reductions = {number: name for name, number in REDUCTIONS.items()}

    def cross_entropy_loss(input, target, weight, reduction, ignored, label_smoothing):
        with torch.autocast("cpu", enabled=False):
            scores = functional.log_softmax(input, 1).float()
            how = {"ignore_index": ignored, "reduction": reductions[reduction]}
            return functional.nll_loss(scores, target, **how)

    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", cross_entropy_loss)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs of compiled blocks run op by op: a compiler of C++ takes seconds for each."""
    torch._dynamo.reset()
    plain = {
        "compile_graph": torch_compiler.compile_to_python,
        "compile_alone": torch_compiler.compile_alone_to_python,
    }
    for name, function in plain.items():
        monkeypatch.setattr(CompiledForm, name, staticmethod(function))
