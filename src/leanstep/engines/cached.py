"""Run a block call by a recording of an earlier one: nothing is added to forward but the hooks.

A template is what one recorded call looks like. It is used once two recorded calls in a row have
been equal op by op; later calls are audited more and more rarely. The sequence of saves is checked
as it happens; a call that turns out to be another one runs again, recorded.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from leanstep.eager import seldom_compiled
from leanstep.engines.context import Context, ReplayError
from leanstep.engines.live import LiveCall, storage_copy
from leanstep.engines.randomness import CudaDraw, cuda_state
from leanstep.engines.ready import unpack
from leanstep.engines.recording import GENERATOR, RecordedOp, Ref, look_at, without_history
from leanstep.engines.straight import StraightOps
from leanstep.ir import Value
from leanstep.rebuild.program import Program
from leanstep.recorder.values import has_storage
from leanstep.torch_private.tensors import storage_address, tree_leaves


@dataclass(frozen=True, slots=True)
class Argument:
    """A source that is the call's tensor argument number `place`."""

    place: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """A source that is a parameter, a buffer or another tensor of a module of the block.

    Layout is part of it: another view of the same storage holds other numbers.
    """

    module: int
    group: str
    name: str
    layout: "Layout"

    def find(self, modules: list[nn.Module]) -> torch.Tensor | None:
        """The tensor, where it is as it was recorded."""
        own = modules[self.module].__dict__
        found = (own if self.group == "__dict__" else own[self.group]).get(self.name)
        size, stride, offset, dtype = self.layout
        # Written out: this is asked twice a call for every parameter that replays start from.
        is_same = (
            isinstance(found, torch.Tensor)
            and found.dtype is dtype
            and found.layout is torch.strided
            and found.shape == size
            and found.stride() == stride
            and found.storage_offset() == offset
        )
        return found if is_same else None


@dataclass(frozen=True, slots=True)
class Saved:
    """A source that autograd keeps: save number `place` of the call."""

    place: int


Locator = Argument | Attribute | Saved


@dataclass(frozen=True)
class Template:
    """One recorded call, without its tensors."""

    names: tuple[str, ...]
    saves: tuple[tuple[Ref, bool], ...]
    program: Program | None
    ops: Mapping[int, RecordedOp]
    locators: Mapping[Value, Locator]
    draws_on_cpu: bool
    cuda_device: int | None

    shared: tuple[tuple[Attribute, ...], ...]
    borders: tuple[tuple[int, Ref], ...] = ()
    parks: Mapping[int, str] = field(default_factory=dict)
    statistics: frozenset[Value] = frozenset()

    @cached_property
    def ready(self) -> StraightOps:
        """The ops, prepared to run again."""
        return StraightOps(self.ops)

    @cached_property
    def wanted(self) -> frozenset[int]:
        """The saves that replays start from."""
        locators = self.locators.values()
        return frozenset(locator.place for locator in locators if isinstance(locator, Saved))

    def fits(self, modules: list[nn.Module]) -> bool:
        """Whether the modules' tensors that a replay starts from look as they did."""
        for attributes in self.shared:
            first = attributes[0].find(modules)
            if first is None:
                return False
            for other in attributes[1:]:
                found = other.find(modules)
                if found is None or storage_address(found) != storage_address(first):
                    return False
        return True

    def same_as(self, other: "Template") -> bool:
        """Whether two recordings are equal, op by op and save by save."""
        return (
            self.names == other.names
            and self.saves == other.saves
            and self.borders == other.borders
            and self.ops == other.ops
            and self.locators == other.locators
        )


def make_template(
    call: LiveCall, arguments: list[torch.Tensor], modules: list[nn.Module], start: CudaDraw | None
) -> Template | None:
    """Turn a recorded call into a template, if a later call can find all its sources."""
    recorder = call.recorder
    if recorder.depends_on_data or call.takes_copies or call.is_asked_early:
        return None
    if call.writes_border or call.writes_parked:
        return None
    if not recorder.device_draws.follow(start):
        # There is no place to count the draws of later calls from.
        return None
    program = call.program
    outside = [] if program is None else [v for v in program.all_sources if v.storage != GENERATOR]
    locators: dict[Value, Locator] = {}
    shared: list[tuple[Attribute, ...]] = []
    saved = {ref.value: place for place, (ref, dropped) in enumerate(call.saves) if not dropped}
    for value in outside:
        found = _locate(call.source(value), arguments, modules)
        if found is None and value in saved:
            found = Saved(saved[value])
        if found is None:
            return None
        locators[value] = found
        if isinstance(found, Attribute):
            shared.append(_attributes_at(storage_address(call.source(value)), modules))
    # An op that nothing dropped depends on may differ from call to call.
    needed = {} if program is None else call.ops_of(program)
    ops = {index: _relative(op, start) for index, op in needed.items()}
    return Template(
        names=tuple(recorder.names),
        saves=_what_matters(call.saves, locators),
        program=program,
        ops=ops,
        locators=locators,
        draws_on_cpu=program is not None and Value(GENERATOR, 0) in program.all_sources,
        cuda_device=None if start is None else start.device_index,
        shared=tuple(shared),
        borders=tuple(call.borders),
        parks=_parks(call),
        statistics=frozenset(v for v in outside if recorder.is_statistic(call.source(v))),
    )


def _parks(call: LiveCall) -> dict[int, str]:
    """The saves that go to the host, by their places, each with its key."""
    spaces, keys = call.context.spaces, call.recorder.keys
    named = ((place, keys.get(ref.value.storage)) for place, (ref, _) in enumerate(call.saves))
    return {p: key for p, key in named if key and spaces is not None and spaces.names(key)}


def _what_matters(
    saves: list[tuple[Ref, bool]], locators: Mapping[Value, Locator]
) -> tuple[tuple[Ref, bool], ...]:
    """The saves, without the layout of those that are kept and start nothing."""
    starts = {locator.place for locator in locators.values() if isinstance(locator, Saved)}
    return tuple(
        (ref if dropped or place in starts else _loose(ref), dropped)
        for place, (ref, dropped) in enumerate(saves)
    )


def _loose(ref: Ref) -> Ref:
    return Ref(Value(GENERATOR, 0), ref.size, (), 0, ref.dtype)


def _relative(op: RecordedOp, start: CudaDraw | None) -> RecordedOp:
    if op.draw is None or start is None:
        return op
    return replace(op, draw=op.draw.since(start))


def can_locate(
    tensor: torch.Tensor, arguments: list[torch.Tensor], modules: list[nn.Module]
) -> bool:
    """Whether a tensor is an argument or an attribute of the block's modules, or looks at one."""
    address = storage_address(tensor)
    is_argument = any(storage_address(argument) == address for argument in arguments)
    return is_argument or bool(_attributes_at(address, modules))


def _locate(
    tensor: torch.Tensor, arguments: list[torch.Tensor], modules: list[nn.Module]
) -> Locator | None:
    address = storage_address(tensor)
    places = (p for p, argument in enumerate(arguments) if storage_address(argument) == address)
    place = next(places, None)
    attribute = next(iter(_attributes_at(address, modules)), None)
    if place is not None:
        # What is both may be two tensors in the next call.
        return None if attribute else Argument(place)
    return attribute


def _attributes_at(address: int, modules: list[nn.Module]) -> tuple[Attribute, ...]:
    """Every attribute with this storage: which of them an op read cannot be told."""
    return tuple(_find_attributes(address, modules))


def _find_attributes(address: int, modules: list[nn.Module]) -> Iterator[Attribute]:
    for number, module in enumerate(modules):
        own = vars(module)
        for group in ("_parameters", "_buffers", "__dict__"):
            for name, found in (own if group == "__dict__" else own[group]).items():
                if _is_plain(found) and storage_address(found) == address:
                    yield Attribute(number, group, name, _layout(found))


def _is_plain(found: Any) -> bool:
    return isinstance(found, torch.Tensor) and has_storage(found)


Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


def _layout(tensor: torch.Tensor) -> Layout:
    return (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


class CachedCall:
    """One call of a block, run by a template."""

    def __init__(self, template: Template, context: Context) -> None:
        self.template, self.context = template, context
        self.surprise = ""
        self._next = 0
        self._kept: dict[int, torch.Tensor] = {}

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        arguments: list[torch.Tensor],
        modules: list[nn.Module],
    ) -> Any:
        """Call the block with hooks that follow the template."""
        template = self.template
        random_state = torch.get_rng_state() if template.draws_on_cpu else None
        start = None if template.cuda_device is None else cuda_state(template.cuda_device)
        with torch.autograd.graph.saved_tensors_hooks(self._pack, seldom_compiled(unpack)):
            out = forward(*args, **kwargs)
        if self.surprise:
            # The user's code has caught what a save raised.
            raise self._surprise(self.surprise)
        if self._next != len(template.saves):
            raise self._surprise(f"saved {self._next} tensors instead of {len(template.saves)}")
        if template.program is not None:
            sources = {
                value: self.context.source(self._find(locator, arguments, modules))
                for value, locator in template.locators.items()
                if value not in template.statistics
            }
            for value in template.statistics:
                found = self._find(template.locators[value], arguments, modules)
                sources[value] = self.context.source(storage_copy(found))
            self.context.fill(template.program, template.ready, sources, random_state, start)
        if template.borders:
            self._give(tree_leaves(out))
        self._kept.clear()
        if self.context.spaces is not None:
            self.context.spaces.close()
        return out

    def _give(self, leaves: list[Any]) -> None:
        for place, ref in self.template.borders:
            leaf = leaves[place] if place < len(leaves) else None
            if not isinstance(leaf, torch.Tensor) or look_at(leaf, ref.value) != ref:
                raise self._surprise("returned something else than was recorded")
            self.context.give(leaf, ref)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not has_storage(tensor):
            return tensor
        place, template = self._next, self.template
        self._next = place + 1
        if place >= len(template.saves):
            raise self._surprise(f"saved more than {len(template.saves)} tensors")
        ref, dropped = template.saves[place]
        if tensor.shape != ref.size or tensor.dtype is not ref.dtype:
            raise self._surprise(f"saved {tuple(tensor.shape)} where {ref.size} was recorded")
        if dropped:
            self._check_layout(tensor, ref)
            return self.context.handle(tensor, ref)
        kept = without_history(tensor)
        if place in template.wanted:
            self._check_layout(tensor, ref)
            self._kept[place] = kept
        spaces = self.context.spaces
        if spaces is None:
            return self.context.packed(kept)
        key = template.parks.get(place)
        if key is not None:
            spaces.park(kept, key)
        # Every look at a parked storage has its key: others need not be looked for.
        return self.context.packed(kept, may_be_parked=key is not None or spaces.parks_input)

    def _check_layout(self, tensor: torch.Tensor, ref: Ref) -> None:
        if tensor.is_conj() is not ref.is_conj or tensor.is_neg() is not ref.is_neg:
            raise self._surprise("saved a conjugate or negative where none was recorded")
        if tensor.stride() != ref.stride or tensor.storage_offset() != ref.offset:
            raise self._surprise(f"saved strides {tensor.stride()}, not {ref.stride}")

    def _find(
        self, locator: Locator, arguments: list[torch.Tensor], modules: list[nn.Module]
    ) -> torch.Tensor:
        if isinstance(locator, Attribute):
            found = locator.find(modules)
            if found is None:
                raise self._surprise(f"changed its {locator.name} during the call")
            # A weight that is computed has a history, which may lead back to this very call.
            return without_history(found)
        if isinstance(locator, Saved):
            return self._kept[locator.place]
        return without_history(arguments[locator.place])

    def _surprise(self, what: str) -> ReplayError:
        self.surprise = what
        return ReplayError(
            f"{self.context.block_name} {what}: it takes different paths on calls that look alike, "
            "and what it has done so far cannot be undone. Nothing was computed wrongly; run the "
            'step again: the block is recorded from now on. Or fit it with engine="module".'
        )
