"""The joint graph of a block's forward and backward, as AOTAutograd makes it.

A node is *forward* if no gradient is needed to compute it; backward may get it from forward (kept)
or compute it again. Some must not be computed again: what draws from a generator, what reads an
input that forward writes, and what nobody knows. Inductor's own draws come from seeds, and are the
same again as long as the seeds are kept.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem
from typing import Any

import torch

from leanstep.ir import Fact
from leanstep.recorder.facts import call_facts, op_info
from leanstep.torch_private.compiler import (
    extract_graph,
    hand_over_unread,
    is_held_apart,
    is_operator,
    is_primal,
    operator_returns,
    split_joint_graph,
)

# They draw nothing: their seed is an argument.
DRAWN = ("prims.inductor_random", "prims.inductor_randint")
SEEDED = (*DRAWN, "prims.inductor_lookup_seed")
DRAWS_SEEDS = "prims.inductor_seed"


class LostNodeError(Exception):
    """The captured graph is not the one that the form was made for."""


@dataclass(frozen=True, eq=False)
class Apart:
    """Forward and backward, and a third graph that makes some of what one hands to the other.

    `dropped` are the nodes that it returns, `sources` those that it reads. Both are among what
    forward hands over.
    """

    forward: Any
    backward: Any
    dropped: tuple[Any, ...]
    sources: tuple[Any, ...]
    rebuild: torch.fx.GraphModule

    def arguments(self, nodes: Sequence[Any]) -> tuple[int, ...]:
        """The places of some nodes among the arguments of backward."""
        inputs = (node for node in self.backward.graph.nodes if node.op == "placeholder")
        places = {node.name: place for place, node in enumerate(inputs)}
        return tuple(places[node.name] for node in nodes)


class JointGraph:
    """A joint graph without twins, and what a partition needs to know of it."""

    def __init__(self, joint: torch.fx.GraphModule, num_outputs: int, static: list[int]) -> None:
        self.joint, self.num_outputs, self.static = joint, num_outputs, static
        self.nodes = list(joint.graph.nodes)
        self.by_name = {node.name: node for node in self.nodes}

    @cached_property
    def backward(self) -> set[Any]:
        """The nodes that need an incoming gradient."""
        found: set[Any] = set()
        for node in self.nodes:
            is_gradient = node.op == "placeholder" and not is_primal(node)
            if is_gradient or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def forward(self) -> list[Any]:
        """The nodes that do not, inputs included, in order."""
        return [n for n in self.nodes if n not in self.backward and n.op != "output"]

    @cached_property
    def needed(self) -> list[Any]:
        """The forward nodes that backward reads."""
        outputs: Any = self.joint.graph.output_node().args[0]
        readers = [node for node in self.backward if node.op != "output"]
        found = {source for node in readers for source in node.all_input_nodes}
        found.update(
            node for node in outputs[self.num_outputs :] if isinstance(node, torch.fx.Node)
        )
        return [node for node in self.forward if node in found]

    @cached_property
    def fixed(self) -> set[Any]:
        """The forward nodes that must not be computed again."""
        written = self._written_inputs
        found = set()
        for node in self.forward:
            if node.op == "placeholder":
                continue
            source = node.all_input_nodes[0] if node.target is getitem else node
            is_unrepeatable = source.op != "placeholder" and _is_unrepeatable(source)
            if is_unrepeatable or not written.isdisjoint(source.all_input_nodes):
                found.add(node)
        return found

    @cached_property
    def _written_inputs(self) -> set[Any]:
        """The inputs that forward writes at its end, and views of them."""
        copies = [n for n in self.nodes if str(n.target).startswith("aten.copy_.")]
        found = {node.args[0] for node in copies}
        for node in self.forward:
            if is_view(node) and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found

    def closed(self, kept: Collection[str]) -> tuple[tuple[str, ...], list[Any]]:
        """What a set of kept names comes to, and the nodes that backward then computes again.

        What must not be computed again is kept too, what backward does not reach is not.
        """
        names, reached = set(kept), set[Any]()
        held: dict[Any, None] = {}
        waiting = list(self.needed)
        while waiting:
            node = waiting.pop()
            if node in reached or node.op == "placeholder":
                continue
            reached.add(node)
            if (node.name in names or node in self.fixed) and is_tensor(node):
                held[node] = None
            elif node in self.fixed:
                raise LostNodeError(f"{node.name} cannot be kept and must not be computed again")
            else:
                waiting.extend(node.all_input_nodes)
        ordered = [node for node in self.forward if node in reached]
        return (
            tuple(node.name for node in ordered if node in held),
            [node for node in ordered if node not in held],
        )

    def apart(self, whole: Collection[str], kept: Collection[str]) -> Apart:
        """Forward and backward that hand over one set, and what makes that of a smaller one.

        Of the set may be what only this third graph reads: seeds.
        """
        forward, backward = self.split(whole)
        read, _ = self.closed(whole)
        if read and (unread := [name for name in whole if name not in read]):
            hand_over_unread(forward, backward, unread, self.num_outputs)
        handed: Any = forward.graph.output_node().args[0][self.num_outputs :]
        names = [node.name for node in handed if is_tensor(node) and not is_held_apart(node)]
        dropped = [name for name in names if name not in kept and self._is_made(name)]
        there = set(names) - set(dropped)
        wanted = [self.by_name[name] for name in dropped]
        made = self.made_of(there, wanted)
        taken = {source for node in made for source in node.all_input_nodes}
        sources = [n for n in self.nodes if n in taken and (n.name in there or is_primal(n))]
        if inputs := [node.name for node in sources if node.name not in there]:
            if held := [node.name for node in sources if is_held_apart(node)]:
                raise LostNodeError(f"nobody would see a write to {held[0]}, which it starts from")
            hand_over_unread(forward, backward, inputs, self.num_outputs)
        rebuild = extract_graph(self.joint, sources, made, wanted)
        return Apart(forward, backward, tuple(wanted), tuple(sources), rebuild)

    def _is_made(self, name: str) -> bool:
        """Whether a node is more than a look at an input, and is anything at all."""
        node = self.by_name[name]
        return bool(base_of(node).op != "placeholder" and node.meta["val"].numel())

    @cached_property
    def seeds(self) -> tuple[str, ...]:
        """The nodes that Inductor's own draws start from."""
        return tuple(n.name for n in self.forward if str(n.target).startswith(DRAWS_SEEDS))

    def made_of(self, there: Collection[str], wanted: Sequence[Any]) -> list[Any]:
        """The nodes to compute for those wanted, from inputs and from nodes that are there."""
        made = set[Any]()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node in made or node.name in there:
                continue
            if node in self.fixed or node in self._written_inputs:
                raise LostNodeError(f"{node.name} must not be computed again, and is not kept")
            if node.op != "placeholder":
                made.add(node)
                waiting.extend(node.all_input_nodes)
        return [node for node in self.nodes if node in made]

    def split(self, kept: Collection[str]) -> tuple[Any, Any]:
        """The graphs of forward and backward that hand over what is named."""
        if lost := sorted(set(kept) - self.by_name.keys()):
            raise LostNodeError(
                f"the plan keeps {lost[0]}, which this call does not compute: its arguments or "
                "modes are others than those planned for"
            )
        names, _ = self.closed(kept)
        nodes = [self.by_name[name] for name in names]
        return split_joint_graph(self.joint, nodes, self.num_outputs, self.static)


def is_tensor(node: Any) -> bool:
    """Whether a node is one tensor: only such can be kept."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_view(node: Any) -> bool:
    """Whether a node's storage is that of its first input."""
    if node.target is getitem:
        return is_view(node.all_input_nodes[0])
    if not is_operator(node.target):
        return False
    returns = operator_returns(node.target)
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def is_draw(node: Any) -> bool:
    """Whether a node is random numbers that Inductor draws from a seed."""
    return str(node.target).startswith(DRAWN)


def _is_unrepeatable(node: Any) -> bool:
    name = str(node.target)
    if name.startswith(SEEDED):
        return False
    if not is_operator(node.target):
        # Somebody's kernel, or a graph in the graph.
        return node.target is not getitem
    values = [_values(argument) for argument in node.args]
    named = {key: _values(argument) for key, argument in node.kwargs.items()}
    info = op_info(node.target)
    facts = call_facts(info, values, named)
    writes = bool(info.written)
    return name.startswith(DRAWS_SEEDS) or Fact.RANDOM in facts or bool(info.facts) or writes


def _values(argument: Any) -> Any:
    """An argument with the tensors that its nodes stand for."""
    if isinstance(argument, torch.fx.Node):
        return argument.meta.get("val")
    if isinstance(argument, (list, tuple)):
        return [_values(item) for item in argument]
    return argument


def arguments_of(node: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node with tensors in place of nodes."""
    named = {key: _values(argument) for key, argument in node.kwargs.items()}
    return [_values(argument) for argument in node.args], named


def base_of(node: Any) -> Any:
    """The node whose storage a view shows, or the node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node
