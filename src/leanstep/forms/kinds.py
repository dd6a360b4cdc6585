"""The kinds of blocks of a step, each with the arguments of one real call.

Blocks are of one kind where the compiler would make the same program of them: same classes, printed
the same, same parameters, modes and arguments. What is overlooked costs a second capture, no more:
Dynamo checks all that its program depends on.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from leanstep.engines.inductor import subject_of
from leanstep.ir import Block, Profile
from leanstep.recorder import in_host_memory
from leanstep.step.training import TrainingStep
from leanstep.torch_private.tensors import tree_flatten, tree_leaves, tree_map, tree_unflatten

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, eq=False)
class Example:
    """One real call of a block: what it is called with, and the modes that it is called in."""

    module: torch.nn.Module
    children: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @property
    def subject(self) -> tuple[Any, Callable[..., Any]]:
        """What compiled code gets in place of `self`, and the function that it runs."""
        return subject_of(self.module, self.children)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The modules that run."""
        subject, _ = self.subject
        return subject if self.children else (subject,)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that get a gradient, each once."""
        own = (p for module in self.modules for p in module.parameters() if p.requires_grad)
        return list({id(parameter): parameter for parameter in own}.values())

    def arguments(self) -> list[torch.Tensor]:
        """The tensors it is called with."""
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Autocast as it was."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


@dataclass
class Sighting:
    """A kind of block: one call, and the numbers of the blocks that are of it.

    The call's tensors are in host memory: where the step runs there may be no room for those of all
    kinds.
    """

    name: str
    call: Example
    blocks: list[int] = field(default_factory=list)
    objection: str = ""

    def example(self) -> Example:
        """The call, with its tensors where they were."""
        args, kwargs = tree_map(_fetched, (self.call.args, self.call.kwargs))
        return replace(self.call, args=args, kwargs=kwargs)


@dataclass(frozen=True, eq=False)
class _Stored:
    """A tensor in host memory, and where it belongs."""

    tensor: torch.Tensor
    device: torch.device
    requires_grad: bool


def find_kinds(step: TrainingStep, profile: Profile) -> list[Sighting]:
    """Run forward once and look at the arguments of every block; leaves traces."""
    finder = _Finder(profile)
    room = nullcontext() if profile.fits_device else in_host_memory()
    with finder.watching(step.model), room:
        step.compute_loss()
    return list(finder.found.values())


class _Finder:
    def __init__(self, profile: Profile) -> None:
        self.found: dict[Hashable, Sighting] = {}
        self._blocks: dict[str, list[tuple[int, Block]]] = {}
        for number, block in enumerate(profile.blocks):
            self._blocks.setdefault(_entrance(block), []).append((number, block))
        self._calls: dict[str, int] = {}

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        modules = dict(model.named_modules())
        with ExitStack() as stack:
            for path, blocks in self._blocks.items():
                owner = modules[blocks[0][1].path]
                handle = modules[path].register_forward_pre_hook(
                    self._hook(path, owner), with_kwargs=True
                )
                stack.callback(handle.remove)
            yield

    def _hook(self, path: str, owner: torch.nn.Module) -> Callable[..., None]:
        def see(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                return
            occurrence = self._calls.get(path, 0)
            self._calls[path] = occurrence + 1
            for number, block in self._blocks[path]:
                if block.occurrence == occurrence:
                    self._see(number, block, owner, args, kwargs)

        return see

    def _see(
        self,
        number: int,
        block: Block,
        owner: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        autocast = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
        )
        leaves, shape = tree_flatten((args, kwargs))
        example = Example(owner, block.children, args, kwargs, autocast)
        modules = tuple(_module_look(module) for module in example.modules)
        key = (modules, str(shape), tuple(map(_look, leaves)), autocast)
        if key not in self.found:
            own_args, own_kwargs = tree_unflatten([_stored(leaf) for leaf in leaves], shape)
            call = replace(example, args=own_args, kwargs=own_kwargs)
            strange = [type(leaf).__name__ for leaf in leaves if not _is_plain(leaf)]
            objection = f"one of its arguments is a {strange[0]}" if strange else ""
            # The same in every process: a plan finds its compiled forms again by it.
            name = f"{block.class_name} {hashlib.sha256(repr(key).encode()).hexdigest()[:6]}"
            self.found[key] = Sighting(name, call, objection=objection)
        self.found[key].blocks.append(number)


def _entrance(block: Block) -> str:
    """The module whose call begins a block."""
    if not block.children:
        return block.path
    return f"{block.path}.{block.children[0]}".removeprefix(".")


def _module_look(module: torch.nn.Module) -> Hashable:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    looks = tuple((name, _look(tensor)) for name, tensor in tensors)
    # What a module prints says all that its layers were made with.
    return type(module), repr(module), looks, tuple(inner.training for inner in module.modules())


def _look(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return tuple(leaf.shape), strides, leaf.dtype, str(leaf.device), leaf.requires_grad
    return (type(leaf).__name__, repr(leaf) if isinstance(leaf, _PLAIN) else "")


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, *_PLAIN))


def _stored(leaf: Any) -> Any:
    """A copy of a tensor, without its history: the step goes on with the original."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().to("cpu", copy=True)
    return _Stored(copy, leaf.device, leaf.requires_grad)


def _fetched(leaf: Any) -> Any:
    if not isinstance(leaf, _Stored):
        return leaf
    return leaf.tensor.to(leaf.device).requires_grad_(leaf.requires_grad)
