"""Tell distinct op calls apart: the same operator on the same shapes is timed only once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.ir import Graph


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """All that the cost of an op can depend on in a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        dims = "x".join(map(str, self.size)) or "scalar"
        dtype = str(self.dtype).removeprefix("torch.")
        strides = "" if not self.size else "/" + ",".join(map(str, self.stride))
        return f"{dtype}[{dims}{strides}]"


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One distinct op call, with stand-ins for its tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        parts = [_text(arg) for arg in self.args]
        parts += [f"{name}={_text(arg)}" for name, arg in self.kwargs]
        return f"{self.func}({', '.join(parts)})"


class Signatures:
    """Number the distinct op calls of a recording."""

    def __init__(self) -> None:
        self.specs: list[CallSpec] = []
        self._numbers: dict[CallSpec, int] = {}

    def add(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """The number of this call's signature, new or known."""
        spec = CallSpec(
            func,
            tuple(_spec(arg) for arg in args),
            tuple((name, _spec(arg)) for name, arg in kwargs.items()),
        )
        number = self._numbers.setdefault(spec, len(self.specs))
        if number == len(self.specs):
            self.specs.append(spec)
        return number

    def that_write(self, graph: Graph) -> list[bool]:
        """For each signature, whether its calls in a graph write anything: views do not."""
        found = [False] * len(self.specs)
        for op in graph.ops:
            found[op.cost] |= bool(op.writes)
        return found


def _spec(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        strided = argument.layout is torch.strided
        stride = argument.stride() if strided else ()
        return TensorSpec(tuple(argument.shape), stride, argument.dtype, argument.device.type)
    if isinstance(argument, (list, tuple)):
        return tuple(_spec(item) for item in argument)
    if isinstance(argument, torch.Generator):
        return None
    return argument


def _text(spec: Any) -> str:
    if isinstance(spec, tuple):
        return f"({', '.join(_text(item) for item in spec)})"
    return str(spec)
