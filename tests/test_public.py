"""The names at the top: what an editor completes, what `help` says, what each docstring has."""

import ast
import doctest
import inspect
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp import errors
from tests.ranks import ROOT
from tests.scripts import run_command

FUNCTIONS = [name for name in ucp.__all__ if inspect.isroutine(getattr(ucp, name))]
ERRORS = [
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.UcpError)
]
WITH_DOCUMENT = [*FUNCTIONS, "Mesh", "Target", "ResumableLoader"]
# what the example of a function that needs ranks, a model or a run begins with
_ALONE = re.compile(r"ucp\.(Mesh|Target|register_optimizer)\(")


def test_every_name_is_seen() -> None:
    assert {*ucp.__all__} <= {*dir(ucp)} and not [n for n in dir(ucp) if n in ("core", "Any")]
    assert {*ERRORS} <= {*ucp.__all__} and len(ERRORS) > 12
    assert len(FUNCTIONS) > 20 and {*ucp._HOMES} == {*FUNCTIONS} | {"ResumableLoader", "Target"}
    text = pydoc.plain(pydoc.render_doc(ucp))
    assert all(re.search(rf"\b{name}\b", text) for name in ("attach", "load", "convert", "verify"))
    with pytest.raises(AttributeError, match="no attribute 'atach'"):
        ucp.atach  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_each_name_where_it_is_at_run_time() -> None:
    tree = ast.parse((ROOT / "megatron_ucp" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        alias.name: str(node.module).removeprefix("megatron_ucp.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == ucp._HOMES
    assert (ROOT / "megatron_ucp" / "py.typed").exists()


def faults(kind: Any, text: str) -> list[str]:
    """What a docstring lacks: sections, an argument, an example that is Python."""
    found = [
        f"no section {name}"
        for name in ("Args:", "Returns:", "Raises:", "Example:")
        if f"\n{name}\n" not in text and not (name == "Returns:" and isinstance(kind, type))
    ]
    said = text.partition("Args:\n")[2].partition("\n\n")[0]
    names = [name for name in inspect.signature(kind).parameters if name != "self"]
    found += [f"no argument {name}" for name in names if f"    {name}: " not in f"{said}\n"]
    for example in doctest.DocTestParser().get_examples(text):
        try:
            ast.parse(example.source)
        except SyntaxError:
            found.append(f"no Python: {example.source}")
    return found


@pytest.mark.parametrize("name", WITH_DOCUMENT)
def test_a_docstring_says_everything(name: str) -> None:
    kind = getattr(ucp, name)
    assert faults(kind, inspect.getdoc(kind) or "") == []


def test_a_docstring_that_lacks_something_is_seen() -> None:
    text = inspect.getdoc(ucp.verify) or ""
    assert faults(ucp.verify, text.replace("Raises:\n", "")) == ["no section Raises:"]
    assert faults(ucp.verify, text.replace("    deep: ", "    dep: ")) == ["no argument deep"]
    assert len(faults(ucp.verify, text.replace(">>> import", ">>> imp ort"))) == 1


@pytest.mark.parametrize("name", ["Mesh", "Target", "register_optimizer"])
def test_examples_that_need_nothing_run(name: str) -> None:
    kind = getattr(ucp, name)
    text = inspect.getdoc(kind) or ""
    assert _ALONE.search(text)
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    found = doctest.DocTestRunner().run(test)
    assert found.attempted >= 2 and found.failed == 0


def test_importing_takes_neither_torch_nor_deepspeed() -> None:
    heavy = "{'torch', 'deepspeed'}"
    code = f"import sys, megatron_ucp as u; dir(u); u.Mesh; print({heavy} & {{*sys.modules}})"
    done = run_command([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_results_can_be_asked(tmp_path: Path) -> None:
    """`if ucp.verify(path)` is false for a damaged folder, and the manifest is no flood."""
    from tests.reshard import paper

    folder = paper.write(paper.plain_model({"weight": (4, 3)}), tmp_path / "step7")
    whole = ucp.verify(folder)
    assert whole and whole.ok and whole.raise_if_damaged() is None
    assert len(repr(ucp.describe(folder))) < 300
    for path in folder.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:-40])
    damaged = ucp.verify(folder)
    assert not damaged and not damaged.ok
    assert {one.file for one in damaged.findings} == {str(p) for p in folder.glob("*.pt")}
    with pytest.raises(ucp.DamagedFileError, match=r"(?s)the checkpoint is damaged.*states\.pt"):
        damaged.raise_if_damaged()
