"""What Python a block's calls run, and which values that Python names.

A recording may stand for a later call only if nothing that the block's code reads has changed. So
while a call is recorded, the interpreter tells which functions of the user's run and what they
call. Each of them must be found again from the block's modules: as a method, a hook, a global, in
a closure, a collection or an object. Then all that it can read has a place that can be watched.
Where one is not found, or calls what no watch can follow (a clock, an iterator, the environment),
the block is not closed, and every call of it is recorded.
"""

import dis
import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from leanstep.engines.attach import is_planned_class

# Python of these is taken at its word: what it does follows from what it is given, or from modes
# of torch that are compared on their own. Of leanstep, only the models are a user's code.
_OURS = "leanstep."
_USER_LIKE = ("leanstep.models", "leanstep.testing")

# Modules whose functions say nothing but what follows from their arguments.
_PURE = frozenset(
    (
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum"),
        *("functools", "inspect", "itertools", "logging", "math", "numbers", "numpy", "operator"),
        *("re", "string", "textwrap", "torch", "types", "typing", "typing_extensions", "warnings"),
        *("_abc", "_collections", "_collections_abc", "_functools", "_operator", "_sre"),
        "_warnings",
    )
)
_IMPURE_BUILTINS = frozenset(
    ("eval", "exec", "globals", "id", "input", "locals", "next", "open", "vars")
)
_CALLED_BY_TORCH = frozenset(("forward", "__call__"))

# Functions of torch's that read what a tensor holds and have no op that would tell: what they find
# becomes numbers in the code, or in the ops that follow.
_READ_VALUES = frozenset(
    (
        *("tolist", "numpy", "_to_dlpack", "_to_dlpack_versioned", "tensor_split"),
        *("_pack_padded_sequence", "_pad_packed_sequence"),
    )
)
_BY_ANY_NAME = frozenset(("getattr", "hasattr", "delattr", "setattr"))


# What code may ask a tensor that is not looked at: it changes without the tensor.
_UNTOLD = frozenset(("_version", "grad", "grad_fn", "is_leaf"))


def is_torch(module_name: str) -> bool:
    """Whether a module belongs to torch itself."""
    return module_name == "torch" or module_name.startswith("torch.")


def _is_ours(module_name: str) -> bool:
    return module_name.startswith(_OURS) and not module_name.startswith(_USER_LIKE)


def is_users(module_name: str) -> bool:
    """Whether a module is neither torch's, nor ours, nor Python's."""
    if _is_ours(module_name):
        return False
    root = module_name.partition(".")[0]
    # Python writes the constructors of named tuples, and they say what they are given.
    of_python = root in sys.stdlib_module_names or root.startswith("namedtuple_")
    return root == "__main__" or not (is_torch(module_name) or of_python)


class Executed:
    """The user's code that recorded calls of a block ran.

    `reads_values` says that some of it, or torch for it, has read what a tensor holds.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, None] = {}
        self.outside = ""
        self.any_name = self.reads_values = False
        self._known: set[CodeType] = set()

    def copy(self) -> "Executed":
        """What is known now, to go back to."""
        other = Executed()
        other.codes, other._known = dict(self.codes), set(self._known)
        other.outside, other.any_name = self.outside, self.any_name
        return other

    def go_back(self, earlier: "Executed") -> None:
        """Forget what was seen since."""
        self.codes, self._known = earlier.codes, earlier._known
        self.outside, self.any_name = earlier.outside, earlier.any_name
        self.reads_values = earlier.reads_values

    def see(self, frame: FrameType, event: str, arg: Any) -> None:
        """Note a call; the interpreter's profiling calls this."""
        if event == "call":
            if frame.f_code not in self._known and not _is_called_by_collector(frame):
                self._see_python(frame)
        elif event == "c_call":
            if _reads_values(arg):
                # By the user's code, or torch's for NumPy; the recording looks at generators.
                is_ours = _is_ours(str(frame.f_globals.get("__name__", "")))
                self.reads_values |= not is_ours
            if frame.f_code in self.codes:
                self._see_builtin(arg)

    def _see_python(self, frame: FrameType) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if is_users(name):
            self.codes[frame.f_code] = None
        elif not is_torch(name) and not name.startswith(_OURS) and not _is_pure(name):
            if self._is_called_by_user(frame):
                self.outside = name
            # Not known: torch may call it as well, and that says nothing.
            return
        self._known.add(frame.f_code)

    def _is_called_by_user(self, frame: FrameType) -> bool:
        """Whether the user's code calls a function of Python's, maybe through others of them."""
        caller = frame.f_back
        while caller is not None and caller.f_code not in self.codes:
            name = str(caller.f_globals.get("__name__", ""))
            if is_torch(name) or name.startswith(_OURS):
                return False
            caller = caller.f_back
        return caller is not None

    def _see_builtin(self, function: Any) -> None:
        # A function has a module; a method has an owner, be it a class, and one that defines it.
        module, name, owner = function.__module__, function.__name__, function.__self__
        if module is None:
            kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
            module = next((kind for kind in kinds if name in vars(kind)), kinds[0]).__module__
            if not _is_pure(module):
                self.outside = f"{module}.{name}"
        elif module == "builtins":
            self.any_name |= name in _BY_ANY_NAME
            if name in _IMPURE_BUILTINS:
                self.outside = name
        elif not _is_pure(module):
            self.outside = f"{module}.{name}"


def _reads_values(function: Any) -> bool:
    """Whether a function written in C reads a tensor's values past every op."""
    if function.__name__ not in _READ_VALUES:
        return False
    return isinstance(function.__self__, torch.Tensor) or is_torch(function.__module__ or "")


def _is_called_by_collector(frame: FrameType) -> bool:
    """Whether Python's garbage collector calls it, which may happen in the middle of anything."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    caller: FrameType | None = frame if codes else None
    while caller is not None and caller.f_code not in codes:
        caller = caller.f_back
    return caller is not None


class Watched:
    """A forward that runs under the interpreter's profiling; whose it was gets it back."""

    def __init__(self, executed: Executed, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self._executed, self._forward = executed, forward
        self.is_seen = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. A profiler written in C cannot be put back, so nothing is seen beside one."""
        before = sys.getprofile()
        if before is not None and not isinstance(before, (FunctionType, MethodType)):
            return self._forward(*args, **kwargs)
        see = self._executed.see if before is None else _both(self._executed.see, before)
        known, num_imported = self._executed.copy(), len(sys.modules)
        sys.setprofile(see)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self.is_seen = sys.getprofile() is see
            if self.is_seen:
                sys.setprofile(before)
            if len(sys.modules) != num_imported:
                # What an import runs, it runs once: the next call tells what this block runs.
                self._executed.go_back(known)
                self.is_seen = False


def _both(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def see(frame: FrameType, event: str, arg: Any) -> None:
        ours(frame, event, arg)
        theirs(frame, event, arg)

    return see


def _is_pure(module_name: str) -> bool:
    root = module_name.partition(".")[0]
    is_pure = root in _PURE or root.startswith("namedtuple_")
    return is_pure and not module_name.startswith("numpy.random")


class Reach:
    """The functions that ran, found from a block's modules, and the places of what they name."""

    def __init__(self, roots: Iterable[nn.Module | type], executed: Executed) -> None:
        self.executed = executed
        self.names = frozenset[str]().union(*map(names_in, executed.codes))
        self.globals: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.methods: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self.cells: dict[int, CellType] = {}
        self.functions: dict[int, FunctionType] = {}
        self._found: set[CodeType] = set()
        self._pending: list[Any] = []
        self._visited: set[int] = set()
        self._alive: list[Any] = []
        for root in roots:
            self._add(root)
        while self._pending:
            self._visit(self._pending.pop())
        self._alive.clear()

    @property
    def missing(self) -> str:
        """What ran that cannot be watched; empty if the block is closed."""
        if self.executed.outside:
            return self.executed.outside
        if untold := _UNTOLD.intersection(self.names):
            return min(untold)
        for code in self.executed.codes:
            if code not in self._found:
                return code.co_qualname
        return ""

    def _add(self, value: Any) -> None:
        if id(value) not in self._visited and not isinstance(value, _ENDS):
            self._visited.add(id(value))
            self._alive.append(value)
            self._pending.append(value)

    def _visit(self, value: Any) -> None:
        match value:
            case FunctionType():
                self._visit_function(value)
            case type():
                self._visit_class(value)
            case ModuleType():
                if is_users(value.__name__):
                    self._visit_names(vars(value))
            case _:
                self._add_all(_held_by(value))
                self._visit_object(value)

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self._add(value)

    def _visit_function(self, function: FunctionType) -> None:
        self._add(getattr(function, "__wrapped__", None))
        code = function.__code__
        if code not in self.executed.codes:
            if not is_users(function.__module__ or ""):
                # A wrapper of torch's (`no_grad`) or of Python's round a function of the user's.
                self._add_all(function.__closure__ or ())
            return
        self._found.update(_nested(code))
        self.functions[id(function)] = function
        for name in globals_in(code):
            if name in function.__globals__:
                self.globals[id(function.__globals__), name] = (function.__globals__, name)
                self._add(function.__globals__[name])
        for cell in function.__closure__ or ():
            self.cells[id(cell)] = cell
            self._add(cell)
        self._add_all(function.__defaults__ or ())
        self._add_all((function.__kwdefaults__ or {}).values())

    def _visit_class(self, kind: type) -> None:
        for parent in kind.__mro__:
            if is_users(parent.__module__) and not is_planned_class(parent):
                for name, value in vars(parent).items():
                    self._add(value)
                    if name in self.names or name in _CALLED_BY_TORCH:
                        places = self.methods if callable(value) else self.globals
                        places[id(parent), name] = (vars(parent), name)

    def _visit_names(self, own: Mapping[str, Any]) -> None:
        for name in self.names.intersection(own):
            if not name.startswith("__"):
                self.globals[id(own), name] = (own, name)
                self._add(own[name])

    def _visit_object(self, value: Any) -> None:
        self._visit_class(type(value))
        self._add(getattr(value, "__wrapped__", None))
        # Torch's modules call what they hold by names of their own.
        by_any_name = self.executed.any_name or is_torch(type(value).__module__)
        self._add_all(named_parts(value, None if by_any_name else self.names).values())
        if isinstance(value, nn.Module):
            self._add_all(hooks_of(value))


def _held_by(value: Any) -> Iterable[Any]:
    """What a collection holds, or a thing that stands for a function."""
    match value:
        case property():
            return (value.fget, value.fset, value.fdel)
        case staticmethod() | classmethod() | MethodType():
            return (value.__func__, getattr(value, "__self__", None))
        case functools.partial():
            return (value.func, *value.args, *value.keywords.values())
        case dict():
            return list(value.values())
        case list() | tuple() | set() | frozenset():
            return list(value)
        case CellType():
            return contents(value)
    return ()


# What leads to no function.
_ENDS = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(BuiltinFunctionType, CodeType, torch.Tensor, torch.dtype, torch.device),
)


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The forward hooks of a module."""
    own = vars(module)
    for group in ("_forward_pre_hooks", "_forward_hooks"):
        yield from own[group].values()


def named_parts(value: Any, names: Collection[str] | None) -> dict[str, Any]:
    """The attributes of an object that code may name; all of them where any name is possible."""
    own = dict(getattr(value, "__dict__", ()))
    if isinstance(value, nn.Module):
        own = {**own, **own.pop("_modules"), **own.pop("_parameters"), **own.pop("_buffers")}
        own = {name: part for name, part in own.items() if name not in _MODULE_OWN}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in own and hasattr(value, slot):
                own[slot] = getattr(value, slot)
    return own if names is None else {name: own[name] for name in own if name in names}


_MODULE_OWN = frozenset(vars(nn.Module()))


def contents(cell: CellType) -> tuple[Any, ...]:
    """What a cell holds: one value, or none yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names that code and the functions inside it use, and the words it might use as names."""
    words = {constant for constant in code.co_consts if isinstance(constant, str)}
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names) | words | frozenset[str]().union(*map(names_in, inner))


@functools.lru_cache(maxsize=4096)
def globals_in(code: CodeType) -> frozenset[str]:
    """The global names that code and the functions inside it use."""
    return frozenset(
        str(step.argval)
        for inner in _nested(code)
        for step in dis.get_instructions(inner)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
