"""The package does not grow by itself: a larger number in tests/size.toml is a decision."""

import ast
import tomllib
from pathlib import Path

import pytest

from tests.ranks import ROOT

PACKAGE = ROOT / "megatron_ucp"
MOST = 1.01  # of a number
NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def lines(folder: Path) -> int:
    """All lines of the modules."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def nodes(folder: Path) -> int:
    """Syntax nodes without docstrings and annotations: longer lines don't make them fewer."""
    return sum(_nodes(ast.parse(path.read_text())) for path in folder.rglob("*.py"))


def _nodes(tree: ast.AST) -> int:
    for node in ast.walk(tree):
        if isinstance(node, NAMED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(0)
    return sum(1 for _ in ast.walk(tree))


@pytest.mark.parametrize("count", [lines, nodes], ids=["lines", "nodes"])
def test_the_package_is_no_larger_than_was_decided(count: object) -> None:
    assert callable(count)
    size = tomllib.loads((ROOT / "tests" / "size.toml").read_text())[count.__name__]
    found = count(PACKAGE)
    assert found <= size * MOST, f"{found:,}: what went for it? (tests/size.toml)"
    assert found >= size * 0.95, f"{found:,} is far below {size:,}: take the new number"


def test_what_is_counted(tmp_path: Path) -> None:
    """Negative control: a statement is seen, a docstring and a line break are not."""
    module = tmp_path / "module.py"
    module.write_text("def f(a: int) -> int:\n    return a\n")
    bare = nodes(tmp_path)
    module.write_text('def f(\n    a: int,\n) -> int:\n    """Docs."""\n    return a\n')
    assert (nodes(tmp_path), lines(tmp_path)) == (bare, 5)
    module.write_text("def f(a: int) -> int:\n    a += 1\n    return a\n")
    assert nodes(tmp_path) > bare
