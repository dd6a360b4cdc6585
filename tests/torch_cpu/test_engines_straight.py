"""Replays as programs of torch's interpreter: the same bits, the same memory, fewer calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.engines import straight
from leanstep.engines.randomness import CudaDraw
from leanstep.engines.ready import ReadyOp
from leanstep.engines.recording import RecordedOp, Ref
from leanstep.engines.settings import settings_now
from leanstep.ir import Value
from leanstep.rebuild.program import Rerun
from leanstep.torch_private.interpreter import GraphWriter, UnwritableError


class Attention(nn.Module):
    """What a transformer's layer does: views, draws, in-place ops, numbers, lists."""

    def __init__(self, rate: float = 0.0, width: int = 48) -> None:
        super().__init__()
        self.rate = rate
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = F.dropout((q @ k.T) * 0.25, self.rate)
        mixed = scores.softmax(-1) @ v
        wide = torch.cat([mixed, x.flip(0)], dim=-1)
        return x + self.down(F.dropout(F.gelu(self.up(wide).mul_(2)), self.rate))


@pytest.fixture
def pieces(monkeypatch):
    """What ran in place of single ops: the number of ops of each program, and ops by Python."""
    written, by_python = [], []
    write, run = straight._written, straight._ByPython.run

    def written_noted(stretch):
        written.append([str(one.op.func) for one in stretch])
        return write(stretch)

    def run_noted(piece, held):
        by_python.append(str(piece._op._func))
        run(piece, held)

    monkeypatch.setattr(straight, "_written", written_noted)
    monkeypatch.setattr(straight._ByPython, "run", run_noted)
    return written, by_python


def test_all_that_a_layer_drops_comes_back_by_one_program(lab, pieces) -> None:
    written, by_python = pieces
    case = lab.Case(lambda: lab.Stack([Attention(), Attention()]))

    assert case.differences(steps=9) == []
    assert len(written) == 2
    assert by_python == []
    assert {"aten.mul_.Tensor", "aten.cat.default", "aten.gelu.default"} <= set(written[0])


def test_schedules_that_come_once_are_not_written(lab, pieces) -> None:
    written, _ = pieces
    case = lab.Case(lambda: lab.Stack([Attention()]))
    model, _ = case.fitted()
    case.train(model, 7)
    number = len(written)
    loss = case.loss(model, case.batch)

    # Each pass through a graph that is kept goes on from where the one before has ended.
    for _ in range(4):
        loss.backward(retain_graph=True)

    assert len(written) == number > 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_dropped_has_the_same_bits_and_the_predicted_peak(lab, seed, dtype) -> None:
    def loss(model, batch):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return lab.mean_square(model, batch)

    case = lab.Case(lambda: lab.Stack([Attention(0.1), Attention(0.2)]), loss=loss)

    assert case.differences(pick=lab.some(seed), steps=7) == []
    predicted, measured = case.peaks(pick=lab.some(seed))
    assert measured <= predicted


def test_kept_values_are_not_taken_from_what_is_rebuilt_of_the_same_storage(lab) -> None:
    def body(block, x):
        a = F.dropout(block.a(x), 0.1)
        b = F.dropout(block.b(a), 0.1)
        return (a.sigmoid() * b).tanh()

    case = lab.Case(lambda: lab.stack_of(body))

    # A mask may be kept and drawn again nevertheless, to move the generator on.
    for seed in range(6):
        assert case.differences(pick=lab.some(seed), steps=7) == []


def seen(operator, reads, makes, *, given=(), frees=(), draw=None, drawn=None, brings=False):
    """An op on whole tensors of one look; storages go by numbers."""
    refs = [look(storage) for storage in reads]
    writes = tuple(Value(storage, 0) for storage in makes)
    rerun = Rerun(0, tuple(ref.value for ref in refs), writes)
    numbers = (0.1, True) if draw else ()
    births = tuple((storage, place) for place, storage in enumerate(makes))
    op = RecordedOp(rerun, operator, (*refs, *numbers), {}, births, draw, settings_now())
    return straight._Seen(
        op,
        ReadyOp(op),
        frozenset(Value(storage, 0) for storage in given),
        {storage: (place, look(storage)) for place, storage in enumerate(makes)},
        tuple(frees),
        drawn,
        brings,
    )


def look(storage: int) -> Ref:
    return Ref(Value(storage, 0), (2, 2), (2, 1), 0, torch.float32)


ADD, DROP = torch.ops.aten.add.Tensor, torch.ops.aten.native_dropout.default


def lengths(*ops) -> list[int]:
    return [len(stretch) for stretch in straight._stretches(ops)]


def test_programs_end_where_an_argument_goes() -> None:
    ops = [seen(ADD, [1, 2], [3], given=[1]), seen(ADD, [3, 2], [4], frees=[2, 3])]

    assert lengths(*ops, seen(ADD, [4, 4], [5]), seen(ADD, [5, 5], [6], frees=[5])) == [2, 2]


def test_programs_begin_where_something_must_be_brought_back() -> None:
    ops = [seen(ADD, [1, 1], [2], given=[1]), seen(ADD, [2, 3], [4], given=[3], brings=True)]

    assert lengths(*ops, seen(ADD, [4, 3], [5], given=[3])) == [1, 2]


def test_draws_are_in_one_program_where_each_begins_where_the_one_before_has_ended() -> None:
    def drop(storage: int, start: int, end: int):
        draw, drawn = CudaDraw(0, 0, start), CudaDraw(0, 0, end)
        makes = [storage + 1, storage + 2]
        return seen(DROP, [storage], makes, given=[1], draw=draw, drawn=drawn)

    assert lengths(drop(1, 0, 4), drop(2, 4, 8), seen(ADD, [4, 4], [9])) == [3]
    assert lengths(drop(1, 0, 4), drop(2, 8, 12), seen(ADD, [4, 4], [9])) == [1, 2]


def test_looks_of_another_type_are_left_to_python(lab, pieces) -> None:
    _, by_python = pieces

    def body(block, x):
        y = block.a(x).sigmoid()
        z = torch.view_as_complex(y.view(-1, y.shape[-1] // 2, 2))
        squared = z * z
        real = torch.view_as_real(squared * squared.conj()).reshape(x.shape)
        return real + block.b(y).tanh().exp()

    case = lab.Case(lambda: lab.stack_of(body))

    assert case.differences(steps=9) == []
    assert "aten.mul.Tensor" in by_python


def test_an_operator_that_types_do_not_tell_is_refused() -> None:
    writer = GraphWriter()

    with pytest.raises(UnwritableError, match=r"aten::pow.Tensor_Tensor would be taken for"):
        writer.call(torch.ops.aten.pow.Tensor_Tensor, [writer.input(), 2.0], {})


def test_lists_that_an_op_returns_are_taken_apart_by_python(lab) -> None:
    def body(block, x):
        (y,) = torch._foreach_exp([block.a(x).sin()])
        return (y.exp() * y.tanh()).sigmoid() * block.b(y)

    assert lab.Case(lambda: lab.stack_of(body)).differences(steps=7) == []


@pytest.mark.parametrize("name", ["Graph", "Value", "TupleType", "_create_function_from_graph"])
def test_a_torch_without_the_interpreter_leaves_the_ops_to_python(
    lab, pieces, monkeypatch, name
) -> None:
    _, by_python = pieces
    monkeypatch.delattr(torch._C, name)

    assert lab.Case(lambda: lab.Stack([Attention()])).differences(steps=7) == []
    assert by_python


def test_graphs_that_torch_refuses_are_left_to_python(lab, pieces, monkeypatch) -> None:
    def refuse(*_):
        raise RuntimeError("no such graph")

    _, by_python = pieces
    monkeypatch.setattr(torch._C, "_create_function_from_graph", refuse)

    assert lab.Case(lambda: lab.Stack([Attention()])).differences(steps=7) == []
    assert by_python


def test_programs_that_fail_are_left_to_python(lab, pieces, monkeypatch) -> None:
    def refuse(*_):
        raise RuntimeError("failed in the interpreter")

    _, by_python = pieces
    monkeypatch.setattr(torch._C, "_create_function_from_graph", lambda *_: refuse)

    assert lab.Case(lambda: lab.Stack([Attention()])).differences(steps=7) == []
    assert by_python


class Full(TorchDispatchMode):
    """No memory for what some op makes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.gelu.default:
            raise torch.OutOfMemoryError("Tried to allocate 1 GiB")
        return func(*args, **(kwargs or {}))


def test_errors_in_a_program_are_those_of_eager(lab) -> None:
    case = lab.Case(lambda: lab.Stack([Attention()]))
    model, _ = case.fitted()
    case.train(model, 7)
    loss = case.loss(model, case.batch)

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"), Full():
        loss.backward()


def test_optimizer_of_the_interpreter_is_as_it_was_afterwards() -> None:
    writer = GraphWriter()
    program = writer.finish(writer.call(torch.ops.aten.mul.Tensor, [writer.input(), 2.0], {}))

    for is_on in (True, False):
        with torch.jit.optimized_execution(is_on):
            program(torch.ones(2))
            assert torch._C._get_graph_executor_optimize() is is_on


def test_wide_arguments_of_all_kinds_are_written(lab) -> None:
    ops = torch.ops.aten
    x = torch.randn(2, 3, 4, 4)
    calls = [
        (ops._to_copy.default, [x], {"dtype": torch.float64}),
        (ops.clone.default, [x], {"memory_format": torch.channels_last}),
        (ops.sum.dim_IntList, [x, []], {}),
        (ops.sum.dim_IntList, [x, [1], True], {}),
        (ops.index.Tensor, [x, [None, torch.tensor([0, 2])]], {}),
        (ops.full_like.default, [x, float("inf")], {"device": torch.device("cpu")}),
        (ops.add.Tensor, [x, 1], {"alpha": 3}),
        (ops.upsample_nearest2d.vec, [x, None, [2, 2]], {}),
        (ops.native_layer_norm.default, [x, [4], None, None, 1e-5], {}),
        (ops.gelu.default, [x], {"approximate": "tanh"}),
    ]
    for operator, args, kwargs in calls:
        writer, tensors = GraphWriter(), []

        def node(argument, writer=writer, tensors=tensors):
            if isinstance(argument, torch.Tensor):
                tensors.append(argument)
                return writer.input()
            return [node(a) for a in argument] if isinstance(argument, list) else argument

        outputs = writer.call(operator, [node(argument) for argument in args], kwargs)
        got = writer.finish(outputs)(*tensors)

        expected = operator(*args, **kwargs)
        expected = expected if isinstance(expected, tuple) else (expected,)
        assert all(map(torch.equal, expected, got)), operator
        assert [e.stride() for e in expected] == [g.stride() for g in got]
