"""The twins of tests/support, as a fixture, and compiled blocks without a compiler."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import twins  # noqa: E402

from leanstep import torch_compiler  # noqa: E402
from leanstep.blockgraph import BlockGraph  # noqa: E402
from leanstep.engines.inductor import CompiledForm  # noqa: E402
from leanstep.ir import Engine  # noqa: E402


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

    def cross_entropy(
        input,
        target,
        weight=None,
        size_average=None,
        ignore_index=-100,
        reduce=None,
        reduction="mean",
        label_smoothing=0.0,
    ):
        if torch.overrides.has_torch_function((input, target)):
            given = input, target, weight, size_average, ignore_index, reduce, reduction
            return torch.overrides.handle_torch_function(
                functional.cross_entropy, (input, target), *given, label_smoothing
            )
        with torch.autocast("cpu", enabled=False):
            scores = functional.log_softmax(input, 1).float()
            return functional.nll_loss(
                scores, target, ignore_index=ignore_index, reduction=reduction
            )

    monkeypatch.setattr(functional, "cross_entropy", cross_entropy)


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
