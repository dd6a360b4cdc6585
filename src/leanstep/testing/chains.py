"""Chains of blocks of layers: the simplest steps that a planner meets.

Each layer reads the output of the one before and makes its own; where it says so, autograd saves
its input. Backward walks the layers in the opposite order, each making the gradient of its input.
So a block can drop what its layers saved of each other's outputs; its
own input belongs to the block before.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from leanstep.ir import (
    Block,
    Category,
    Cost,
    Fact,
    Graph,
    Identity,
    ModuleCall,
    Op,
    Phase,
    Profile,
    Save,
    Storage,
    Unpack,
    Value,
)
from leanstep.simulator import simulate

KIB = 1024


@dataclass(frozen=True, slots=True)
class Layer:
    """One forward op: the bytes of its output, its seconds, and what autograd does with its input.

    `workspace_bytes` is what it needs on top while it runs.
    """

    nbytes: int
    seconds: float = 1e-3
    saves_input: bool = True
    workspace_bytes: int = 0
    facts: tuple[Fact, ...] = ()


def chain_profile(
    blocks: Sequence[Sequence[Layer]],
    *,
    input_bytes: int = 64,
    parameter_bytes: int = 1000,
    head_bytes: int = 64,
    is_sequential: bool = False,
) -> Profile:
    """Make the profile of one step over a chain of blocks, with a head that is in no block.

    With `is_sequential` the blocks are the children of one Sequential: they can run as one.
    """
    layers = [layer for block in blocks for layer in block]
    step = _Step(layers=[*layers, Layer(head_bytes)])
    step.build(input_bytes, parameter_bytes)
    calls, found = list[ModuleCall](), []
    if is_sequential:
        calls.append(ModuleCall("layers", "Sequential", 0, -1, 0, len(layers)))
    parent, start = len(calls) - 1, 0
    for index, block in enumerate(blocks):
        stop = start + len(block)
        saves = tuple(n for n, save in enumerate(step.saves) if start <= save.position < stop)
        for number in saves:
            step.saves[number] = replace(step.saves[number], call=len(calls))
        calls.append(ModuleCall(f"layers.{index}", "Block", 0, parent, start, stop))
        found.append(Block(f"layers.{index}", "Block", 0, start, stop, saves))
        start = stop
    graph = Graph(
        ops=tuple(_with_call(op, n, calls) for n, op in enumerate(step.ops)),
        storages=tuple(step.storages),
        saves=tuple(step.saves),
        unpacks=tuple(step.unpacks),
        calls=tuple(calls),
    )
    return profile_of(graph, tuple(found), tuple(step.costs))


def random_profile(seed: int, *, num_blocks: int = 3, most_layers: int = 4) -> Profile:
    """Make a chain with random sizes and times, from a seed."""
    draw = random.Random(seed)

    def layer() -> Layer:
        return Layer(
            nbytes=draw.randint(1, 100) * KIB,
            seconds=draw.choice([1e-6, 1e-3 * draw.randint(1, 20)]),
            saves_input=draw.random() < 0.8,
            workspace_bytes=draw.choice([0, 0, draw.randint(1, 40) * KIB]),
            facts=(Fact.HOST_READ,) if draw.random() < 0.05 else (),
        )

    blocks = [[layer() for _ in range(draw.randint(1, most_layers))] for _ in range(num_blocks)]
    input_bytes, head_bytes = draw.randint(1, 40) * KIB, draw.randint(1, 80) * KIB
    return chain_profile(blocks, input_bytes=input_bytes, head_bytes=head_bytes)


@dataclass
class _Step:
    """The parts of the graph while they are put together."""

    layers: list[Layer]
    ops: list[Op] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    unpacks: list[Unpack] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def build(self, input_bytes: int, parameter_bytes: int) -> None:
        """Lay out parameters, input, forward and backward."""
        last = 2 * len(self.layers) - 1
        self.storages.append(Storage(parameter_bytes, Category.PARAMETER, -1, last, last))
        self.storages.append(Storage(input_bytes, Category.INPUT, -1, last, last))
        for index, layer in enumerate(self.layers):
            self._forward(index, layer)
        for index in range(len(self.layers) - 1, -1, -1):
            self._backward(index)

    def _forward(self, index: int, layer: Layer) -> None:
        # Output `index` is storage `index + 2`: parameters and input come first.
        reads, output = Value(index + 1, 0), Value(index + 2, 0)
        backward = 2 * len(self.layers) - 1 - index
        next_saves = index + 1 < len(self.layers) and self.layers[index + 1].saves_input
        # The last output, the loss, is what backward begins with.
        natural = index + 1
        death = backward - 1 if next_saves else natural
        self.storages.append(Storage(layer.nbytes, Category.ACTIVATION, index, death, natural))
        if layer.saves_input:
            # Backward asks for the last one first.
            self.unpacks.insert(0, Unpack(len(self.saves), backward))
            self.saves.append(Save(reads, -1, index, backward + 1))
        rise = layer.nbytes + layer.workspace_bytes
        self._op(f"layer_{index}", Phase.FORWARD, (Value(0, 0), reads), output, rise, layer)

    def _backward(self, index: int) -> None:
        position = len(self.ops)
        nbytes = self.storages[index + 1].nbytes
        gradient = Value(len(self.storages), 0)
        death = min(position + 1, 2 * len(self.layers) - 1)
        self.storages.append(Storage(nbytes, Category.TEMPORARY, position, death, death))
        reads = (Value(gradient.storage - 1, 0),)
        layer = self.layers[index]
        rise = nbytes + layer.workspace_bytes
        self._op(f"layer_{index}_backward", Phase.BACKWARD, reads, gradient, rise, layer)

    def _op(
        self,
        name: str,
        phase: Phase,
        reads: tuple[Value, ...],
        writes: Value,
        rise_bytes: int,
        layer: Layer,
    ) -> None:
        cost = Cost(f"{layer.nbytes} bytes in {layer.seconds} s", layer.seconds)
        if cost not in self.costs:
            self.costs.append(cost)
        place = self.costs.index(cost)
        source = f"model.py:{len(self.ops)}"
        self.ops.append(
            Op(name, phase, -1, source, reads, (writes,), rise_bytes, place, layer.facts)
        )


def _with_call(op: Op, index: int, calls: Sequence[ModuleCall]) -> Op:
    """The op inside the block it ran in; its name then no longer tells equal blocks apart."""
    for number, call in enumerate(calls):
        if call.start <= index < call.stop and call.class_name == "Block":
            return replace(op, call=number, name="layer")
    return op


def profile_of(
    graph: Graph, blocks: tuple[Block, ...], costs: tuple[Cost, ...], model: str = "chain"
) -> Profile:
    """The profile of a graph put together by hand, with the peak that the simulator finds."""
    seconds = sum(costs[op.cost].seconds for op in graph.ops)
    profile = Profile(
        graph=graph,
        blocks=blocks,
        costs=costs,
        step_seconds=seconds,
        other_bytes=0,
        peak_bytes=0,
        device="cpu",
        torch_version="",
        model=Identity(model),
    )
    return replace(profile, peak_bytes=simulate(profile).peak_bytes)
