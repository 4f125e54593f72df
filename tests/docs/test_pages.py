"""README and docs: links lead somewhere, examples in Python fit the API, the language is plain."""

import ast
import inspect
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import megatron_ucp as ucp
from pretrain import flags
from tests.docs import console, generated, support
from tests.docs.pages import (
    GENERATED,
    LANGUAGES,
    ROOT,
    Block,
    all_pages,
    anchors_of,
    blocks_of,
    language_faults,
    link_faults,
    sentences,
)

README_LINES, CHANGELOG_LINES = 150, 40
HISTORY = ("CHANGELOG.md",)
OTHER = "tests/test_setup.py::test_another_python_is_refused_with_the_versions_that_fit"


def python_faults(block: Block) -> Iterator[str]:
    """Syntax; names of `ucp`; keywords of its functions."""
    try:
        tree = ast.parse("\n".join(block.lines))
    except SyntaxError as error:
        yield f"line {block.line + (error.lineno or 1) - 1}: {error.msg}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ucp":
            if not hasattr(ucp, node.attr):
                yield f"line {block.line + node.lineno - 1}: there is no ucp.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("ucp."):
            yield from keyword_faults(block, node)


def keyword_faults(block: Block, call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func).removeprefix("ucp.")
    function = getattr(ucp, name, None)
    if not callable(function):
        return
    known = inspect.signature(function).parameters
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    for keyword in call.keywords:
        if keyword.arg and keyword.arg not in known:
            yield f"line {block.line + call.lineno - 1}: ucp.{name} takes no {keyword.arg}="
    places = [one for one in known.values() if one.kind is not one.KEYWORD_ONLY]
    if len(call.args) > len(places):
        yield f"line {block.line + call.lineno - 1}: ucp.{name} takes {len(places)} by position"


def block_faults(block: Block) -> Iterator[str]:
    """Of what is not run: the language, the comment before it, what can be read without running."""
    if block.language not in LANGUAGES:
        yield f"line {block.line}: a block of {block.language or 'no language'}"
    if console.is_elsewhere(block):
        yield from console.comment_faults(block)
    if block.language == "python":
        yield from python_faults(block)
    readers = {"json": json.loads, "toml": tomllib.loads}
    if block.language in readers:
        try:
            readers[block.language]("\n".join(block.lines))
        except ValueError as error:
            yield f"line {block.line}: {error}"


def section_lines(changelog: str, version: str) -> list[str]:
    parts = re.split(r"(?m)^(?=## )", changelog)
    return next(part for part in parts if part.startswith(f"## [{version}]")).strip().split("\n")


@pytest.mark.parametrize("page", all_pages(), ids=str)
def test_blocks_and_links_of_a_page(page: Path) -> None:
    text = (ROOT / page).read_text()
    found = [fault for block in blocks_of(text) for fault in block_faults(block)]
    found += link_faults(page, text)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [one for one in all_pages() if one.name not in HISTORY], ids=str)
def test_the_language_of_a_page(page: Path) -> None:
    found = list(language_faults(page, (ROOT / page).read_text()))
    assert not found, "\n".join(found)


def test_front_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for version in re.findall(r"(?m)^## \[(.*?)\]", changelog):
        assert len(section_lines(changelog, version)) <= CHANGELOG_LINES, version
    assert len(section_lines("## [0.1.0]\n" + "x\n" * 50, "0.1.0")) == 51  # negative control


def test_the_version_is_one() -> None:
    (in_setup,) = re.findall(r'version="(.*?)"', (ROOT / "setup.py").read_text())
    newest = re.findall(r"(?m)^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text())[0]
    assert in_setup == ucp.__version__ == newest
    assert f"Status: {in_setup}" in (ROOT / "README.md").read_text()


def test_generated_blocks_are_what_the_code_says() -> None:
    found = []
    for page in all_pages():
        text = (ROOT / page).read_text()
        assert text.count("<!-- generated:") == len(GENERATED.findall(text)), page
        if generated.filled(text) != text:
            found.append(str(page))
    assert not found, f"python -m tests.docs.update --blocks; stale: {', '.join(found)}"


def test_every_kind_of_block_is_on_a_page() -> None:
    """Or nobody would see that a flag, a command or a patch has no page."""
    blocks = {
        (found["kind"], found["word"].strip())
        for page in all_pages()
        for found in GENERATED.finditer((ROOT / page).read_text())
    }
    assert {kind for kind, _ in blocks} == set(generated.TEXTS)
    assert {word for kind, word in blocks if kind == "cli"} == {"shared", *generated.commands()}
    assert {word for kind, word in blocks if kind == "flags"} == set(flags.GROUPS)
    assert {word for kind, word in blocks if kind == "support"} == set(support.TABLES)


def journeys() -> list[str]:
    """What the pictures of the architecture name: `module.function`, `module.Class.method`."""
    text = (ROOT / "docs" / "maintain" / "architecture.md").read_text()
    lines = [line for block in blocks_of(text) if block.language == "text" for line in block.lines]
    return re.findall(r"\b\w+(?:/\w+)+(?:\.\w+)*", "\n".join(lines))


def missing(named: str) -> bool:
    """Whether the package has no such module, or its module no such definition."""
    path, *names = named.split(".")
    file = ROOT / "megatron_ucp" / f"{path}.py"
    package = file.with_suffix("") / "__init__.py"
    if not file.is_file() and not package.is_file():
        return True
    nodes: list[ast.stmt] = ast.parse((file if file.is_file() else package).read_text()).body
    for name in names:
        kinds = (ast.FunctionDef, ast.ClassDef)
        found = [one for one in nodes if isinstance(one, kinds) and one.name == name]
        if not found:
            return True
        nodes = found[0].body
    return False


def test_the_pictures_of_the_architecture_are_of_the_code() -> None:
    found = journeys()
    assert len(found) > 30
    assert not [one for one in found if missing(one)]
    assert missing("engines/load.no_such") and missing("engines/nowhere.load")
    assert not missing("reshard/load.EngineSink.move")


def test_what_is_supported_names_tests_that_exist() -> None:
    for name, (head, rows) in support.TABLES.items():
        for row in rows:
            assert len(row) == len(head) + 2, (name, row[0])
            for test in row[-1].split(", "):
                assert (ROOT / "tests" / f"{test}.py").is_file(), f"{name}: {test}"


def test_the_tests_that_pages_name_exist() -> None:
    found = []
    for page in all_pages():
        names = re.findall(r"`[\w/]*?(test_[\w*]+\.py)`", (ROOT / page).read_text())
        found += [f"{page}: {name}" for name in names if not [*(ROOT / "tests").rglob(name)]]
    assert not found


def test_a_stale_block_is_seen() -> None:
    """Negative control."""
    stale = "<!-- generated: cli ls -->\nold\n<!-- end of generated -->"
    assert "megatron-ucp ls PATH" in generated.filled(stale)


def test_the_site_has_every_page() -> None:
    def pages(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        parts = nav.values() if isinstance(nav, dict) else nav
        assert isinstance(parts, Iterable)
        return [page for part in parts for page in pages(part)]

    settings = tomllib.loads((ROOT / "zensical.toml").read_text())
    found = pages(settings["project"]["nav"])
    there = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(found) == sorted(there)


def test_the_readme_names_the_two_scripts() -> None:
    text = (ROOT / "README.md").read_text()
    assert "bash examples/quickstart.sh" in text and "bash tests/run.sh" in text


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```python\nucp.no_such_name(1)\n```", "there is no ucp.no_such_name"),
        ("```python\nucp.verify('a', deeep=True)\n```", "takes no deeep="),
        ("```python\nucp.Mesh(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)\n```", "by position"),
        ("```python\nif\n```", "invalid syntax"),
        ("```json\n{\n```", "line 2"),
        ("```toml\na =\n```", "line 2"),
        ("```\nx\n```", "no language"),
        ("<!-- not run: no time -->\n```bash\nls\n```", "is none of"),
        ("<!-- run by tests/docs/test_pages.py::no_such -->\n```bash\nls\n```", "there is no test"),
        ("<!-- run by tests/nowhere.py::test -->\n```bash\nls\n```", "there is no test"),
        (f"<!-- run by {OTHER} -->\n```bash\npython oth3r.py\n```", "has nothing of"),
        (f"<!-- run by {OTHER} -->\n```bash\nmegatron-ucp ls x\n```", "has nothing of"),
    ],
)
def test_a_bad_block_is_seen(text: str, fault: str) -> None:
    """Negative control."""
    found = [one for block in blocks_of(text) for one in block_faults(block)]
    assert any(fault in one for one in found), found


def test_a_bad_link_is_seen() -> None:
    """Negative control."""
    text = "# One heading\n[a](#one-heading) [b](#two) [c](nowhere.md) [d](docs/README.md#nowhere)"
    found = list(link_faults(Path("README.md"), text))
    assert [fault.split(": ")[1] for fault in found] == [
        "#two",
        "nowhere.md",
        "docs/README.md#nowhere",
    ]
    assert anchors_of("## `a-b`: c, d\n## `a-b`: c, d") == {"a-b-c-d", "a-b-c-d-1"}
    assert list(link_faults(Path("README.md"), "![p](nowhere.png)"))


def test_bad_language_is_seen() -> None:
    """Negative control."""
    long = " ".join(["word"] * 31)
    found = list(language_faults(Path("p.md"), f"Short one. {long}.\n\nA door that is told."))
    assert len(found) == 3 and "31 words" in found[0]
    assert not list(
        language_faults(Path("p.md"), f"| {long} |\n\n```text\n{long} door\n```\n`told`")
    )
    listed = "- one two.\n- three\n  four\n\n1. five [six](a/long/link.md). seven"
    assert list(sentences(listed)) == ["one two.", "three four", "five six.", "seven"]
