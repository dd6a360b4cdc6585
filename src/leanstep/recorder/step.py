"""Record one training step while it runs.

A dispatch mode below autograd sees every op of forward, backward and optimizer; hooks on modules
tell where it ran; saved-tensor hooks tell what autograd saves, when backward asks for it and when
it is let go. Nothing is called twice and nothing is kept alive: storages are followed by weak
references, and so is when they could go if autograd held nothing (`holds.py`).
"""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from leanstep.ir import (
    Category,
    Fact,
    Graph,
    LossCall,
    Op,
    Phase,
    Save,
    Storage,
    Unpack,
    Value,
)
from leanstep.ir.loss import LOSS_OP
from leanstep.recorder.accumulation import InPlace
from leanstep.recorder.attic import Attic
from leanstep.recorder.calls import Calls, Origin
from leanstep.recorder.company import Company
from leanstep.recorder.facts import (
    DrawOrder,
    OpInfo,
    call_facts,
    op_info,
    tensor_arguments,
    tensors_in,
)
from leanstep.recorder.holds import Holds
from leanstep.recorder.losses import given_logits
from leanstep.recorder.resizes import Absences
from leanstep.recorder.signatures import Signatures
from leanstep.recorder.values import StorageBook, has_storage
from leanstep.torch_private.autograd import in_backward, top_saving_hooks
from leanstep.torch_private.fake import is_imagined
from leanstep.torch_private.modes import TorchDispatchMode
from leanstep.torch_private.tensors import local_tensor, wraps_others
from leanstep.truth import OpMeter

# What the model holds, whoever else does.
STATIC = (Category.PARAMETER, Category.BUFFER)


class Saved:
    """What autograd holds instead of a tensor while a step is recorded."""

    __slots__ = ("__weakref__", "index", "recording", "tensor")

    def __init__(self, recording: "StepRecording", index: int, tensor: Any) -> None:
        self.recording, self.index, self.tensor = recording, index, tensor

    def __del__(self) -> None:
        self.recording.released(self.index)


class StepRecording(TorchDispatchMode):
    """The dispatch mode and hooks that write down one step.

    With an attic, what only autograd holds is moved there. `company` is who else is at work.
    """

    def __init__(
        self,
        meter: OpMeter,
        signatures: Signatures,
        *,
        company: Company | None = None,
        attic: Attic | None = None,
    ) -> None:
        super().__init__()
        self.meter, self.signatures, self.attic = meter, signatures, attic
        self.company = company or Company()
        self._standins: dict[int, weakref.ref[Saved]] = {}
        self.ops: list[Op] = []
        self.saves: list[Save] = []
        self.unpacks: list[Unpack] = []
        self.calls = Calls()
        self.book = StorageBook(self._died)
        self.nbytes: list[int] = []
        self.births: list[int] = []
        self.deaths: dict[int, int] = {}
        self.holds = Holds()
        self.categories: dict[int, Category] = {}
        self.in_optimizer = False
        self.loss: LossCall | None = None
        self._internal = False
        self._in_place = InPlace()
        self._absences = Absences()
        self._generator: int | None = None
        self._draw_order = DrawOrder()
        self._started = 0

    # What is there before the step.

    def adopt(self, tensor: torch.Tensor, category: Category) -> None:
        """Register a tensor that exists before the step."""
        tensor = local_tensor(tensor)
        if has_storage(tensor) and self.book.find(tensor) is None:
            self._add_storage(tensor, birth=-1)
            self.categories[len(self.nbytes) - 1] = category

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a storage that was born in the step is for."""
        tensor = local_tensor(tensor)
        if has_storage(tensor) and (number := self.book.find(tensor)) is not None:
            self.categories.setdefault(number, category)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out what runs inside: it is not the step's own."""
        before, self._internal = self._internal, True
        try:
            yield
        finally:
            self._internal = before

    # Ops.

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
        # Marks in a trace (`record_function`, every optimizer's step) compute nothing, nor does a
        # question for a fake tensor's device.
        is_aside = self._internal or func.namespace in ("profiler", "prim")
        if is_aside or (not self.meter.sees_fakes and is_imagined(types)):
            return func(*args, **kwargs)
        info = op_info(func)
        self._poll_natural_deaths()
        reads, written = self._reads(info, args, kwargs)
        facts = self._with_generator_fact(call_facts(info, args, kwargs))
        cost = self.signatures.add(func, args, kwargs)
        is_in_place = self._in_place.sees(info.name, args, reads[0] if reads else None)
        with self.meter.op():
            self._started += 1
            try:
                out = func(*args, **kwargs)
            except BaseException:
                self._started -= 1
                raise
        spared = 0
        if is_in_place:
            spared = self.meter.nbytes(out.untyped_storage())
            self.book.replace(out, reads[0].storage)
            written = [reads[0].storage]
        written = [number for number in written if not self._puts_back(func, number)]
        writes = [self.book.write(number) for number in written]
        writes.extend(self._births(out))
        if Fact.RANDOM in facts and self._draws_on_host(out):
            reads, writes = self._with_generator(reads, writes)
            with self.aside():
                self._draw_order.drew()
        if info.name == LOSS_OP:
            self.loss = self._loss_call(len(args[0]))
        call, source = self._origin()
        self._in_place.wrote(writes)
        self.ops.append(
            Op(
                name=info.name,
                phase=self._phase(),
                call=call,
                source=source,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                rise_bytes=-spared,
                cost=cost,
                facts=self._facts(facts, written),
            )
        )
        return out

    def _loss_call(self, num_rows: int) -> LossCall | None:
        """The cross entropy that runs now, if it could be computed by rows.

        Hooks of others, which are inside of ours, may hold what it saves.
        """
        logits = given_logits()
        is_ours = top_saving_hooks() == (self.pack, self.unpack)
        number = self.book.find(logits) if is_ours and logits is not None else None
        return None if number is None else LossCall(num_rows, number)

    def _reads(
        self, info: OpInfo, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Value], list[int]]:
        """The values an op reads, and the storages among them that it writes."""
        reads: list[Value] = []
        written: dict[int, None] = {}
        for tensor, is_written in tensor_arguments(info, args, kwargs):
            number = self.book.find(tensor)
            if number is None:
                number = self._add_unseen(tensor)
            reads.append(self.book.value(number))
            if is_written:
                written[number] = None
        return reads, list(written)

    def _add_unseen(self, tensor: torch.Tensor) -> int:
        """Add a storage that was made behind torch's back."""
        last = self.ops[-1] if self.ops else None
        if last is None or Fact.COLLECTIVE not in last.facts:
            # From NumPy, say: it was there all along.
            return self._add_storage(tensor, birth=-1)
        # A collective's own, as gloo has them.
        number = self._add_storage(tensor, birth=len(self.ops) - 1)
        writes = (*last.writes, self.book.value(number))
        self.ops[-1] = dataclasses.replace(last, writes=writes)
        return number

    def _puts_back(self, func: Any, number: int) -> bool:
        """Whether a write is FSDP2's, of what a storage held before it was emptied."""
        is_first = self._absences.is_refill(number)
        return is_first and func.namespace == "fsdp"

    def _births(self, out: Any) -> list[Value]:
        births = []
        for tensor in tensors_in(out):
            if has_storage(tensor) and self.book.find(tensor) is None:
                births.append(self.book.value(self._add_storage(tensor, birth=len(self.ops))))
        return births

    def _add_storage(self, tensor: torch.Tensor, *, birth: int) -> int:
        return self._add(tensor.untyped_storage(), birth)

    def _add(self, storage: torch.UntypedStorage, birth: int) -> int:
        number = self.book.add(storage)
        self._extend(number)
        self.nbytes[number] = self.meter.nbytes(storage)
        self.births[number] = birth
        return number

    def resized(self, storage: torch.UntypedStorage, is_filled: bool) -> None:
        """Note that a storage gets its size or is about to lose it."""
        if self._internal or self.attic is not None:
            return
        number = self.book.find_storage(storage)
        if number is None:
            number = self._add(storage, -1)
            self.categories[number] = Category.PARAMETER
            if is_filled:
                self._absences.begin(number, 0)
        if is_filled:
            self.nbytes[number] = max(self.nbytes[number], self.meter.nbytes(storage))
            self._absences.end(number, self._started)
        else:
            self._absences.begin(number, self._started)

    def _extend(self, number: int) -> None:
        self.nbytes.extend([0] * (number + 1 - len(self.nbytes)))
        self.births.extend([-1] * (number + 1 - len(self.births)))

    def _with_generator(
        self, reads: list[Value], writes: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        if self._generator is None:
            self._generator = self.book.add_abstract()
            self._extend(self._generator)
            self.categories[self._generator] = Category.GENERATOR
        before = self.book.value(self._generator)
        return [*reads, before], [*writes, self.book.write(self._generator)]

    def _draws_on_host(self, out: Any) -> bool:
        # The first output is the result; attention on CUDA also returns its seed, which may lie
        # on the host.
        return any(self.meter.draws_on_host(tensor) for tensor in islice(tensors_in(out), 1))

    def _with_generator_fact(self, facts: tuple[Fact, ...]) -> tuple[Fact, ...]:
        """The facts of a draw, with that it is not the next one of torch's generator."""
        if Fact.RANDOM not in facts:
            return facts
        with self.aside():
            has_jumped = self._draw_order.jumped()
        return (*facts, Fact.OWN_GENERATOR) if has_jumped else facts

    def _facts(self, facts: tuple[Fact, ...], written: list[int]) -> tuple[Fact, ...]:
        if any(self.categories.get(number) in STATIC for number in written):
            return (*facts, Fact.WRITES_BUFFER)
        return facts

    def _phase(self) -> Phase:
        if self.in_optimizer:
            return Phase.OPTIMIZER
        return Phase.BACKWARD if in_backward() else Phase.FORWARD

    def _origin(self) -> Origin:
        """The module call and source line of an op; a backward op has those of its forward."""
        if self.in_optimizer:
            return -1, "optimizer.step()"
        of_node = self.calls.origin_of_node()
        if of_node is not None:
            return of_node
        self.company.see(len(self.ops))
        return self.calls.origin_in_forward()

    # Deaths.

    def _died(self, number: int) -> None:
        self.deaths[number] = self._started - 1
        if self.attic is not None:
            self.attic.forget(number)

    def _poll_natural_deaths(self) -> None:
        for number in self.holds.look(self._started - 1):
            self._put_away(number)

    def _put_away(self, number: int) -> None:
        saved = self._standins[number]() if number in self._standins else None
        if self.attic is not None and saved is not None and self.births[number] >= 0:
            self.attic.take(number, saved.tensor.untyped_storage())

    # What autograd saves.

    @property
    def lets_overwrite(self) -> bool:
        """Whether a node may write into what it saves now: blocks have other hooks when planned."""
        return self.attic is None and self.calls.is_outside

    def pack(self, tensor: torch.Tensor) -> Any:
        """Note a tensor that autograd saves."""
        if not has_storage(tensor):
            return tensor
        number = self.book.find(tensor)
        if number is None:
            number = self._add_storage(tensor, birth=-1)
        with self.aside():
            standin = tensor.detach()
        if self.categories.get(number) not in STATIC:
            self.holds.add(number, standin)
        self.saves.append(Save(self.book.value(number), self.calls.innermost, len(self.ops), -1))
        saved = Saved(self, len(self.saves) - 1, standin)
        if self.attic is not None:
            self._standins[number] = weakref.ref(saved)
        return saved

    def unpack(self, saved: Any) -> torch.Tensor:
        """Note that backward asks for a saved tensor."""
        if isinstance(saved, torch.Tensor):
            return saved
        self.unpacks.append(Unpack(saved.index, len(self.ops)))
        tensor: torch.Tensor = saved.tensor
        if self.attic is not None:
            number = self.saves[saved.index].value.storage
            self.attic.bring(number, tensor.untyped_storage())
        return tensor

    def released(self, index: int) -> None:
        """Note that autograd let a saved tensor go."""
        save = self.saves[index]
        self.saves[index] = Save(save.value, save.call, save.position, len(self.ops))
        self.holds.drop(save.value.storage, self._started - 1)

    # The result.

    def graph(self) -> Graph:
        """The recording as a frozen graph; call it after the step and outside the mode."""
        self._poll_natural_deaths()
        rises = iter(self.meter.rises())
        ops = tuple(
            dataclasses.replace(op, rise_bytes=max(0, rise + op.rise_bytes))
            for op, rise in zip(self.ops, rises, strict=True)
        )
        # What autograd still holds at the end belongs to a branch that backward never reached.
        saves = tuple(
            save if save.release >= 0 else dataclasses.replace(save, release=len(ops))
            for save in self.saves
        )
        saved = {save.value.storage for save in saves}
        storages = tuple(self._storage(number, saved) for number in range(len(self.nbytes)))
        events = tuple(self.unpacks), tuple(self.calls.begun)
        on_host = self.meter.is_on_host
        return Graph(ops, storages, saves, *events, is_on_host=on_host, loss=self.loss)

    def _storage(self, number: int, saved: set[int]) -> Storage:
        end = len(self.ops)
        death = self.deaths.get(number, end)
        birth = self.births[number]
        category = self.categories.get(number)
        if category is None and birth < 0:
            category = Category.OTHER
        if category is None:
            crosses = self._crosses_into_backward(birth, death)
            category = Category.ACTIVATION if number in saved or crosses else Category.TEMPORARY
        natural = min(death, self.holds.natural_deaths.get(number, death))
        absences = self._absences.of(number, death)
        return Storage(self.nbytes[number], category, birth, death, natural, absences)

    def _crosses_into_backward(self, birth: int, death: int) -> bool:
        if self.ops[birth].phase is not Phase.FORWARD or death + 1 >= len(self.ops):
            return False
        return self.ops[death + 1].phase is not Phase.FORWARD
