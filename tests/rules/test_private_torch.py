"""Names of torch that begin with an underscore are used in the folder torch_private alone.

They change between versions of torch; a file there says what each is for.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "leanstep"
HOME = PACKAGE / "torch_private"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != HOME)


def is_private(dotted: str) -> bool:
    """Tell whether a part of a dotted name is private; `__version__` and its like are not."""
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


def private_names(tree: ast.AST) -> set[str]:
    """Return the private names of torch that some code imports or reaches by attributes."""
    aliases = dict(torch_aliases(tree))
    imported = {full for full in aliases.values() if is_private(full)}
    imported.update(full for full in plain_imports(tree) if is_private(full))
    reached = set()
    for node in ast.walk(tree):
        full = full_name(node, aliases)
        if full and is_private(full):
            reached.add(full)
    return imported | reached


def torch_aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (local name, full name) for each name that an import binds to a part of torch."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] == "torch":
                        yield alias.asname or "torch", alias.name if alias.asname else "torch"
            case ast.ImportFrom(module=str(module), names=names, level=0):
                if module.split(".")[0] == "torch":
                    yield from (
                        (alias.asname or alias.name, f"{module}.{alias.name}") for alias in names
                    )


def plain_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (a.name for a in names if a.name.split(".")[0] == "torch")
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if name.startswith("torch."):
                # importlib.import_module("torch._x") and its like
                yield name


def full_name(node: ast.AST, aliases: dict[str, str]) -> str | None:
    """Return `torch.a.b` for a chain of attributes that starts at a name bound to torch."""
    match node:
        case ast.Name(id=name):
            return aliases.get(name)
        case ast.Attribute(value=value, attr=attr):
            base = full_name(value, aliases)
            return f"{base}.{attr}" if base else None
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr" | "setattr"),
            args=[value, ast.Constant(value=str(attr)), *_],
        ):
            base = full_name(value, aliases)
            return f"{base}.{attr}" if base else None
    return None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_used_in_one_folder(path: Path) -> None:
    found = private_names(ast.parse(path.read_text(encoding="utf-8")))

    assert not found, f"import {sorted(found)} in torch_private, and say there what it is for"


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch._dynamo as dynamo",
        "import torch.utils._pytree as pytree",
        "from torch._C import Graph",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.autograd.graph import _saved",
        "import torch\ntorch._C.something()",
        "import torch as t\nt.Tensor._make_subclass",
        "from torch import nn\nnn.Module._call_impl",
        "import torch.nn.functional as F\nF._verify",
        "import torch\ngetattr(torch, '_foreach_add_')",
        "import torch\ngetattr(torch.ops, '_c10d').thing",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "def late():\n    from torch._guards import x",
    ],
)
def test_rule_finds(text: str) -> None:
    assert private_names(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten.add_",
        "import torch\ntorch.nn.init.normal_",
        "from leanstep.torch_private.modes import DispatchMode\nDispatchMode._enter",
        "class A:\n    def f(self):\n        return self._torch",
    ],
)
def test_rule_leaves_alone(text: str) -> None:
    assert not private_names(ast.parse(text))
