"""Two jobs that save into one folder: each save that returns is whole and stays, or is refused by
name; what a killed one held is free."""

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.errors import SaveError
from megatron_ucp.formats import locks, output_folder
from tests.formats.test_tags import STATE, content_of, save

FORKS = multiprocessing.get_context("fork")
ROUNDS = 60


def job(folder: Path, name: str, keep: int, refused: Any) -> None:
    """Saves under its own tags, one after the other; each is looked at when its save returned."""
    run = f"run {name}"
    for number in range(ROUNDS):
        tag = f"{name}{number}"
        try:
            save(folder, tag, f"{tag} content", at=float(number), run=run)
        except SaveError:
            refused.value += 1
            continue
        assert content_of(folder / tag) == f"{tag} content"
        if keep:
            output_folder.prune(folder, keep, run)


def both(work: Callable[..., None], *rows: tuple[Any, ...]) -> list[int | None]:
    """Exit codes of processes that do it at once."""
    started = [FORKS.Process(target=work, args=row) for row in rows]
    for one in started:
        one.start()
    for one in started:
        one.join(60)
    return [one.exitcode for one in started]


@pytest.mark.parametrize("keep", [0, 2])
def test_saves_of_two_jobs_under_their_own_tags(tmp_path: Path, keep: int) -> None:
    refused = FORKS.Value("i", 0)
    assert both(job, *((tmp_path, name, keep, refused) for name in "ab")) == [0, 0]
    assert refused.value == 0
    kept = range(ROUNDS)[-keep:]
    expected = {f"{name}{number}" for name in "ab" for number in kept}
    there = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    # the tag that `latest` names is no job's to remove: it may be one more
    assert expected <= there and len(there - expected) <= (1 if keep else 0)
    for tag in there:
        assert content_of(tmp_path / tag) == f"{tag} content"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def same(folder: Path, name: str, refused: Any) -> None:
    for number in range(ROUNDS):
        try:
            save(folder, "same", f"{name}{number}")
        except SaveError:
            refused.value += 1


def test_saves_of_two_jobs_under_one_tag_are_whole_or_refused(tmp_path: Path) -> None:
    refused = FORKS.Value("i", 0)
    assert both(same, (tmp_path, "a", refused), (tmp_path, "b", refused)) == [0, 0]
    assert content_of(tmp_path / "same")[0] in "ab"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@contextlib.contextmanager
def saver(folder: Path, tag: str) -> Iterator[int]:
    """Another process that is in the middle of a save; its number."""
    began = FORKS.Event()

    def work() -> None:
        with output_folder.begin(folder, tag) as aside:
            (aside / STATE).write_text("half")
            began.set()
            time.sleep(60)

    process = FORKS.Process(target=work)
    process.start()
    assert began.wait(20) and process.pid
    try:
        yield process.pid
    finally:
        process.kill()
        process.join()


def test_the_second_of_one_tag_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "step1", "old")
    with saver(tmp_path, "step1") as pid:
        with pytest.raises(SaveError, match="another process is writing") as refused:
            save(tmp_path, "step1", "second")
        assert f"process {pid} on {os.uname().nodename}" in str(refused.value)
        assert (tmp_path / ".step1.saving" / STATE).read_text() == "half"
        save(tmp_path, "step2", "beside it")
        assert (tmp_path / ".step1.saving" / STATE).read_text() == "half"
        assert "kept step1: it is being saved" in output_folder.prune(tmp_path, 1)
    assert content_of(tmp_path / "step1") == "old"
    save(tmp_path, "step1", "after it was killed")
    assert content_of(tmp_path / "step1") == "after it was killed"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_a_killed_save_left_goes_with_the_next_one(tmp_path: Path) -> None:
    with saver(tmp_path, "step1") as pid:
        os.kill(pid, signal.SIGKILL)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step1.saving",
        ".step1.saving.lock",
    ]
    save(tmp_path, "step2", "next")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step2"]


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows none, as some network file systems are mounted."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)


def test_without_locks_a_save_goes_on_and_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is kept out: what a killed one left goes, and the tag is written."""
    without_locks(monkeypatch)
    with saver(tmp_path, "step1") as pid:
        os.kill(pid, signal.SIGKILL)
    save(tmp_path, "step1", "again")
    assert content_of(tmp_path / "step1") == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step1"]
    right = locks.PublishRight()
    with locks.writing(tmp_path / ".step2.saving", right):
        assert right.is_unlocked
    monkeypatch.undo()
    right = locks.PublishRight()
    with locks.writing(tmp_path / ".step2.saving", right):
        assert not right.is_unlocked


def test_a_conversion_on_its_way_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / ".left.saving").mkdir()
    with output_folder.held(tmp_path / ".used.saving") as used:
        (used / STATE).write_text("half")
        save(tmp_path, "next", "content")
        assert (used / STATE).read_text() == "half"
        assert not (tmp_path / ".left.saving").exists()
    save(tmp_path, "again", "content")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "latest", "next"]


def test_a_claim_that_a_killed_process_left_alone_goes_with_the_next_output(tmp_path: Path) -> None:
    """Killed behind the rename: nothing is unfinished, but the file beside it is there."""
    with saver(tmp_path, "out") as pid:
        os.rename(tmp_path / ".out.saving", tmp_path / "out")
        (tmp_path / ".mine.saving").mkdir()
        with output_folder.held(tmp_path / ".other.saving"):
            assert (tmp_path / ".out.saving.lock").exists(), "it lives"
        os.kill(pid, signal.SIGKILL)
    with output_folder.held(tmp_path / ".other.saving"):
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            ".mine.saving",
            ".other.saving",
            ".other.saving.lock",
            "out",
        ]


def test_pointers_of_two_jobs_take_turns(tmp_path: Path) -> None:
    def point(name: str) -> None:
        for number in range(200):
            output_folder.replace_text(
                tmp_path / "latest", f"{name}{number}", output_folder.Syncs(False)
            )

    assert both(point, ("a",), ("b",)) == [0, 0]
    assert (tmp_path / "latest").read_text() in ("a199", "b199")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


# ------------------------------------------------ links


@pytest.mark.parametrize("exchange", [True, False])
def test_a_tag_that_is_a_link_is_saved_over_as_a_folder(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(output_folder.ctypes, "CDLL", lambda *_, **__: object())
    run, moved = tmp_path / "run", tmp_path / "other disk" / "step1"
    save(run, "step1", "old")
    (run / "step1" / "mine.txt").write_text("kept")
    moved.parent.mkdir()
    shutil.move(run / "step1", moved)
    (run / "step1").symlink_to(moved)
    save(run, "step1", "new")
    assert content_of(run / "step1") == "new" and not (run / "step1").is_symlink()
    assert (run / "step1" / "mine.txt").read_text() == "kept"
    assert content_of(moved) == "old"
    save(run, "step2", "and on")
    assert sorted(path.name for path in run.iterdir()) == ["latest", "step1", "step2"]


def test_a_link_that_leads_nowhere_and_one_that_an_older_version_left(tmp_path: Path) -> None:
    (tmp_path / "step1").symlink_to(tmp_path / "gone")
    (tmp_path / ".step0.saving").symlink_to(tmp_path / "gone")
    save(tmp_path, "step1", "new")
    assert content_of(tmp_path / "step1") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step1"]


def test_a_reader_does_not_hold_a_save(tmp_path: Path) -> None:
    save(tmp_path, "step1", "old")
    with open(tmp_path / "step1" / FILE_NAME, "rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        save(tmp_path, "step1", "new")
    assert content_of(tmp_path / "step1") == "new"
