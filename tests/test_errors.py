"""Errors: each says what to do, and the ids that they print are headings of
docs/troubleshooting.md."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ucp import errors
from megatron_ucp.cli import main
from megatron_ucp.cli.verbs import sections
from megatron_ucp.errors import (
    DamagedFileError,
    EngineUnusableError,
    NotFoundError,
    UcpError,
    UsageError,
)

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, UcpError)
}
# what people search for, that no error of ours prints
FOREIGN = {
    *("dp-world-size", "size-mismatch", "checkpointing-exception", "unrecognized-model"),
    "other-versions",
}


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def made(tree: ast.AST) -> Iterator[tuple[ast.Call, type[UcpError]]]:
    """Every error of the package that some code makes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in KINDS:
            yield node, KINDS[called(node)]


def without_fix(tree: ast.AST) -> list[int]:
    """Lines of errors that don't say what to do."""
    lines: list[int] = []
    for call, kind in made(tree):
        given = [word.value for word in call.keywords if word.arg == "fix"]
        nothing = not given or (isinstance(given[0], ast.Constant) and not given[0].value)
        if nothing and (given or not kind.fix):
            lines.append(call.lineno)
    return lines


def ids(tree: ast.AST) -> Iterator[str]:
    """The ids that the errors of some code print; those that are computed come from others."""
    for call, kind in made(tree):
        given = [word.value for word in call.keywords if word.arg == "id"]
        if not given:
            yield kind.id
        elif isinstance(given[0], ast.Constant):
            yield str(given[0].value)


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """Every module of the package."""
    for file in sorted((ROOT / "megatron_ucp").rglob("*.py")):
        yield file.relative_to(ROOT), ast.parse(file.read_text())


def test_every_error_says_what_to_do() -> None:
    found = [f"{path}:{line}" for path, tree in trees() for line in without_fix(tree)]
    assert sum(1 for _, tree in trees() for _ in made(tree)) > 500
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("raise UsageError('x')", [1]),
        ("\nraise errors.UsageError('x', found=3) from None", [2]),
        ("raise UsageError('x', fix='')", [1]),
        ("raise DamagedFileError('x', fix='')", [1]),
        ("def f():\n    return UsageError('x')", [2]),
        ("raise UsageError('x', fix='give y')", []),
        ("raise UsageError('x', fix=said)", []),
        ("raise DamagedFileError('x')", []),
        ("raise ValueError('x')", []),
    ],
)
def test_an_error_without_it_is_found(text: str, lines: list[int]) -> None:
    assert without_fix(ast.parse(text)) == lines


def test_ids_are_headings() -> None:
    """Both ways: no error leads nowhere, and no heading of an error is of the past."""
    text = (ROOT / errors.HELP_FILE).read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    printed = {one for _, tree in trees() for one in ids(tree)} - {""}
    assert len(set(headings)) == len(headings)
    assert printed | FOREIGN == set(headings)
    assert all(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", one) for one in headings)


def test_sections_have_text_reason_and_command() -> None:
    """What is seen, in a block; why; and one command or call, in another block."""
    text = (ROOT / errors.HELP_FILE).read_text()
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        assert body.count("```") == 4, name
        assert re.search(r"^Why: ", body, re.MULTILINE), name


def test_the_help_of_a_terminal_has_no_links_and_comments() -> None:
    found = sections()
    assert "<!--" in (text := (ROOT / errors.HELP_FILE).read_text()) and "](" in text
    assert not [one for one, said in found.items() if "<!--" in said or "](" in said]
    assert "a file of rules" in found["layout-unknown"]


def test_a_part_of_a_text_finds_its_section(capsys: pytest.CaptureFixture[str]) -> None:
    """What people search for: the beginning of another program's error."""
    for text, section in {
        "ZeRORuntimeException": "dp-world-size",
        "size mismatch for": "size-mismatch",
        "missing key(s) in state_dict": "size-mismatch",
        "CheckpointingException": "checkpointing-exception",
    }.items():
        assert main(["help", text]) == 0
        assert capsys.readouterr().out.strip() == sections()[section]
    assert main(["help", "deepspeed"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"dp-world-size", "other-versions"} <= {*listed} < {*sections()}
    assert main(["help", "nothing of this kind"]) == 2


def test_the_id_is_shown_last_and_kept() -> None:
    error = UsageError("no", fix="do", id="no-checkpoint")
    copy = pickle.loads(pickle.dumps(error))
    last = "  help: megatron-ucp help no-checkpoint"
    assert str(error).splitlines()[-1] == str(copy).splitlines()[-1] == last
    assert copy.id == "no-checkpoint"


def test_an_id_may_be_the_usual_one_or_none() -> None:
    assert DamagedFileError("no").id == "damaged-file"
    assert str(EngineUnusableError("no")).endswith("help engine-unusable")
    assert "help" not in str(UsageError("no"))
    assert "help" not in str(NotFoundError("no", id=""))
    assert pickle.loads(pickle.dumps(NotFoundError("no", id=""))).id == ""


def test_sentences_are_short() -> None:
    """No sentence of the page has more than 30 words."""
    text = re.sub(r"```.*?```", "", (ROOT / errors.HELP_FILE).read_text(), flags=re.DOTALL)
    sentences = re.split(r"(?<=[.:?])\s+|\n\n", text)
    assert not [one for one in sentences if len(one.split()) > 30]
