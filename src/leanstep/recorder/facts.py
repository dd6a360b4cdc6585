"""What torch's operator schemas say about an op, and what they leave out."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.ir import Fact
from leanstep.recorder.values import has_storage
from leanstep.torch_private.modes import generator_bytes, operator_arguments
from leanstep.torch_private.tensors import storage_address

# These ops write running statistics, or a state, although their schema does not say so.
HIDDEN_WRITES = {
    "aten.native_batch_norm.default": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm.default": ("running_mean", "running_var"),
    "aten.miopen_batch_norm.default": ("running_mean", "running_var"),
    # What SyncBatchNorm is made of.
    "aten.batch_norm_gather_stats.default": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats_with_counts.default": ("running_mean", "running_var"),
    "aten.batch_norm_update_stats.default": ("running_mean", "running_var"),
    # The state of cuDNN's own draws, for the dropout between layers.
    "aten._cudnn_rnn.default": ("dropout_state",),
}

# Their values reach Python, so the code that follows may depend on data.
HOST_READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.item")

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What holds for every call of one operator."""

    name: str
    argument_names: tuple[str, ...]
    written: frozenset[str]
    facts: tuple[Fact, ...]
    may_draw: bool


@functools.cache
def op_info(func: Any) -> OpInfo:
    """Read an operator's schema and tags once."""
    name, arguments = str(func), operator_arguments(func)
    written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    written.update(HIDDEN_WRITES.get(name, ()))
    if func.namespace == "c10d" and name.partition(".")[2].partition(".")[0].endswith("_"):
        # `allreduce_` and its like: the first is what comes out, and their schema does not say so.
        written.add(arguments[0].name)
    facts = []
    if name.startswith(HOST_READS) or torch.Tag.data_dependent_output in func.tags:
        facts.append(Fact.HOST_READ)
    if torch.Tag.dynamic_output_shape in func.tags:
        facts.append(Fact.DYNAMIC_SHAPE)
    if func.namespace in COLLECTIVE_NAMESPACES:
        facts.append(Fact.COLLECTIVE)
    return OpInfo(
        name=name,
        argument_names=tuple(a.name for a in arguments),
        written=frozenset(written),
        facts=tuple(facts),
        may_draw=torch.Tag.nondeterministic_seeded in func.tags,
    )


def named_arguments(
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Pair each argument of a call with its name in the schema."""
    yield from zip(info.argument_names, args, strict=False)
    yield from kwargs.items()


def written_names(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[str]:
    """The arguments this call writes; in evaluation statistics and states are left alone."""
    if info.name not in HIDDEN_WRITES:
        return info.written
    named = dict(named_arguments(info, args, kwargs))
    return info.written if named.get("training", named.get("train", True)) else frozenset()


def statistics_of(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    """The addresses of running statistics: batch norm writes them without a new version."""
    if "running_mean" in info.argument_names:
        for name, argument in named_arguments(info, args, kwargs):
            if name in ("running_mean", "running_var"):
                yield from map(storage_address, filter(has_storage, tensors_in(argument)))


def tensor_arguments(
    info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """The plain tensors of a call in order, each with whether the call writes it."""
    written = written_names(info, args, kwargs)
    for name, argument in named_arguments(info, args, kwargs):
        for tensor in tensors_in(argument):
            if has_storage(tensor):
                yield tensor, name in written


def call_facts(info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Fact, ...]:
    """What holds for this call: an attention op with dropout 0 draws nothing, for example."""
    facts = info.facts
    if info.name == "aten.index.Tensor" and not any(map(_is_mask, tensors_in(args[1]))):
        # Its tag is for masks: integer indices say how many elements come out.
        facts = tuple(fact for fact in facts if fact is not Fact.DYNAMIC_SHAPE)
    if any(tensor.layout is not torch.strided for tensor in tensors_in([*args, *kwargs.values()])):
        # Sparse and opaque tensors have no storage that could be looked up again.
        facts = (*facts, Fact.NOT_REPLAYABLE)
    if not info.may_draw:
        return facts
    named = dict(named_arguments(info, args, kwargs))
    if named.get("generator") is not None:
        return (*facts, Fact.RANDOM, Fact.OWN_GENERATOR)
    switched_off = named.get("train") is False or named.get("training") is False
    # `bernoulli_(p=0.0)` moves the generator all the same: only attention looks at its rate first.
    draws = named.get("dropout_p", 1.0) != 0.0 and not switched_off
    return (*facts, Fact.RANDOM) if draws else facts


def _is_mask(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


class DrawOrder:
    """Notice that something else than a recorded op moved the CPU generator between two draws.

    `manual_seed`, `fork_rng` and `set_rng_state` are no ops. What is drawn after them cannot be
    drawn again from the state at the start of a call.
    """

    def __init__(self, state: torch.Tensor | None = None) -> None:
        self._expected = generator_bytes(state)

    def jumped(self) -> bool:
        """Whether the generator is not where the last draw left it; ask before each draw."""
        return self._expected != generator_bytes()

    def drew(self) -> None:
        """Note where a draw has left the generator."""
        self._expected = generator_bytes()


def tensors_in(argument: Any) -> Iterator[torch.Tensor]:
    """The tensors of one argument: itself, or those of a list."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from tensors_in(item)
