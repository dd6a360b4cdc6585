"""Run training steps on a model and leave no trace.

Everything a step can change is noted before and put back after, also when the step raises:
parameters, buffers, gradients, optimizer state and settings, plain attributes of modules, modes,
the batch, and every random state. Copies go to host memory: on the device they would break the
very budget that is being measured. The optimizer's step hooks are silent meanwhile.
"""

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from leanstep.step import TrainingStep
from leanstep.torch_private import optimizer_hooks, tree_leaves

_PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, frozenset)
_MODULE_OWN = frozenset(vars(torch.nn.Module())) - {"training"}


@contextmanager
def untouched(step: TrainingStep) -> Iterator[None]:
    """Put back everything that steps change, when the block ends."""
    with ExitStack() as stack:
        for restore in _snapshots(step):
            stack.callback(restore)
        yield


def _snapshots(step: TrainingStep) -> Iterator[Callable[[], None]]:
    # Restored in reverse: contents come back before the gradients that were set aside.
    yield from _random_states(step.device)
    yield from (_attributes(module) for module in step.model.modules())
    if step.optimizer is not None:
        yield _silence(step.optimizer)
        yield _groups(step.optimizer)
        yield _optimizer_state(step.optimizer)
    yield _set_aside_gradients(step)
    yield _contents([p.detach() for p in step.parameters()])
    yield _contents(list(step.model.buffers()))
    yield _contents([x for x in tree_leaves(step.batch) if isinstance(x, torch.Tensor)])


def _contents(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Note the contents of tensors, one copy for each storage."""
    copies = [(tensor.data, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    def restore() -> None:
        for tensor, copy in copies:
            tensor.copy_(copy)

    return restore


def _set_aside_gradients(step: TrainingStep) -> Callable[[], None]:
    """Start from gradients None, or from zeros where they are to be kept."""
    noted = []
    for parameter in step.parameters():
        gradient = parameter.grad
        data = None if gradient is None else gradient.data
        noted.append((parameter, gradient, None if data is None else data.to("cpu", copy=True)))
        if gradient is not None and gradient.device.type != "cpu" and not step.gradients_kept:
            gradient.data = gradient.data.cpu()
        if not step.gradients_kept:
            parameter.grad = None
        elif gradient is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)

    def restore() -> None:
        for parameter, gradient, copy in noted:
            if gradient is not None and copy is not None:
                if gradient.device != parameter.device:
                    gradient.data = copy.to(parameter.device)
                gradient.data.copy_(copy)
            parameter.grad = gradient

    return restore


def _optimizer_state(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    noted = {
        parameter: (dict(entry), _contents([v for v in entry.values() if _is_tensor(v)]))
        for parameter, entry in optimizer.state.items()
    }

    def restore() -> None:
        for parameter in list(optimizer.state):
            if parameter not in noted:
                del optimizer.state[parameter]
        for parameter, (entry, contents) in noted.items():
            optimizer.state[parameter].clear()
            optimizer.state[parameter].update(entry)
            contents()

    return restore


def _groups(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    noted = [(group, dict(group)) for group in optimizer.param_groups]
    tensors = [v for group in optimizer.param_groups for v in group.values() if _is_tensor(v)]
    contents = _contents(tensors)

    def restore() -> None:
        for group, copy in noted:
            group.clear()
            group.update(copy)
        contents()

    return restore


def _silence(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    noted = [(hooks, dict(hooks)) for hooks in optimizer_hooks(optimizer)]
    for hooks, _ in noted:
        hooks.clear()

    def restore() -> None:
        for hooks, copy in noted:
            hooks.clear()
            hooks.update(copy)

    return restore


def _attributes(module: torch.nn.Module) -> Callable[[], None]:
    """Note a module's mode, buffers and plain attributes, and what its collections hold."""
    own = vars(module)
    noted = {name: value for name, value in own.items() if name not in _MODULE_OWN}
    buffers = dict(module.named_buffers(recurse=False))
    collections = [
        (value, type(value)(value))
        for value in noted.values()
        if type(value) in (list, dict, set, deque)
    ]
    contents = _contents([value for value in noted.values() if _is_tensor(value)])

    def restore() -> None:
        for name in [name for name in own if name not in _MODULE_OWN and name not in noted]:
            del own[name]
        own.update(noted)
        for name, buffer in buffers.items():
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
        for collection, copy in collections:
            _refill(collection, copy)
        contents()

    return restore


def _refill(collection: Any, copy: Any) -> None:
    if len(collection) == len(copy) and all(a is b for a, b in zip(collection, copy, strict=True)):
        return
    collection.clear()
    add = collection.extend if isinstance(collection, (list, deque)) else collection.update
    add(copy)


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


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
