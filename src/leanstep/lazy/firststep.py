"""The first step of a lazily fitted model: the user's own, recorded while it runs.

It begins when the model is first called with gradients and ends when the optimizer has stepped (or,
without an optimizer, when the model is called again). Nobody knows before how the loss is computed
from what the model returns, or how often backward runs; so nothing is called a second time and
nothing is run apart. In between:

- every block that can be guessed from the modules alone runs by the replay engine with everything
  dropped (`engines/witnessed.py`), so the step needs about what a fully recomputed one needs;
- a dispatch mode, saved-tensor hooks and module hooks write down the untouched step
  (`recorder/live.py`). They span user code from one call to another, so they cannot be `with`
  blocks; both stacks are checked to be in order when they are taken off.

A step that accumulates gradients over several batches is recorded anew at each; the last one, with
gradients there from the start and with the optimizer's step, is what plans are made for.
"""

import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from leanstep.api import assemble, with_peak
from leanstep.chunks import find_loss
from leanstep.eager import uncompiled
from leanstep.engines.apply import SequentialRuntime
from leanstep.engines.attach import attach, can_attach, detach
from leanstep.engines.scope import ModulePaths, Scope
from leanstep.engines.witnessed import WitnessedBlock
from leanstep.engines.witnessed_loss import WitnessedLoss
from leanstep.errors import BudgetError, InputError
from leanstep.ir import Block, Engine, Exclusion, Profile
from leanstep.ir.check import check_graph
from leanstep.marks import marks_of
from leanstep.recorder.blocks import guess_blocks
from leanstep.recorder.company import Company
from leanstep.recorder.live import LiveRecording, with_settled_state
from leanstep.recorder.resizes import resizes_told
from leanstep.recorder.run import adopt_static, mark_gradients, module_hooks
from leanstep.recorder.signatures import Signatures
from leanstep.recorder.values import has_storage
from leanstep.step.seconds import StepTime
from leanstep.step.training import TrainingStep
from leanstep.torch_private.autograd import top_saving_hooks
from leanstep.torch_private.modes import is_innermost
from leanstep.torch_private.tensors import local_tensor
from leanstep.truth import OpMeter, resident_bytes

# One at a time, of all threads: there is one profiler for all.
_turns = threading.Lock()
_under_way: "weakref.WeakSet[FirstStep]" = weakref.WeakSet()
# Those with something on torch's stacks, which hold them too.
_on_stacks: "list[FirstStep]" = []

RECORDED_LIVE = "recorded from the first training step: its time is the sum over its ops"


class FirstStep:
    """One step of the user's, between `begin` and `finish`; or `abandon`, after an error.

    An error in backward ends up with the user and not here: the model's next call notices, or
    `remove()`.

    Where the model is not called, somebody calls a method of it, and the window in which its loss
    is computed in chunks would never open. Without `chunks` nobody looks at the loss.
    """

    def __init__(
        self, step: TrainingStep, *, model_is_called: bool = True, chunks: bool = True
    ) -> None:
        has_gradients = any(p.grad is not None for p in step.parameters())
        self._step = dataclasses.replace(step, gradients_kept=has_gradients)
        self._signatures, self._company = Signatures(), Company(is_inside=True)
        # Hooks of modules; what is in force in this step; and the stacks of torch's for a thread.
        self._hooks, self._open, self._modes = ExitStack(), ExitStack(), ExitStack()
        self._meter = OpMeter(step.device)
        self._recording = LiveRecording(
            self._meter,
            self._signatures,
            company=self._company,
            has_optimizer=step.optimizer is not None,
        )
        self._recording.out_of_memory = self._out_of_memory
        self._model_is_called = model_is_called
        self._loss = self._recording.witness = (
            WitnessedLoss(self._recording.aside) if chunks else None
        )
        self._other_bytes = 0
        self._tried: list[tuple[str, tuple[str, ...]]] = []
        self._thread = threading.get_ident()

    @staticmethod
    def is_one_open() -> bool:
        """Whether a first step is under way."""
        return bool(_under_way)

    @staticmethod
    def fail_open_ones() -> None:
        """Stop watching what this thread has begun."""
        for first in list(_under_way):
            if first.is_here:
                first.fail()

    def takes_turn(self) -> bool:
        """Whether it may begin: no other is under way."""
        with _turns:
            if _under_way:
                return False
            _under_way.add(self)
        self._open.callback(_under_way.discard, self)
        return True

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that it began on."""
        return self._thread == threading.get_ident()

    @property
    def _is_innermost(self) -> bool:
        """Whether what it has put on torch's stacks can be taken off."""
        recording = self._recording
        is_ours = top_saving_hooks() == (recording.pack, recording.unpack)
        return self.is_here and is_ours and is_innermost(recording)

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody can derive any more what forward has made so far."""
        saves = self._recording.saves
        return bool(saves) and all(save.release >= 0 for save in saves) and self._is_innermost

    @property
    def has_seen_backward(self) -> bool:
        """Whether backward has begun."""
        return self._recording.has_seen_backward

    @property
    def has_failed(self) -> bool:
        """Whether the step ended with an error of leanstep's."""
        return self._recording.has_failed

    def begin(self) -> None:
        """Start in the model's own call, before its forward."""
        step, recording = self._step, self._recording
        self._open.enter_context(self._meter)
        self._open.enter_context(uncompiled())
        self._hooks.enter_context(module_hooks(step.model, recording))
        adopt_static(step, recording)
        self._other_bytes = max(0, resident_bytes(step) - sum(recording.nbytes))
        self._recompute_all()
        hooks = torch.autograd.graph.saved_tensors_hooks(recording.pack, recording.unpack)
        self._open.enter_context(resizes_told(recording.resized))
        self._modes.enter_context(hooks)
        self._modes.enter_context(recording)
        _on_stacks.append(self)
        # The model's own call has begun before there was a hook on it.
        recording.calls.enter("", step.model, len(recording.ops))

    def end_forward(self) -> None:
        """Note that the model's call has ended, where no hook on it tells."""
        self._recording.calls.leave(len(self._recording.ops))

    def begin_optimizer(self) -> None:
        """Note that the optimizer's step begins."""
        mark_gradients(self._step, self._recording)
        self._recording.in_optimizer = True

    def finish(self) -> Profile:
        """End the recording, time its ops, and say what the untouched step needs."""
        step, recording = self._step, self._recording
        if not recording.in_optimizer:
            mark_gradients(step, recording)
        tensors = filter(has_storage, map(local_tensor, step.optimizer_tensors()))
        found = [recording.book.find(tensor) for tensor in tensors]
        made = frozenset(n for n in found if n is not None and recording.births[n] >= 0)
        self._close()
        # They belong to the next step.
        recording.calls.drop_open()
        graph = with_settled_state(recording.graph(), made)
        check_graph(graph)
        draft = assemble(step, graph, self._signatures, self._company, StepTime())
        # The link between device and host was not tried out in this step.
        draft = dataclasses.replace(
            draft,
            link=None,
            notes=(*draft.notes, RECORDED_LIVE),
            exclusions=tuple(dict.fromkeys(self._untried(draft.blocks))),
        )
        draft = dataclasses.replace(draft, whole_loss=self._whole_loss(draft))
        return with_peak(draft, self._other_bytes, 0)

    def _whole_loss(self, draft: Profile) -> str:
        """Why the loss should not be computed in chunks, where it could be."""
        loss = find_loss(draft)
        if self._loss is None or loss is None:
            return ""
        if not loss.path and not self._model_is_called:
            return "its host trains without calling the model that computes it"
        return self._loss.doubt

    def fail(self) -> None:
        """Stop watching, in the middle of a call: hooks may not be taken off there."""
        self._recording.has_failed = True
        self._leave()

    def abandon(self) -> None:
        """Leave the model as it was."""
        self._recording.has_failed = True
        self._leave()
        self._hooks.close()

    def _leave(self) -> None:
        self.tidy()
        self._open.close()

    @staticmethod
    def tidy() -> None:
        """Take off what has failed, as far as nothing of the user's lies above it.

        Where something does, or on another thread, it does nothing meanwhile.
        """
        for first in reversed(_on_stacks):
            if first.has_failed and first._is_innermost:
                first._modes.close()
                _on_stacks.remove(first)

    def _close(self) -> None:
        if not self._is_innermost:
            raise InputError(
                "a dispatch mode or saved-tensor hooks were entered before the model's first call "
                "and left before optimizer.step(), or the other way round: leanstep.lean records "
                "the step between the two. Use leanstep.fit, or put both inside."
            )
        self.abandon()

    def _recompute_all(self) -> None:
        model = self._step.model
        modules = dict(model.named_modules())
        marks = dict(marks_of(model))
        paths = ModulePaths(model, ())
        whole, stretches = guess_blocks(model, [p for p, mark in marks.items() if mark != "keep"])
        for path in whole:
            if marks.get(path) != "keep" and _may_repeat(modules[path]):
                block = WitnessedBlock(Scope(paths, path, is_checked=True), self._recording)
                self._attach(modules[path], block)
                self._tried.append((path, ()))
        by_path: dict[str, dict[tuple[str, ...], WitnessedBlock]] = {}
        for path, children in stretches:
            if marks.get(path) != "keep" and _may_repeat(modules[path]):
                scope = Scope(paths, path, children, is_checked=True)
                block = WitnessedBlock(scope, self._recording)
                by_path.setdefault(path, {})[children] = block
                self._tried.append((path, children))
        for path, blocks in by_path.items():
            self._attach(modules[path], SequentialRuntime(blocks))

    def _untried(self, blocks: Sequence[Block]) -> Iterator[Exclusion]:
        """The blocks that were not recomputed: nobody has seen whether they repeat themselves."""
        whole = [path for path, children in self._tried if not children]
        for block in blocks:
            is_inside = any(f"{block.path}.".startswith(f"{path}.") for path in whole)
            tried = {name for path, names in self._tried if path == block.path for name in names}
            module = self._step.model.get_submodule(block.path)
            names = block.children or tuple(name for name, _ in module.named_children())
            if not is_inside and not (tried and tried.issuperset(names)):
                reason = "it was not recomputed in the first step"
                yield Exclusion(block.path, block.children, Engine.REPLAY, reason)

    def _attach(self, module: torch.nn.Module, runner: WitnessedBlock | SequentialRuntime) -> None:
        attach(module, runner)
        self._open.callback(detach, module)

    def _out_of_memory(self, recording: LiveRecording, op: str) -> BudgetError:
        device = self._step.device
        live: Counter[str] = Counter()
        for number, nbytes in enumerate(recording.nbytes):
            if number not in recording.deaths:
                category = recording.categories.get(number)
                live[category.value if category else "activation"] += nbytes
        live["other"] += self._other_bytes
        level = total = sum(live.values())
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
        return BudgetError(total, level, op=op, breakdown=tuple((+live).items()), is_least=False)


def _may_repeat(module: torch.nn.Module) -> bool:
    """Whether a block can be recomputed unseen.

    Recurrent layers leave a workspace whose unused bytes are never the same; `fit` tells such
    blocks in a dry run.
    """
    has_cells = any(isinstance(inner, torch.nn.RNNBase) for inner in module.modules())
    return can_attach(module) and not has_cells
