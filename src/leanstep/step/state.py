"""Run training steps on a model and leave no trace.

Everything a step can change is noted before and put back after, also when the step raises:
parameters, buffers, gradients, optimizer state and settings, attributes of modules and of the
optimizer with what their collections hold, modes, the batch, and every random state. Copies go to
host memory: on the device they would break the very budget that is being measured. The optimizer's
step hooks are silent meanwhile.

Out of reach is what lives outside model, batch and optimizer: files, and objects of other classes.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from leanstep.step.generators import HeldGenerators
from leanstep.step.training import TrainingStep
from leanstep.torch_private.modules import optimizer_hooks
from leanstep.torch_private.tensors import tree_leaves

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_COLLECTIONS = (list, deque, set, *_MAPPINGS)
_MODULE_OWN = frozenset(vars(torch.nn.Module()))


@contextmanager
def untouched(step: TrainingStep) -> Iterator[None]:
    """Put back everything that steps change, when the block ends."""
    with ExitStack() as stack:
        for restore in _snapshots(step):
            stack.callback(restore)
        yield


@contextmanager
def structure_untouched(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put back which tensors modules hold, when the block ends.

    For steps on stand-ins, which write no real tensor: nothing is copied.
    """
    with ExitStack() as stack:
        for module in modules:
            for restore in _structure(module):
                stack.callback(restore)
        yield


@contextmanager
def hooks_silent(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep step hooks from running, this optimizer's and those of all, inside the block."""
    restore = _silence(optimizer)
    try:
        yield
    finally:
        restore()


@contextmanager
def random_state_untouched() -> Iterator[None]:
    """Put back the random states of the host, when the block ends."""
    with ExitStack() as stack:
        for restore in _random_states(torch.device("cpu")):
            stack.callback(restore)
        yield


def _snapshots(step: TrainingStep) -> Iterator[Callable[[], None]]:
    # Restored in reverse: contents come back before the gradients that were set aside.
    yield from _random_states(step.device)
    yield _held_generators(step.model)
    for module in step.model.modules():
        yield from _attributes(module)
    if step.optimizer is not None:
        yield from _settings(step.optimizer)
        yield _silence(step.optimizer)
    yield _set_aside_gradients(step)
    yield _set_aside_batch_gradients(step)
    yield _contents(step.parameters())
    yield _contents(step.model.buffers())
    yield _contents(x for x in tree_leaves(step.batch) if isinstance(x, torch.Tensor))


def _contents(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Note the contents of tensors."""
    noted = [(tensor, tensor.data, _memory(tensor)) for tensor in tensors]
    copies = [(*entry, entry[2].to("cpu", copy=True)) for entry in noted]

    def restore() -> None:
        for tensor, data, memory, copy in copies:
            if tensor.layout is torch.strided and tensor.data_ptr() != data.data_ptr():
                # `tensor.data = ...` gave it another memory.
                tensor.data = data
            # What nobody wrote is not written here either: it may be read-only.
            is_plain = memory.device.type == "cpu" and memory.layout is torch.strided
            if not is_plain or not torch.equal(memory, copy):
                memory.copy_(copy)

    return restore


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that can be copied to; an expanded one has elements that share their memory."""
    data = tensor.detach()
    if data.layout is not torch.strided or data.numel() == 0:
        return data
    pairs = zip(data.shape, data.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs)
    return data.as_strided((extent,), (1,)) if data.numel() > extent else data


def _set_aside_gradients(step: TrainingStep) -> Callable[[], None]:
    """Start from gradients None, or from zeros where they are to be kept."""
    noted = [(parameter, parameter.grad) for parameter in step.parameters()]
    present = [gradient for _, gradient in noted if gradient is not None]
    if step.gradients_kept:
        contents = _contents(present)
        for parameter, gradient in noted:
            if gradient is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    else:
        contents = _move_to_host(present)
        for parameter, _ in noted:
            parameter.grad = None

    def restore() -> None:
        for parameter, gradient in noted:
            parameter.grad = gradient
        contents()

    return restore


def _move_to_host(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Free the device of tensors for a while; views of something larger stay where they are."""
    moved = [
        (tensor, tensor.device)
        for tensor in tensors
        if tensor.device.type != "cpu"
        and tensor.layout is torch.strided
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    ]
    for tensor, _ in moved:
        tensor.data = tensor.data.cpu()

    def restore() -> None:
        for tensor, device in moved:
            tensor.data = tensor.data.to(device)

    return restore


def _set_aside_batch_gradients(step: TrainingStep) -> Callable[[], None]:
    noted = [(leaf, leaf.grad) for leaf in step.batch_leaves()]
    for leaf, _ in noted:
        leaf.grad = None

    def restore() -> None:
        for leaf, gradient in noted:
            leaf.grad = gradient

    return restore


def _settings(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], None]]:
    """Note an optimizer's state, its groups and its attributes."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    noted = _Collected([optimizer.state, optimizer.param_groups, *vars(optimizer).values()])
    yield _contents(tensor for tensor in noted.tensors if id(tensor) not in own)
    yield noted.restore
    yield _variables(optimizer)


def _silence(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    noted = [(hooks, dict(hooks)) for hooks in optimizer_hooks(optimizer)]
    for hooks, _ in noted:
        hooks.clear()

    def restore() -> None:
        for hooks, copy in noted:
            _refill(hooks, copy)

    return restore


def _attributes(module: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Note a module's mode, its own dictionaries, and the attributes that its class gave it."""
    others = {name: value for name, value in vars(module).items() if name not in _MODULE_OWN}
    yield _contents(_Collected(others.values()).tensors)
    yield from _structure(module)


def _structure(module: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """Note which objects a module holds, not what is in its tensors."""
    own = {name: value for name, value in vars(module).items() if name in _MODULE_OWN}
    others = {name: value for name, value in vars(module).items() if name not in _MODULE_OWN}
    yield _Collected(others.values()).restore
    # Parameters and buffers by name, children, hooks: who they are; contents are noted elsewhere.
    yield _Collected(own.values()).restore
    yield _variables(module)


def _variables(owner: object) -> Callable[[], None]:
    """Note which attributes an object has, and which objects they are."""
    own, noted = vars(owner), dict(vars(owner))

    def restore() -> None:
        for name in [name for name in own if name not in noted]:
            del own[name]
        own.update(noted)

    return restore


class _Collected:
    """The collections in some values, those inside others included, and the tensors they hold."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        pending = list(values)
        while pending:
            value = pending.pop()
            if isinstance(value, torch.Tensor):
                self.tensors.append(value)
            elif isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            elif type(value) is tuple:
                pending.extend(value)
            elif type(value) in _COLLECTIONS and id(value) not in self._copies:
                self._copies[id(value)] = (value, _plain_copy(value))
                pending.extend(value.values() if isinstance(value, dict) else value)

    def restore(self) -> None:
        """Let every collection hold again what it held."""
        for collection, copy in self._copies.values():
            _refill(collection, copy)
        for generator, state in self._generators:
            generator.set_state(state)


def _plain_copy(collection: Any) -> Any:
    if isinstance(collection, dict):
        return dict(collection)
    return set(collection) if isinstance(collection, set) else list(collection)


def _refill(collection: Any, copy: Any) -> None:
    if _holds_the_same(collection, copy):
        return
    collection.clear()
    add = collection.extend if isinstance(collection, (list, deque)) else collection.update
    add(copy)


def _holds_the_same(collection: Any, copy: Any) -> bool:
    """Whether a collection holds the very objects it held, in the same order."""
    if len(collection) != len(copy):
        return False
    if isinstance(collection, dict) and not _holds_the_same(
        list(collection.values()), list(copy.values())
    ):
        return False
    return all(a is b for a, b in zip(collection, copy, strict=True))


def _held_generators(model: torch.nn.Module) -> Callable[[], None]:
    generators = HeldGenerators(model.modules(), torch_too=True)
    states = generators.states()
    return lambda: generators.set_states(states)


def _random_states(device: torch.device) -> Iterator[Callable[[], None]]:
    cpu = torch.get_rng_state()
    yield lambda: torch.set_rng_state(cpu)
    if device.type == "cuda":
        cuda = torch.cuda.get_rng_state(device)
        yield lambda: torch.cuda.set_rng_state(cuda, device)
    python = random.getstate()
    yield lambda: random.setstate(python)
    if (numpy := sys.modules.get("numpy")) is not None:
        legacy = numpy.random.get_state()
        yield lambda: numpy.random.set_state(legacy)
