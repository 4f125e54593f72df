"""Every command and every printed output of README and docs, run in a work folder for each page;
recipes of the pages that need several ranks, run word for word."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_ucp as ucp
from tests.docs import console, recipe_jobs, work
from tests.docs.journeys import called, differ, listed
from tests.docs.pages import ROOT, Block, all_pages, blocks_of
from tests.engines.store_jobs import in_store
from tests.object_server import ObjectServer
from tests.ranks import RankPool, RanksFailed
from tests.scripts import start

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
    assert Path("README.md") in PAGES and len(PAGES) > 8
    found = []
    for page in PAGES:
        with work.copied(folder, folder.parent / "page"):
            faults = [fault for block in runnable(page) for fault in console.faults(block)]
        found += [f"{page}: {fault}" for fault in faults]
    assert not found, "\n\n".join([*found, "to update the pages: python -m tests.docs.update"])


def test_the_two_commands_of_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/reference/pretrain.md: pretrain_gpt.py on four ranks, then on two, on another layout. As
    the page has them, with a tenth of the iterations."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    blocks = blocks_of((ROOT / "docs" / "reference" / "pretrain.md").read_text())
    (block,) = [one for one in blocks if any("pretrain_gpt.py" in line for line in one.lines)]
    commands = [shlex.split(one.text.replace("\\\n", " ")) for one in block.commands]
    fewer = {"40": "4", "20": "2", "10": "1", "5": "1", "LICENSE": str(ROOT / "LICENSE")}
    steps = []
    for number, words in enumerate(words for words in commands if "--nproc_per_node" in words):
        at = words.index("--nproc_per_node") + 1
        flags = [word.replace("runs/", f"{tmp_path}/") for word in words[at + 2 :]]
        script = [str(ROOT / words[at + 1]), *[fewer.get(flag, flag) for flag in flags]]
        log = tmp_path / f"log_{number}"
        assert start(int(words[at]), script, log) == 0, log.read_text()
        steps.append(re.findall(r"iteration +(\d+)/ +4 ", log.read_text()))
    assert steps == [["1", "2"], ["3", "4"]]


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


def test_the_next_world_as_resize_md_builds_it(ranks: RankPool, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert ranks.run(4, recipe_jobs.in_between, store, False, timeout_s=100) == [[], [], [], []]


def test_the_blocks_of_refit_md(ranks: RankPool) -> None:
    for found in ranks.run(2, recipe_jobs.refits, timeout_s=100):
        assert found == {f"block {number}": [] for number in range(3)}


def test_the_blocks_of_stores_md(
    ranks: RankPool, object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a server of the tests' own in the place of a bucket."""
    environment = object_server.environment()
    assert ranks.run(2, in_store, environment, recipe_jobs.in_a_bucket, timeout_s=100) == [[], []]
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((ROOT / "docs" / "stores.md").read_text())
    ours = [one for one in blocks if one.commands and "test_the_blocks_of" in one.comment]
    assert [len(one.commands) for one in ours] == [4, 1]
    assert [fault for block in ours for fault in console.faults(block)] == []
    for url in ("s3://bucket/converted/global_step80", "s3://bucket/runs/llama/global_step2"):
        assert ucp.verify(url, deep=True).findings == ()
    assert "bucket/models/llama/model.safetensors" in object_server.ask("objects")


@pytest.mark.slow
def test_groups_that_torch_takes_down_are_not_enough(tmp_path: Path) -> None:
    pool = RankPool(4)
    try:
        with pytest.raises(RanksFailed):
            pool.run(4, recipe_jobs.in_between, str(tmp_path / "store"), True, timeout_s=60)
    finally:
        pool.close()


def test_real_runs_take_the_journeys_of_the_architecture(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, recipe_jobs.journeys, str(tmp_path), timeout_s=100)[0]
    megatron = tuple(one for one in listed("A save") if "/megatron/" in one)
    faults = {heading: differ(heading, found[heading], megatron) for heading in found}
    assert not [fault for fault in faults.values() if fault], faults
    # negative control
    assert differ("A load", found["A load"][::-1]) and differ("A load", found["A save"])


def test_a_conversion_takes_the_journey_of_the_architecture(tmp_path: Path) -> None:
    source = ROOT / "tests" / "formats" / "golden" / "megatron" / "td_full_tp2dp2"
    out = tmp_path / "tag"
    assert not differ("A conversion", called(lambda: ucp.convert(source, out, mesh="dp=2,zero=1")))
