"""Record one block call while it runs, so that dropped values can be replayed.

The record is made of what the ops below autograd and autocast were called with, so replaying it
needs no Python of the user's. Tensor arguments become references to a storage at a version with
size, stride and offset: views need no replay. What comes from outside the call is held to its
end, since only then is it known what will be needed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leanstep.engines.randomness import CudaDraw, DeviceDraws, draw_device
from leanstep.engines.scope import Scope
from leanstep.engines.settings import Settings, settings_now
from leanstep.ir import Fact, Value
from leanstep.ir.graph import scoped_name
from leanstep.rebuild.program import Rerun
from leanstep.rebuild.recipes import RECIPES, cheaper
from leanstep.rebuild.rerun import (
    NEVER_RERUN,
    STATISTICS_ARE_OPTIONAL,
    UNWRITTEN,
    reads_unwritten,
)
from leanstep.recorder.facts import (
    DrawOrder,
    OpInfo,
    call_facts,
    op_info,
    statistics_of,
    tensor_arguments,
    tensors_in,
    written_names,
)
from leanstep.recorder.recipes import recipe_call
from leanstep.recorder.values import StorageBook, has_storage
from leanstep.torch_private.fake import is_imagined
from leanstep.torch_private.modes import TorchDispatchMode
from leanstep.torch_private.tensors import detached, storage_address, with_lazy_bits, wraps_others

# The CPU generator, as a storage: every draw moves it to its next version.
GENERATOR = -1


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of the recording: a value, and how it is looked at."""

    value: Value
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool = False
    is_neg: bool = False

    def of(self, base: torch.Tensor) -> torch.Tensor:
        """The same look at another tensor's storage; the tensor itself, if it looks like that."""
        plain = base.dtype is self.dtype and not base.is_conj() and not base.is_neg()
        if plain and not self.is_conj and not self.is_neg:
            if (
                base.shape == self.size
                and base.stride() == self.stride
                and base.storage_offset() == self.offset
            ):
                return base
            return base.as_strided(self.size, self.stride, self.offset)
        look = torch.empty(0, dtype=self.dtype, device=base.device)
        look.set_(base.untyped_storage(), self.offset, self.size, self.stride)
        return with_lazy_bits(look, conj=self.is_conj, neg=self.is_neg)

    def anew(self, base: torch.Tensor) -> torch.Tensor:
        """The same as a tensor of its own: whoever gets it may do with the object as they like."""
        look = self.of(base)
        return look.detach() if look is base else look


def look_at(tensor: torch.Tensor, value: Value = Value(GENERATOR, 0)) -> Ref:  # noqa: B008
    """How a tensor looks at its storage; without a value, only the look counts."""
    return Ref(
        value,
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def without_history(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: holding the history would hold earlier blocks.

    A leaf without gradient may get one in place, which leads back to the call that holds it.
    """
    is_parameter = tensor.is_leaf and tensor.requires_grad
    return tensor if is_parameter else detached(tensor)


@dataclass(frozen=True, slots=True)
class RecordedOp:
    """One op to run again: its arguments with references, and the storages it allocates.

    `births` pairs each new storage with the place of its tensor among the outputs' leaves. What
    they compute depends on some of torch's settings too, so these are part of the record.
    """

    rerun: Rerun
    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    births: tuple[tuple[int, int], ...]
    draw: CudaDraw | None
    settings: Settings


class CallRecorder(TorchDispatchMode):
    """The dispatch mode that writes down one block call.

    `draws_apart` says that it draws from a generator of its own. `recipes` names the storages that
    may come back by a cheap replay.
    """

    def __init__(
        self,
        before_write: Callable[[Value, torch.Tensor], None],
        random_state: torch.Tensor,
        scope: Scope,
        recipes: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._scope = scope
        self._recipes = recipes
        self.cheap_ops: dict[int, RecordedOp] = {}
        self._draw_order = DrawOrder(random_state)
        self.device_draws = DeviceDraws()
        self.book = StorageBook(lambda number: None)
        self.ops: dict[int, RecordedOp] = {}
        self.makers: dict[Value, Rerun] = {}
        self.outside: dict[Value, torch.Tensor] = {}
        self.unwritten: set[Value] = set()
        self.keys: dict[int, str] = {}
        self.names: list[str] = []
        self.depends_on_data = False
        self.draws_apart = False
        self._written: set[int] = set()
        self._matters: set[int] = set()
        self._statistics: set[int] = set()
        self.paused = False
        self._seen: dict[str, int] = {}
        self._draws = 0
        self._before_write = before_write
        self._outside_numbers: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one op and write it down."""
        kwargs = kwargs or {}
        if any(map(wraps_others, types)):
            # It is taken apart first; the ops on its parts come here again.
            return NotImplemented
        if self.paused or is_imagined(types):
            return func(*args, **kwargs)
        info = op_info(func)
        self.names.append(info.name)
        facts = call_facts(info, args, kwargs)
        reads, written = self._reads(info, args, kwargs)
        templates = self._templates(info, args, kwargs, written)
        draw = draw_device(facts, args, kwargs)
        on_cpu = Fact.RANDOM in facts and draw is None
        if on_cpu and self._draw_jumps():
            facts = (*facts, Fact.OWN_GENERATOR)
        try:
            out = func(*args, **kwargs)
        except BaseException:
            # The model may catch it and go on: names shall be those of a recorded step.
            self.names.pop()
            raise
        writes = [self.book.write(number) for number in written]
        births = self._births(out, info.name)
        if on_cpu:
            reads.append(Value(GENERATOR, self._draws))
            self._draws += 1
            writes.append(Value(GENERATOR, self._draws))
            self._note_draw()
        if draw is not None:
            self.device_draws.drew(draw)
        self._note(info, func, templates, reads, writes, births, draw, facts)
        if self._recipes and info.name in RECIPES:
            self._note_recipe(info, args, kwargs, list(tensors_in(out)), births)
        return out

    def _draw_jumps(self) -> bool:
        self.paused, paused = True, self.paused
        try:
            return self._draw_order.jumped()
        finally:
            self.paused = paused

    def _note_draw(self) -> None:
        self.paused, paused = True, self.paused
        self._draw_order.drew()
        self.paused = paused

    def _key(self, operator: str) -> str:
        """The name of an op that allocates; as in `Graph.keys`, only those count."""
        name = scoped_name(self._scope.here(), operator)
        self._seen[name] = self._seen.get(name, -1) + 1
        return f"{name}#{self._seen[name]}"

    def _reads(
        self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Value], list[int]]:
        reads: list[Value] = []
        written: dict[int, None] = {}
        self._statistics.update(statistics_of(info, args, kwargs))
        for tensor, is_written in tensor_arguments(info, args, kwargs):
            value = self.value_of(tensor)
            reads.append(value)
            if value.storage in self._outside_numbers:
                self._note_outside(info, storage_address(tensor), is_written)
            if is_written:
                self._before_write(value, tensor)
                written[value.storage] = None
        return reads, list(written)

    def _note_outside(self, info: OpInfo, address: int, is_written: bool) -> None:
        """Note who reads and writes a storage that was there before the call."""
        if is_written:
            self._written.add(address)
        if not is_written or info.name not in STATISTICS_ARE_OPTIONAL:
            self._matters.add(address)

    @property
    def written(self) -> dict[int, bool]:
        """The addresses of storages from outside that the call writes.

        Each with whether that can change what it computes: statistics that batch norm writes do
        not, unless something else reads them.
        """
        return {address: address in self._matters for address in sorted(self._written)}

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value a tensor looks at; one not seen before comes from outside and is held."""
        number = self.book.find(tensor)
        if number is None:
            number = self.book.add(tensor.untyped_storage())
            self._outside_numbers.add(number)
        value = self.book.value(number)
        if number in self._outside_numbers and value not in self.outside:
            self.outside[value] = self.detached(tensor)
        return value

    def close(self) -> None:
        """Let go of everything that is not part of the record."""
        self.book.close()
        self.outside.clear()
        self._before_write = _ignore_write

    def is_statistic(self, tensor: torch.Tensor) -> bool:
        """Whether batch norm may write a tensor later on, which no version tells."""
        return storage_address(tensor) in self._statistics

    def is_outside(self, storage: int) -> bool:
        """Whether a storage was there before the call."""
        return storage in self._outside_numbers

    def detached(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it can be held until backward."""
        self.paused, paused = True, self.paused
        try:
            return without_history(tensor)
        finally:
            self.paused = paused

    def _templates(
        self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any], written: list[int]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        skipped = written_names(info, args, kwargs) if _loses_statistics(info, written) else ()
        names = info.argument_names
        return (
            tuple(
                None if name in skipped else self._template(arg)
                for name, arg in zip(names, args, strict=False)
            ),
            {
                name: None if name in skipped else self._template(arg)
                for name, arg in kwargs.items()
            },
        )

    def _template(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self.ref(argument) if has_storage(argument) else argument
        if isinstance(argument, (list, tuple)):
            return type(argument)([self._template(item) for item in argument])
        return argument

    def ref(self, tensor: torch.Tensor) -> Ref:
        """A reference to a tensor."""
        return look_at(tensor, self.value_of(tensor))

    def _births(self, out: Any, operator: str) -> list[tuple[int, int]]:
        births: list[tuple[int, int]] = []
        key = ""
        for leaf, tensor in enumerate(tensors_in(out)):
            if has_storage(tensor) and self.book.find(tensor) is None:
                number = self.book.add(tensor.untyped_storage())
                key = key or self._key(operator)
                self.keys[number] = f"{key}:{len(births)}"
                births.append((number, leaf))
                if operator.startswith(UNWRITTEN) and tensor.numel():
                    self.unwritten.add(Value(number, 0))
        return births

    def _note(
        self,
        info: OpInfo,
        func: Any,
        templates: tuple[tuple[Any, ...], dict[str, Any]],
        reads: list[Value],
        writes: list[Value],
        births: list[tuple[int, int]],
        draw: CudaDraw | None,
        facts: tuple[Fact, ...],
    ) -> None:
        if Fact.HOST_READ in facts or Fact.DYNAMIC_SHAPE in facts:
            self.depends_on_data = True
        if Fact.OWN_GENERATOR in facts:
            self.draws_apart = True
        made = [Value(number, 0) for number, _ in births]
        if not (made or writes) or NEVER_RERUN.intersection(facts):
            return
        if _loses_statistics(info, [value.storage for value in writes]):
            gone = {value.storage for value in writes}
            reads = [value for value in reads if value.storage not in gone]
            writes = []
        if any(self.is_outside(value.storage) for value in writes):
            # Running it again would write what belongs to others.
            return
        if self.unwritten and reads_unwritten(reads, writes, self.unwritten):
            return
        rerun = Rerun(len(self.names) - 1, tuple(dict.fromkeys(reads)), (*writes, *made))
        args, kwargs = templates
        self.ops[rerun.index] = RecordedOp(
            rerun, func, args, kwargs, tuple(births), draw, settings_now()
        )
        self.makers.update((value, rerun) for value in rerun.writes)

    def _note_recipe(
        self,
        info: OpInfo,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: list[torch.Tensor],
        births: list[tuple[int, int]],
    ) -> None:
        """Write down the cheap replay of the op just noted, where the plan names its output."""
        op, recipe = self.ops.get(len(self.names) - 1), RECIPES[info.name]
        call = recipe_call(info, args, kwargs, outputs)
        if op is None or call is None or [leaf for _, leaf in births] != [*range(len(outputs))]:
            return
        storage = births[recipe.output][0]
        if self.keys[storage] not in self._recipes:
            return
        made = [Value(number, 0) for number, _ in births]
        rerun = cheaper(op.rerun, recipe, made, without=(GENERATOR,))
        templates = tuple(self._template(argument) for argument in call.args)
        self.cheap_ops[rerun.index] = RecordedOp(
            rerun, call.func, templates, {}, ((storage, 0),), None, op.settings
        )


def _ignore_write(value: Value, tensor: torch.Tensor) -> None:
    """Stand in for the listener of a closed recorder."""


def _loses_statistics(info: OpInfo, written: Sequence[int]) -> bool:
    return bool(written) and info.name in STATISTICS_ARE_OPTIONAL
