"""Torch's interpreter of graphs: many ops in one call, without Python between them.

The private names are those of `torch.jit`. The interpreter's optimizer stays off: ops run as they
are written, one after the other, and a tensor goes after its last reader.

Nothing depends on it: where torch lacks one of these names, or refuses a graph, that is an
`UnwritableError`, and Python calls the ops.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch

# A value of a graph that is being written.
Node: TypeAlias = "torch._C.Value"

Program = Callable[..., tuple[torch.Tensor, ...]]

# With a number in a tensor's place these go by another name; both make a tensor of the number.
_WITH_NUMBERS = {
    f"aten::{name}{end}.Tensor": f"aten::{name}{end}.Scalar"
    for name in ("add", "sub", "mul", "div")
    for end in ("", "_")
}

# By the numbers that they have in C++.
_MEMORY_FORMATS = (
    torch.contiguous_format,
    torch.preserve_format,
    torch.channels_last,
    torch.channels_last_3d,
)


class UnwritableError(Exception):
    """A call that cannot be part of a graph."""


@contextmanager
def _as_torch_allows() -> Iterator[None]:
    """Say in one way that torch cannot do something, or can no more."""
    try:
        yield
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UnwritableError(f"torch's interpreter: {error}") from error


def is_writable_operator(operator: Any) -> bool:
    """Whether the interpreter knows an operator, and calling it leaves its arguments' looks.

    One that returns a list has one output there, which is no tensor.
    """
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten":
        return False
    returns_lists = any("List" in str(formal.type) for formal in operator._schema.returns)
    return torch.Tag.inplace_view not in operator.tags and not returns_lists


class GraphWriter:
    """Write calls of operators into a graph, one after the other.

    Raises:
        UnwritableError: from each method, where torch does not go along.
    """

    @_as_torch_allows()
    def __init__(self) -> None:
        # Its stubs lack half of what it has.
        self._graph: Any = torch._C.Graph()

    @_as_torch_allows()
    def input(self) -> Node:
        """A tensor that is given to the graph."""
        return cast(Node, self._graph.addInput())

    @_as_torch_allows()
    def call(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Node]:
        """Call an operator on values of the graph and on constants."""
        schema = operator._schema
        names = (formal.name for formal in schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs = [
            self._argument(str(formal.type), given.get(formal.name, formal.default_value), formal)
            for formal in schema.arguments
        ]
        node = self._graph.create(schema.name, inputs, len(schema.returns))
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        # The graph finds the overload by the types of the arguments.
        found = node.schema().partition("(")[0]
        if found not in (name, _WITH_NUMBERS.get(name)):
            raise UnwritableError(f"{name} would be taken for {found}")
        self._graph.appendNode(node)
        outputs: list[Node] = list(node.outputs())
        for output, formal in zip(outputs, schema.returns, strict=True):
            output.setType(formal.type)
        return outputs

    def view(self, base: Node, size: Sequence[int], stride: Sequence[int], offset: int) -> Node:
        """Another look at a tensor's storage."""
        return self.call(torch.ops.aten.as_strided.default, (base, size, stride, offset), {})[0]

    @_as_torch_allows()
    def finish(self, outputs: Sequence[Node]) -> Program:
        """The graph as a function of its inputs, which returns all these values."""
        node = self._graph.create("prim::TupleConstruct", list(outputs), 1)
        self._graph.appendNode(node)
        node.output().setType(torch._C.TupleType([output.type() for output in outputs]))
        self._graph.registerOutput(node.output())
        self._graph.lint()
        return _as_written(torch._C._create_function_from_graph("leanstep_replay", self._graph))

    def _argument(self, kind: str, value: Any, formal: Any) -> Node:
        if isinstance(value, torch._C.Value):
            return value
        if not isinstance(value, (list, tuple)):
            return self._constant(kind, value)
        if "Tensor" in kind:
            return self._list([self._argument(kind, item, formal) for item in value], formal.type)
        numbers = [float(item) for item in value] if "float" in kind else list(value)
        if numbers:
            return cast(Node, self._graph.insertConstant(numbers))
        lists = torch._C.ListType
        return self._list([], lists.ofFloats() if "float" in kind else lists.ofInts())

    def _list(self, items: list[Node], kind: Any) -> Node:
        node = self._graph.create("prim::ListConstruct", items, 1)
        self._graph.appendNode(node)
        node.output().setType(kind)
        return cast(Node, node.output())

    def _constant(self, kind: str, value: Any) -> Node:
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS.index(value)
        elif type(value) is int and "float" in kind:
            value = float(value)
        plain = (int, float, str, torch.dtype, torch.layout, torch.device)
        if value is not None and not isinstance(value, plain):
            raise UnwritableError(f"{value!r} is no constant of a graph")
        return cast(Node, self._graph.insertConstant(value))


def _as_written(function: Program) -> Program:
    """The function, run without the optimizer: it would fuse ops, and so round otherwise."""
    is_optimizing, optimize = (
        torch._C._get_graph_executor_optimize,
        torch._C._set_graph_executor_optimize,
    )

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = is_optimizing()
        optimize(False)
        try:
            return function(*inputs)
        finally:
            optimize(before)

    return run
