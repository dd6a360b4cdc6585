"""Say cheaply whether a block call is like one that was recorded.

Compared on every call: the tensor arguments' shapes, strides, dtypes, devices and which of them
share a storage, the other arguments, the plain attributes, hooks and children of the block's
modules, where their own generators of random numbers stand, which parameters and buffers are
there, which parameters want gradients, torch's modes, and whatever the user's functions name that
ran in the calls so far: globals, closures, defaults, attributes of objects and of classes.
"""

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from leanstep.engines.looks import PLAIN, Looks, UncacheableError
from leanstep.engines.reach import Executed, Reach, is_users
from leanstep.engines.settings import settings_now
from leanstep.step.generators import HeldGenerators
from leanstep.torch_private.modules import HOOK_GROUPS, global_hooks
from leanstep.torch_private.tensors import storage_address, tree_flatten

MISSING = object()
_MODULE_OWN = frozenset(vars(nn.Module()))


def call_key(
    args: tuple[Any, ...], kwargs: dict[str, Any], kinds: set[type] | None = None
) -> tuple[Any, list[torch.Tensor]]:
    """What a call's arguments and torch's modes look like, and its tensor arguments.

    Objects (a cache of keys and values, say) are looked into where their `kinds` are collected.
    The call may change them: whoever means to run it a second time must not ask for that.
    """
    leaves, structure = flat_call(args, kwargs)
    tensors: list[torch.Tensor] = []
    looks: list[Any] = []
    first_with: dict[int, int] = {}
    objects: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            # Two arguments with one storage are two sources in a call where they are not.
            alias = first_with.setdefault(storage_address(leaf), len(tensors))
            looks.append((_tensor_look(leaf), alias))
            tensors.append(leaf)
        elif isinstance(leaf, (*PLAIN, torch.dtype, torch.device)):
            # True equals 1 and 1 equals 1.0, but an op may treat them differently.
            looks.append((type(leaf), leaf))
        elif kinds is not None:
            objects.append(leaf)
        else:
            raise UncacheableError(type(leaf).__name__)
    if kinds is not None:
        looks.extend(Looks(None, kinds, apart_from=first_with).of(leaf) for leaf in objects)
    return (structure, tuple(looks), _modes()), tensors


def flat_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments, and how they are nested.

    Most calls get tensors and plain values alone, and torch's own flattening takes ten times as
    long to find that out.
    """
    leaves = [*args, *kwargs.values()]
    if all(map(_is_leaf, leaves)):
        return leaves, (len(args), *kwargs)
    return tree_flatten((args, kwargs))


def _is_leaf(argument: Any) -> bool:
    return isinstance(argument, (torch.Tensor, *PLAIN))


def _tensor_look(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        raise UncacheableError(type(tensor).__name__)
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        settings_now(),
        # These choose between the ops that attention is made of.
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


class Watch:
    """All that the ops of a block's calls can depend on, beside the arguments.

    `kinds` are the classes of objects among these.
    """

    def __init__(
        self, modules: list[nn.Module], executed: Executed, kinds: Iterable[type] = ()
    ) -> None:
        self.modules = modules
        reach = Reach([*modules, *kinds], executed)
        self.missing = reach.missing
        self.looks = Looks(None if executed.any_name else reach.names)
        self.owners = [vars(module) for module in modules]
        self.generators = HeldGenerators(modules)
        named = list(reach.globals.values())
        self.may_draw = any(_name_of(own.get(name)) in ("random", "numpy") for own, name in named)
        self.methods = list(reach.methods.values())
        self.cells = list(reach.cells.values())
        self.functions = list(reach.functions.values())
        self.places: list[tuple[Mapping[str, Any], str]] = []
        for module, own in zip(modules, self.owners, strict=True):
            of_user = is_users(type(module).__module__)
            for name, value in own.items():
                # Of what torch's own modules hold, their ops depend on nothing but plain values.
                is_read = of_user and (executed.any_name or name in reach.names)
                is_watched = is_read or _is_plain_in_torch(value)
                if isinstance(value, PLAIN) or (is_watched and name not in _MODULE_OWN):
                    self.places.append((own, name))
            # Code may ask whether a buffer is there, how large it is, and of which type.
            buffers = own["_buffers"] if of_user else {}
            read = (name for name in buffers if executed.any_name or name in reach.names)
            self.places.extend((buffers, name) for name in read)
        self.places.extend(named)

    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers of the modules."""
        return [
            tensor
            for own in self.owners
            for group in (own["_parameters"], own["_buffers"])
            for tensor in group.values()
            if tensor is not None
        ]

    @property
    def fires_hooks(self) -> bool:
        """Whether a module inside the block has hooks."""
        inner = self.owners[1:]
        return any(own["_forward_hooks"] or own["_forward_pre_hooks"] for own in inner)

    @property
    def counts_batches(self) -> bool:
        """Whether a module has running statistics, which are written without a trace."""
        return any(own["_buffers"].get("running_mean") is not None for own in self.owners)

    def state(self) -> list[Any]:
        """What is watched as it is now; compare two with `same`."""
        of = self.looks.of
        state = [of(own.get(name, MISSING)) for own, name in self.places]
        # A method may be put in the place of another, a module may be given another class.
        state.extend(own.get(name) for own, name in self.methods)
        state.extend(map(type, self.modules))
        state.extend(map(of, self.cells))
        state.extend(of(function.__defaults__) for function in self.functions)
        state.extend(of(function.__kwdefaults__) for function in self.functions)
        state.extend(self.generators.states())
        state.extend(map(tuple, global_hooks()))
        for own in self.owners:
            state.append(len(own))
            # Those of backward make forward pass its tensors through a function of torch's.
            state.extend(tuple(own[group]) for group in HOOK_GROUPS)
            state.extend(map(id, own["_modules"].values()))
            # One that is not there computes otherwise than one that wants no gradient.
            parameters = own["_parameters"].values()
            state.append([None if p is None else p.requires_grad for p in parameters])
            state.append([buffer is None for buffer in own["_buffers"].values()])
        return state


def same(old: list[Any], new: list[Any]) -> bool:
    """Whether two states are equal, types included."""
    if old is new:
        return True
    if len(old) != len(new):
        return False
    return all(a is b or (type(a) is type(b) and a == b) for a, b in zip(old, new, strict=True))


def _is_plain_in_torch(value: Any) -> bool:
    """Whether a value is a function, or a collection that holds plain values."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, PLAIN) for item in value)
    return callable(value) and not isinstance(value, (nn.Module, torch.Tensor))


def _name_of(value: Any) -> str:
    """The package that a module or a function is from."""
    is_module = isinstance(value, ModuleType)
    name = value.__name__ if is_module else getattr(value, "__module__", "")
    return str(name).partition(".")[0]
