"""Imports point down, and torch stays at the rim.

A layer is a package or a top file of leanstep. A new one is added to MAY_IMPORT, at the place where
it sees the least.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "leanstep"
SOURCES = sorted(PACKAGE.rglob("*.py"))

BASE = {"errors", "units", "stages"}
IR = BASE | {"ir"}
REBUILD = IR | {"rebuild"}
SIMULATOR = REBUILD | {"effects", "chunks", "simulator"}
SOLVERS = SIMULATOR | {"solvers"}
PLANNER = SOLVERS | {"planner"}
DEVICE = REBUILD | {"devices", "torch_private", "eager", "step", "truth"}
RECORDER = DEVICE | {"recorder"}
STAGES = (
    PLANNER
    | RECORDER
    | {"owners", "marks", "profiler", "imagine", "estimator", "engines", "verifier", "reporters"}
    | {"forms", "ranks", "config"}
)

MAY_IMPORT = {
    "errors": BASE,
    "units": BASE,
    "stages": {"stages"},
    "ir": IR,
    "rebuild": REBUILD,
    "effects": REBUILD | {"effects"},
    "chunks": IR,
    "simulator": REBUILD | {"effects", "chunks"},
    "solvers": SOLVERS,
    "planner": PLANNER,
    # A page shows the plan for every budget.
    "reporters": PLANNER | {"reporters"},
    "condense": IR,
    "torch_private": BASE | {"torch_private"},
    "owners": BASE | {"torch_private"},
    "eager": BASE | {"torch_private"},
    "step": IR | {"torch_private", "step"},
    "truth": IR | {"torch_private", "step"},
    "marks": BASE,
    "ranks": IR | {"torch_private"},
    "config": PLANNER,
    "recorder": RECORDER,
    "profiler": RECORDER | {"profiler"},
    "imagine": RECORDER | {"imagine"},
    "estimator": RECORDER | {"owners", "effects", "simulator", "marks", "profiler", "imagine"},
    "engines": RECORDER | {"engines", "chunks"},
    "forms": RECORDER | {"condense", "profiler", "engines", "forms"},
    "verifier": RECORDER | {"simulator", "engines"},
    "devices": BASE | {"devices"},
    "models": BASE | {"devices", "models"},
    "api": STAGES,
    "fitting": STAGES | {"api", "fitting", "lazy"},
    "checkup": PLANNER | RECORDER | {"profiler", "models"},
    "study": STAGES | {"api", "fitting", "models", "study"},
    "cutter": STAGES | {"api"},
    "lazy": STAGES | {"api", "lazy"},
    "testing": PLANNER | {"testing"},
    "__init__": STAGES | {"fitting", "api", "study", "checkup", "cutter", "lazy", "models"},
    "integrations": {"integrations"},
    # The built-in models are a public room of their own.
    "cli": {"cli", "models"},
    "__main__": {"cli"},
}
# They see what a user sees: `import leanstep`, or a public name from it.
GUESTS = {"integrations", "cli", "__main__"}
TORCH = {
    *("torch_private", "eager", "step", "truth", "owners", "marks", "models", "ranks"),
    *("recorder", "profiler", "imagine", "estimator", "engines", "forms", "verifier", "api"),
    *("fitting", "lazy", "cutter", "study", "checkup", "integrations", "testing"),
}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield every import as (module, name); the name is empty for `import module`."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from ((alias.name, "") for alias in aliases)
            case ast.ImportFrom(module=module, names=aliases, level=level):
                yield from (("." * level + (module or ""), alias.name) for alias in aliases)


def imports_of(path: Path) -> set[tuple[str, str]]:
    return set(imports(ast.parse(path.read_text(encoding="utf-8"))))


def is_layer(name: str) -> bool:
    # `import leanstep` has no name: the package itself is no layer.
    is_there = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
    return bool(name) and (name in MAY_IMPORT or is_there)


def layers_in(found: set[tuple[str, str]]) -> set[str]:
    """Return the layers of leanstep that some imports reach into."""
    layers = set()
    for module, name in found:
        parts = module.split(".")
        if parts[0] == "leanstep" and len(parts) > 1:
            layers.add(parts[1])
        elif module == "leanstep" and is_layer(name):
            layers.add(name)
    return layers


def public_names() -> set[str]:
    import leanstep

    return set(leanstep.__all__)


def relative(path: Path) -> str:
    return str(path.relative_to(SRC))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_down(path: Path) -> None:
    layer = layer_of(path)
    assert layer in MAY_IMPORT, f"say in {Path(__file__).name} what {layer!r} may import"

    upward = layers_in(imports_of(path)) - MAY_IMPORT[layer]

    assert not upward, f"{layer} may not import {sorted(upward)}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_are_absolute(path: Path) -> None:
    assert not [module for module, _ in imports_of(path) if module.startswith(".")]


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if layer_of(path) not in GUESTS], ids=relative
)
def test_inner_layers_do_not_import_the_public_face(path: Path) -> None:
    found = imports_of(path)
    bare = {(module, name) for module, name in found if module == "leanstep" and not is_layer(name)}

    assert not bare, "import from the module that defines the name"


def test_guests_see_only_public_names() -> None:
    for path in SOURCES:
        if layer_of(path) in GUESTS:
            names = {name for module, name in imports_of(path) if module == "leanstep" and name}
            names |= attributes_of_leanstep(ast.parse(path.read_text(encoding="utf-8")))

            assert names <= public_names(), relative(path)


def attributes_of_leanstep(tree: ast.AST) -> set[str]:
    """Return every name that some code takes from the package as `leanstep.name`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "leanstep"
    }


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if layer_of(path) not in TORCH], ids=relative
)
def test_torch_stays_at_the_rim(path: Path) -> None:
    assert "torch" not in {module.split(".")[0] for module, _ in imports_of(path)}


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if layer_of(path) in {"ir", "errors", "units"}], ids=relative
)
def test_ir_needs_only_the_standard_library(path: Path) -> None:
    roots = {module.split(".")[0] for module, _ in imports_of(path)}

    assert roots <= {*sys.stdlib_module_names, "leanstep"}


def test_planning_does_not_load_torch() -> None:
    inside = (path for path in SOURCES if layer_of(path) not in TORCH | GUESTS | {"__init__"})
    modules = ", ".join(["sys", *sorted(map(module_of, inside))])
    program = f"import {modules}; sys.exit('torch' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr or f"import {modules} loads torch"


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("import leanstep.ir.graph", {"ir"}),
        ("from leanstep.ir.graph import Graph", {"ir"}),
        ("from leanstep import planner, fit", {"planner"}),
        ("def late():\n    from leanstep.cli import main", {"cli"}),
        ("import torch.nn, json", set()),
        ("import leanstep", set()),
    ],
)
def test_rule_sees_every_form_of_import(text: str, layers: set[str]) -> None:
    assert layers_in(set(imports(ast.parse(text)))) == layers
