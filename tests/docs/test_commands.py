"""Every command and every printed output of README and docs, run in a work folder for each page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import console, work
from tests.docs.pages import ROOT, Block, all_pages, blocks_of
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
STEPS = 4


def runnable(page: Path) -> list[Block]:
    """The blocks of a page whose commands are run here."""
    found = blocks_of((ROOT / page).read_text())
    return [block for block in found if block.commands and not console.is_elsewhere(block)]


PAGES = [page for page in all_pages() if runnable(page)]


@pytest.fixture(scope="module")
def made(ranks: RankPool, tmp_checkpoints: Path) -> Path:
    folder = tmp_checkpoints / "docs"
    folder.mkdir()
    work.make(folder, ranks, STEPS)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of it, in which the commands of one page run."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("COLUMNS", "120")
    with work.copied(made, tmp_path / "work"):
        yield tmp_path / "work"


def test_all_pages_with_commands_are_run(folder: Path) -> None:
    """One test: a case for each page would be left out of the default run (`tests/conftest.py`)."""
    assert Path("README.md") in PAGES and len(PAGES) > 10
    found = []
    for page in PAGES:
        with work.copied(folder, folder.parent / "page"):
            faults = [fault for block in runnable(page) for fault in console.faults(block)]
        found += [f"{page}: {fault}" for fault in faults]
    assert not found, "\n\n".join([*found, "to update the pages: python -m tests.docs.update"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```console\n$ megatron-ucp diff runs/llama runs/llama\nequal!\n```", "the page shows"),
        ("```console\n$ megatron-ucp verify damaged --deep\n...\n```", "exit code 1"),
        ("```bash\nmegatron-ucp inspect nowhere\n```", "exit code 2"),
        ("```bash\nfalse\n```", "exit code 1"),
    ],
)
def test_a_wrong_output_is_seen(folder: Path, text: str, fault: str) -> None:
    """Negative control."""
    (block,) = blocks_of(text)
    (found,) = console.faults(block)
    assert fault in found


def test_a_right_output_passes(folder: Path) -> None:
    text = """```console
$ megatron-ucp diff runs/llama \\
      runs/llama
equal
$ megatron-ucp verify damaged --deep; echo $?
...
1
```"""
    assert [list(console.faults(block)) for block in blocks_of(text)] == [[]]


def test_what_is_masked_and_what_is_not() -> None:
    same = [
        ("4 files, 14,770,774 bytes in 0.2 s", "12 files, 1 bytes in 13.25 s"),
        ("a  1", "a 22"),
    ]
    same += [("2026-11-24 11:08", "2027-01-02 23:59"), ("-----", "---"), ("2.4e-07", "3e-8")]
    assert all(console.masked(a) == console.masked(b) for a, b in same)
    assert console.masked("zero=1 equal") != console.masked("zero=1 differs")
    assert not console.differ(["a", "...", "z"], ["a", "b", "z"])
    assert console.differ(["a", "...", "z"], ["a", "b", "y"])
    assert console.differ(["a"], ["a", "b"]) and console.differ(["a", "b"], ["a"])
    assert console.as_shown(["1", "...", "9"], ["a", "b", "c", "d"]) == ["a", "...", "d"]
