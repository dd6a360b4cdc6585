"""What it costs to compute each node of a joint graph again, in seconds.

Products, convolutions and attention are timed on the device. What Inductor fuses costs memory
traffic, not a kernel each: next to nothing where a fused kernel of backward reads the result, a
write and a read where a kernel of somebody else's wants it in memory. Reductions read their input
once more. Random numbers are arithmetic rather than traffic, and dearer than that on a GPU: those
that Inductor draws are timed as a program of its own. These are for finding sets worth
compiling: what a form costs is measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from leanstep.engines.inductor import PRECISE, CompiledForm, quietly, reason_of
from leanstep.engines.joint import JointGraph, arguments_of, base_of, is_draw, is_tensor, is_view
from leanstep.errors import MeasureError
from leanstep.profiler.measure import measure
from leanstep.profiler.roofline import kind_of
from leanstep.recorder.signatures import CallSpec, Signatures
from leanstep.torch_private.compiler import compiler_errors, extract_graph, is_operator
from leanstep.truth import stopwatch

_HEAVY = ("matmul", "convolution", "attention")

_DRAWS = 5

# Computed inside a kernel that runs anyway.
_FUSED_SHARE = 0.1

_FUSED_NAMES = ("prims.", "aten.full", "aten.clone", "aten.cat", "aten.where", "aten.iota")


def node_bytes(node: Any) -> int:
    """The bytes of the storage that keeping a node keeps."""
    value = base_of(node).meta.get("val") if is_view(node) else node.meta.get("val")
    value = value if isinstance(value, torch.Tensor) else node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def node_seconds(joint: JointGraph, device: torch.device) -> dict[Any, float]:
    """The seconds of each forward node."""
    nodes = [node for node in joint.forward if node.op == "call_function"]
    timed = [node for node in nodes if not is_view(node) and is_own_kernel(node)]
    seconds = dict(zip(timed, _timed_seconds(timed, device), strict=True))
    seconds |= _drawing_seconds(joint, device)
    traffic = seconds_per_byte(max(map(node_bytes, nodes), default=0), device)
    heavy = {node for node in joint.nodes if node.op == "call_function" and is_own_kernel(node)}
    for node in nodes:
        if node not in seconds:
            seconds[node] = 0.0 if is_view(node) else traffic * _moved_bytes(node, heavy)
    return seconds


def with_writing(
    joint: JointGraph, seconds: Mapping[Any, float], names: Sequence[str], device: torch.device
) -> dict[Any, float]:
    """The seconds of each node, where some are written to memory and read from there again."""
    bases = {base_of(joint.by_name[name]) for name in names}
    traffic = seconds_per_byte(max(map(node_bytes, bases), default=0), device)
    written = {node: max(seconds.get(node, 0.0), 2 * traffic * node_bytes(node)) for node in bases}
    return {**seconds, **written}


def is_own_kernel(node: Any) -> bool:
    """Whether a node is a kernel of its own, which Inductor does not fuse."""
    if not is_operator(node.target):
        return False
    if kind_of(str(node.target)) in _HEAVY:
        return True
    is_fused = torch.Tag.pointwise in node.target.tags or is_reduction(node)
    return not (is_fused or is_view(node) or str(node.target).startswith(_FUSED_NAMES))


def is_reduction(node: Any) -> bool:
    """Whether a node sums up, or does something of that kind."""
    name = str(node.target)
    return kind_of(name) in ("normalization", "batch_norm") or name.startswith("aten.any")


def _moved_bytes(node: Any, heavy: set[Any]) -> float:
    if is_reduction(node):
        return float(sum(node_bytes(source) for source in node.all_input_nodes))
    if not is_tensor(node):
        return 0.0
    nbytes = node_bytes(node)
    return nbytes * (2.0 if _is_read_by(node, heavy) else _FUSED_SHARE)


def _is_read_by(node: Any, heavy: set[Any]) -> bool:
    """Whether a node, or a view of it, is read by a kernel that is not fused."""
    return any(
        user in heavy or (user.op == "call_function" and is_view(user) and _is_read_by(user, heavy))
        for user in node.users
    )


def _timed_seconds(nodes: Sequence[Any], device: torch.device) -> list[float]:
    signatures = Signatures()
    numbers = [signatures.add(node.target, *arguments_of(node)) for node in nodes]
    costs, _ = measure(signatures.specs, [True] * len(signatures.specs), device)
    return [costs[number].seconds for number in numbers]


def _drawing_seconds(joint: JointGraph, device: torch.device) -> dict[Any, float]:
    """The seconds of Inductor's own draws, equal ones timed once."""
    known: dict[Any, float] = {}
    found: dict[Any, float] = {}
    for node in joint.forward:
        if is_draw(node):
            value = node.meta["val"]
            key = tuple(value.shape), value.dtype
            if key not in known:
                known[key] = _seconds_to_draw(joint, node, device)
            found[node] = known[key]
    return found


def _seconds_to_draw(joint: JointGraph, node: Any, device: torch.device) -> float:
    made = joint.made_of(joint.seeds, [node])
    sources = [joint.by_name[name] for name in joint.seeds]
    graph = extract_graph(joint.joint, sources, made, [node])
    try:
        with quietly():
            draw = CompiledForm.compile_alone(graph, PRECISE)
    except compiler_errors() as error:
        # Such as no compiler of C++: then the block itself could not be compiled either.
        raise MeasureError(f"compiling its random numbers raised {reason_of(error)}") from None
    values = [source.meta["val"] for source in sources]
    seeds = [torch.zeros(value.shape, dtype=value.dtype, device=device) for value in values]
    draw(list(seeds))
    watch = stopwatch(device)
    for _ in range(_DRAWS + 1):
        watch.lap()
        draw(list(seeds))
    return min(watch.seconds())


def seconds_per_byte(nbytes: int, device: torch.device) -> float:
    """The device's traffic, by an elementwise op on so many bytes."""
    count = max(1, nbytes // 4)
    tensor = torch.empty(count, dtype=torch.float32, device="meta")
    signatures = Signatures()
    signatures.add(torch.ops.aten.neg.default, [tensor], {})
    (spec,) = signatures.specs
    (argument,) = spec.args
    moved = CallSpec(spec.func, (_on(argument, device),), spec.kwargs)
    (cost,), _ = measure([moved], [True], device)
    return cost.seconds / (2 * 4 * count)


def _on(argument: Any, device: torch.device) -> Any:
    return type(argument)(argument.size, argument.stride, argument.dtype, device.type)
