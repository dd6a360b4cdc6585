"""What a block call leaves behind for backward, and how dropped values come back from it.

Autograd holds a small handle for each dropped tensor; the handle holds the context. The context
holds the recorded ops, the sources they start from and what is rebuilt at the moment. It never
refers to a handle, so nothing here is a cycle and everything goes when autograd lets go.
"""

from collections.abc import Callable

import torch

from leanstep.engines.border import Border, Borders, BorderSource, Gate, Guarded
from leanstep.engines.observer import Observer, observed
from leanstep.engines.parking import ParkedSource, Spaces
from leanstep.engines.randomness import CudaDraw
from leanstep.engines.ready import AnySource, Held, ReadyOps, Source
from leanstep.engines.recording import Ref
from leanstep.errors import LeanstepError
from leanstep.ir import Value
from leanstep.rebuild.program import Program, Session
from leanstep.step.training import autocast_is_on, no_autocast
from leanstep.torch_private.autograd import below_autograd


class ReplayError(LeanstepError):
    """A block did something else than in the recording it was run by."""


class Context:
    """One block call, between its forward and the end of its backward.

    Dropped inputs come in through its `gate`; dropped outputs go to `borders`; `spaces` are for
    what waits on the host.
    """

    __slots__ = (
        "_gone",
        "_held",
        "_needs",
        "_ops",
        "_pinned",
        "_program",
        "_session",
        "block_name",
        "borders",
        "early",
        "gate",
        "observer",
        "on_backward",
        "spaces",
    )

    def __init__(
        self,
        block_name: str,
        on_backward: Callable[[], None],
        gate: Gate | None = None,
        borders: Borders | None = None,
        observer: Observer | None = None,
        spaces: Spaces | None = None,
    ) -> None:
        self.block_name, self.observer, self.spaces = block_name, observer, spaces
        self.gate, self.borders = gate, borders
        self.on_backward = on_backward
        self._session: Session | None = None
        self._pinned: dict[Value, Source] = {}
        self._gone: list[Value] = []
        # Answers requests that come while forward still runs: a block may take gradients itself.
        self.early: Callable[[Ref], torch.Tensor] | None = None

    def anew(self) -> "Context":
        """A context for the same call run a second time."""
        spaces = None if self.spaces is None else self.spaces.anew()
        return Context(
            self.block_name, self.on_backward, self.gate, self.borders, self.observer, spaces
        )

    def pin(self, value: Value, tensor: torch.Tensor) -> None:
        """Answer every request for a value with this tensor."""
        self._pinned[value] = Source(tensor)

    def source(self, tensor: torch.Tensor, *, may_be_parked: bool = True) -> AnySource:
        """A tensor to start replays from: as it is, or the border it looks at, or parked."""
        spaces = self.spaces if may_be_parked else None
        parked = None if spaces is None else spaces.find(tensor)
        if parked is not None:
            return ParkedSource(parked, tensor)
        border = None if self.gate is None else self.gate.find(tensor)
        return Source(tensor) if border is None else BorderSource(border, tensor)

    def packed(self, tensor: torch.Tensor, *, may_be_parked: bool = True) -> AnySource | Guarded:
        """What autograd shall hold for a kept tensor."""
        if self.gate is None and (self.spaces is None or not may_be_parked):
            return Source(tensor)
        source = self.source(tensor, may_be_parked=may_be_parked)
        if self.observer is not None and isinstance(source, ParkedSource):
            source.observe(self.observer, tensor)
        return source if self.gate is None else Guarded(self.gate, source)

    def handle(self, tensor: torch.Tensor, ref: Ref) -> "Handle":
        """What autograd shall hold for a tensor that is dropped."""
        if self.observer is None:
            return Handle(self, ref)
        return ObservedHandle(self, ref, self.observer, self.observer.see(tensor))

    def is_pinned(self, value: Value) -> bool:
        """Whether requests for a value are answered with a tensor that was kept after all."""
        return value in self._pinned

    def give(self, tensor: torch.Tensor, ref: Ref) -> None:
        """Note, once filled, that an output is dropped."""
        assert self.borders is not None
        seen = None if self.observer is None else self.observer.see(tensor)
        self.borders.put(tensor, Border(self, ref, seen))

    def fill(
        self,
        program: Program,
        ops: ReadyOps,
        sources: dict[Value, AnySource],
        random_state: torch.Tensor | None,
        cuda_base: CudaDraw | None = None,
    ) -> None:
        """Give the context what it needs, once forward has ended.

        With a `cuda_base` the ops' draws are counted from there.
        """
        self._held = Held(self.block_name, sources, random_state, cuda_base)
        self._program, self._ops = program, ops
        self._session = Session(program)
        self._needs = dict(program.needs)
        # What was written since was written by the call: autograd wants it as it is now.
        self._pinned = {value: pin.as_it_is() for value, pin in self._pinned.items()}
        for value in self._gone:
            if value in program.wanted:
                self.answered(value)
                self.released(value)

    def rebuild(self, ref: Ref, *, first_time: bool) -> torch.Tensor:
        """Bring a dropped tensor back."""
        self.on_backward()
        value, session = ref.value, self._session
        if value in self._pinned:
            return ref.anew(self._pinned[value].unchanged(self.block_name))
        if session is None and self.early is not None:
            return self.early(ref)
        if session is None:
            raise ReplayError(
                f"{self.block_name} runs backward inside its own forward, through tensors that the "
                'plan drops. Profile it as it runs now, or fit it with engine="module".'
            )
        held = self._held
        if value in held.sources:
            return ref.anew(held.read(value))
        with below_autograd():
            if runs := session.request(value):
                self._ops.replay(runs, held)
            tensor = ref.anew(held.buffers[value.storage])
        if first_time:
            self.answered(value)
        elif session.served_again(value):
            held.buffers.pop(value.storage, None)
        return tensor

    def answered(self, value: Value) -> None:
        """Count one handle as served; its storage goes when nothing else needs it."""
        if self._session is None or value not in self._program.wanted:
            return
        if self._session.served(value):
            self._held.buffers.pop(value.storage, None)

    def released(self, value: Value) -> None:
        """Let go of the sources that only this handle needed."""
        if self._session is None:
            # Forward let it go again: counted once it is known what is needed.
            self._gone.append(value)
            return
        needs = self._needs
        for source in self._program.sources.get(value, ()):
            needs[source] -= 1
            if not needs[source]:
                self._held.release(source)


class Handle:
    """What autograd holds for a dropped tensor."""

    __slots__ = ("asked", "context", "ref")

    def __init__(self, context: Context, ref: Ref) -> None:
        self.context, self.ref, self.asked = context, ref, False

    def tensor(self) -> torch.Tensor:
        """The tensor, rebuilt."""
        if self.context.gate is not None:
            self.context.gate.open()
        first_time, self.asked = not self.asked, True
        if not autocast_is_on():
            return self.context.rebuild(self.ref, first_time=first_time)
        with no_autocast():
            return self.context.rebuild(self.ref, first_time=first_time)

    def __del__(self) -> None:
        if not self.asked:
            self.context.answered(self.ref.value)
        self.context.released(self.ref.value)


class ObservedHandle(Handle):
    """A handle in a rehearsal: it knows what the tensor was."""

    __slots__ = ("_observer", "_seen")

    def __init__(
        self, context: Context, ref: Ref, observer: Observer, seen: torch.Tensor | None
    ) -> None:
        super().__init__(context, ref)
        self._observer, self._seen = observer, seen

    def tensor(self) -> torch.Tensor:
        """The tensor, rebuilt and compared."""
        name = self.context.block_name
        with observed(self._observer, name):
            tensor = super().tensor()
        if not self.context.is_pinned(self.ref.value):
            size = "×".join(map(str, self.ref.size))
            self._observer.compare(name, f"a dropped tensor of {size}", self._seen, tensor)
        return tensor
