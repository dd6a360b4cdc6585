"""No file over 500 lines, no function over 60 (its docstring not counted)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "examples", "benchmarks")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 60


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name of every function, and its lines less its docstring's."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = num_lines_of(node)
            if ast.get_docstring(node, clean=False) is not None:
                num_lines -= num_lines_of(node.body[0])
            yield f"{node.name} (line {node.lineno})", num_lines


def num_lines_of(node: ast.stmt) -> int:
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_file_is_short(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())

    assert num_lines <= MOST_FILE_LINES, "split it where a reader would start a new page"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_functions_are_short(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))

    long = {name: lines for name, lines in functions(tree) if lines > MOST_FUNCTION_LINES}

    assert not long, "a part of it has a name of its own"


def test_docstring_is_not_counted() -> None:
    text = 'def f(a):\n    """One.\n\n    Two.\n    """\n    return a\n'

    assert list(functions(ast.parse(text))) == [("f (line 1)", 2)]
