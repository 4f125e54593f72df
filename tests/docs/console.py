"""Runs the commands of a page, and compares what they print with what the page shows."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_ucp.cli import main
from tests.docs.pages import REASONS, ROOT, Block, Command

STATUS = "; echo $?"
"""After a command of a block ```console that ends with another exit code than 0."""
TIMEOUT_S = 120


class CommandFailed(AssertionError):
    pass


def run(command: Command) -> list[str]:
    """What a command prints, line by line, in this folder."""
    text = command.text.removesuffix(STATUS)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    code, said = tool(words[1:]) if is_tool(text, words) else shell(text)
    said = said.replace(f"{Path.cwd()}/", "")
    lines = said.rstrip("\n").split("\n") if said.strip() else []
    if command.text.endswith(STATUS):
        return [*lines, str(code)]
    if code:
        raise CommandFailed(f"{text}: exit code {code}\n{said}")
    return lines


def is_tool(text: str, words: list[str]) -> bool:
    """Whether it is `megatron-ucp` alone, which is run in this process."""
    return (
        words[:1] == ["megatron-ucp"] and words[1:2] != ["run"] and not re.search(r"[|<>;&]", text)
    )


def tool(words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:  # --help
            code = int(end.code or 0)
    return code, said.getvalue()


def shell(text: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stdout


def masked(line: str) -> str:
    """Without what differs from run to run and machine to machine: numbers, dates, widths."""
    line = re.sub(r"\b[0-9a-f]{12,}\b", "#", line)
    line = re.sub(r"\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?", "#", line)
    line = re.sub(r"#(?:[-: T]#)+", "#", line)  # dates and times
    line = re.sub(r"-{3,}", "---", line)
    return re.sub(r"\s+", " ", line).strip()


def differ(shown: list[str], printed: list[str]) -> str:
    """What is wrong with the output that a page shows; empty where it is what was printed."""
    pattern = [masked(line) for line in shown if line.strip()]
    found = [masked(line) for line in printed if line.strip()]
    if matches(pattern, found):
        return ""
    return "the page shows\n{}\nand the command prints\n{}".format(
        "\n".join(shown), "\n".join(printed)
    )


def matches(pattern: list[str], found: list[str]) -> bool:
    if "..." not in pattern:
        return pattern == found
    at = pattern.index("...")
    if pattern[:at] != found[:at]:
        return False
    rest = pattern[at + 1 :]
    return any(matches(rest, found[start:]) for start in range(at, len(found) + 1))


def as_shown(shown: list[str], printed: list[str]) -> list[str]:
    """What a page shows from now on: all of it, or with `...` as many lines before and after it as
    the page had."""
    printed = [line.rstrip() for line in printed]
    if "..." not in shown:
        return printed
    before, after = shown.index("..."), len(shown) - shown.index("...") - 1
    if before + after >= len(printed):
        return printed
    return [*printed[:before], "...", *printed[len(printed) - after :]]


def faults(block: Block) -> Iterator[str]:
    """Runs a block."""
    for command in block.commands:
        try:
            printed = run(command)
        except CommandFailed as failed:
            yield f"line {command.line}: {failed}"
            continue
        wrong = "" if command.shown is None else differ(command.shown, printed)
        if wrong:
            yield f"line {command.line}: $ {command.text}\n{wrong}"


def comment_faults(block: Block) -> Iterator[str]:
    """Of a block that is not run here: is there such a test, is it a reason that counts?"""
    kind, _, what = block.comment.partition(":")
    if kind == "not run":
        if what.strip() not in REASONS:
            yield f"line {block.line}: {what.strip()!r} is none of {sorted(REASONS)}"
        return
    file, _, test = block.comment.removeprefix("run by ").partition("::")
    path = ROOT / file
    source = path.read_text() if path.is_file() else ""
    if f"def {test}(" not in source:
        yield f"line {block.line}: there is no test {file}::{test}"
    names = re.findall(r"[\w/]*?(\w+)\.(?:py|sh)\b", "\n".join(block.lines))
    modules = re.findall(r"-m ([\w.]+)", "\n".join(block.lines))
    # a test has the scripts of a block, or reads the block itself
    wanted = [*names, *modules] or ["blocks_of("]
    if not any(name in source for name in wanted):
        yield f"line {block.line}: {file} has nothing of {sorted(set(wanted))}"


def is_elsewhere(block: Block) -> bool:
    return block.comment.startswith(("run by ", "not run:"))
