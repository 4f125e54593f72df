"""A tag's life on disk, without DeepSpeed: killed between any two operations, exchanged, kept,
removed."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import NotFoundError, UsageError
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.tags import LATEST, find_tag, nothing_there

STATE = "mp_rank_00_model_states.pt"
KILLED = 9


RUN = "the run"


def manifest(content: str, at: float, moved: bool = True, **said: str) -> str:
    return to_json(
        Manifest(
            Keeper.ZERO_0,
            Mesh(),
            (),
            (),
            files=(FileEntry(STATE, len(content)),),
            save_id=content,
            run={"saved_at": at, "moved_latest": moved, **said},
        )
    )


def save(
    folder: Path, tag: str, content: str, at: float = 0.0, moved: bool = True, run: str = RUN
) -> None:
    """A save as the engine does it, of one state file."""
    with output_folder.begin(folder, tag) as aside:
        (aside / STATE).write_text(content)
        sync = output_folder.Syncs()
        output_folder.commit(aside, manifest(content, at, moved, tag=tag, run_id=run), sync)
        if moved:
            output_folder.replace_text(folder / LATEST, tag, sync)


def content_of(folder: Path) -> str:
    """What a whole tag holds; fails where manifest and file are of two saves."""
    content = (folder / STATE).read_text()
    assert json.loads((folder / FILE_NAME).read_text())["save_id"] == content
    return content


def killed_at(operation: int, work: Callable[[], None]) -> bool:
    """Runs `work` in a child that ends, without any clean-up, before its operation of that number.
    False: it got through."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    left = operation

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os._exit(KILLED)
            left -= 1
            return call(*args, **kwargs)

        return counted

    for owner, names in (
        (os, ("rename", "replace", "fsync", "link", "mkdir", "unlink", "rmdir")),
        (output_folder, ("_exchange",)),
        (Path, ("write_text",)),
    ):
        for name in names:
            setattr(owner, name, counting(getattr(owner, name)))
    work()
    os._exit(0)


@pytest.mark.parametrize(
    "tag", ["global_step2", "global_step1"], ids=["a new tag", "the tag that latest names"]
)
@pytest.mark.parametrize("exchange", [True, False])
def test_killed_between_any_two_operations_the_newest_tag_is_whole(
    tmp_path: Path, tag: str, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        # a system without renameat2
        monkeypatch.setattr(output_folder.ctypes, "CDLL", lambda *_, **__: object())
    seen: set[str] = set()
    for operation in range(100):
        folder = tmp_path / str(operation)
        save(folder, "global_step1", "old")
        (folder / "global_step1" / "mine.txt").write_text("kept")
        killed = killed_at(operation, lambda folder=folder: save(folder, tag, "new"))
        named = (folder / LATEST).read_text()
        if not exchange and tag == "global_step1" and not (folder / tag).exists():
            # without renameat2 there is such a moment: the old one stays, under another name
            seen.add("between two renames")
            assert content_of(folder / f"{tag}.replaced") == "old"
            with pytest.raises(NotFoundError, match=r"global_step1\.replaced"):
                find_tag(folder)
        else:
            seen.add(content_of(find_tag(folder).folder))
            assert content_of(folder / named) in ("old", "new")
            if tag == "global_step1":
                assert (folder / tag / "mine.txt").read_text() == "kept"
        check_that_saves_go_on(folder)
        if not killed:
            break
    else:
        pytest.fail("the save never got through")
    assert operation > 8
    gap = {"between two renames"} if tag == "global_step1" and not exchange else set[str]()
    assert seen == {"old", "new"} | gap


def check_that_saves_go_on(folder: Path) -> None:
    """What a killed save left is in nobody's way, and goes."""
    save(folder, "global_step3", "third")
    assert content_of(find_tag(folder).folder) == "third"
    assert not [p.name for p in folder.iterdir() if p.name.startswith(".")]


def test_an_unfinished_save_does_not_look_like_a_checkpoint(tmp_path: Path) -> None:
    with output_folder.begin(tmp_path, "global_step1") as aside:
        (aside / STATE).write_text("all of it")
        assert nothing_there(tmp_path)
        with pytest.raises(NotFoundError, match="was not finished"):
            find_tag(aside)
        with pytest.raises(NotFoundError, match="no checkpoint"):
            find_tag(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_checkpoints_below_is_no_first_start(tmp_path: Path) -> None:
    """A trainer's output folder, which is given in the place of one of its checkpoints."""
    (tmp_path / "out" / "logs").mkdir(parents=True)
    assert nothing_there(tmp_path / "out")
    for step in (5, 10):
        save(tmp_path / "out" / f"checkpoint-{step}", f"global_step{step}", "all of it")
    assert not nothing_there(tmp_path / "out")
    with pytest.raises(NotFoundError, match="folders below it do") as caught:
        find_tag(tmp_path / "out")
    assert "checkpoint-10" in str(caught.value) and "checkpoint-5" in str(caught.value)


@pytest.mark.parametrize("tag", ["", "..", "a/b", ".hidden"])
def test_a_tag_is_a_plain_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError, match="plain name"), output_folder.begin(tmp_path, tag):
        pass


def test_a_file_in_the_place_of_the_tag_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "global_step1").write_text("mine")
    with pytest.raises(UsageError, match="a file has the name"):
        save(tmp_path, "global_step1", "new")


def test_folders_of_a_user_are_kept_where_links_are_not_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, "one", "old")
    (tmp_path / "one" / "tokenizer").mkdir()
    (tmp_path / "one" / "tokenizer" / "vocab.txt").write_text("a b c")
    (tmp_path / "one" / "mp_rank_01_model_states.pt").write_text("of a larger mesh")
    save(tmp_path, "one", "new")
    assert (tmp_path / "one" / "tokenizer" / "vocab.txt").read_text() == "a b c"
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [STATE, "tokenizer", FILE_NAME]


# ------------------------------------------------ retention


def left(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


def many(folder: Path) -> None:
    for number in range(1, 6):
        save(folder, f"step{number}", f"content {number}", at=float(number))


@pytest.mark.parametrize("keep", [1, 2, 4, 9])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    many(tmp_path)
    notes = output_folder.prune(tmp_path, keep)
    assert left(tmp_path) == [f"step{n}" for n in range(1, 6)][-keep:]
    assert notes == [f"removed step{n}" for n in range(5 - keep, 0, -1)]


def test_newest_is_by_the_time_of_the_save_and_not_by_name(tmp_path: Path) -> None:
    save(tmp_path, "step600", "abandoned", at=1.0)
    save(tmp_path, "step450", "after going back", at=2.0)
    output_folder.prune(tmp_path, 1)
    assert left(tmp_path) == ["step450"]


def test_what_is_not_touched(tmp_path: Path) -> None:
    many(tmp_path)
    save(tmp_path, "milestone", "kept on purpose", at=0.5, moved=False)
    shutil.copytree(tmp_path / "step1", tmp_path / "stock")
    (tmp_path / "stock" / FILE_NAME).unlink()
    # not whole: nobody counts it, and nobody removes it
    (tmp_path / "step2" / STATE).write_text("cut")
    (tmp_path / "latest").write_text("step3")  # somebody went back
    output_folder.prune(tmp_path, 1)
    assert left(tmp_path) == ["milestone", "step2", "step3", "stock"]


def test_the_last_whole_one_stays_when_newer_ones_are_damaged(tmp_path: Path) -> None:
    many(tmp_path)
    for number in (3, 4):
        (tmp_path / f"step{number}" / STATE).unlink()
    output_folder.prune(tmp_path, 2)
    assert left(tmp_path) == ["step2", "step3", "step4", "step5"]


def test_a_copy_and_a_link_of_a_users_stay(tmp_path: Path) -> None:
    many(tmp_path)
    shutil.copytree(tmp_path / "step1", tmp_path / "my_copy_of_step1")
    shutil.move(tmp_path / "step2", tmp_path.parent / "elsewhere")
    (tmp_path / "step2").symlink_to(tmp_path.parent / "elsewhere")
    assert output_folder.prune(tmp_path, 1, RUN) == [
        "removed step4",
        "removed step3",
        "removed step1",
        "kept my_copy_of_step1: it is a copy of step1",
        "kept step2: it is a link",
    ]
    assert left(tmp_path) == ["my_copy_of_step1", "step2", "step5"]
    assert content_of(tmp_path / "my_copy_of_step1") == "content 1"
    assert content_of(tmp_path / "step2") == "content 2"


def test_tags_of_another_run_stay(tmp_path: Path) -> None:
    """Of a run that shares the folder, and of an older version, which named no run."""
    many(tmp_path)
    for tag in ("other1", "other2"):
        save(tmp_path, tag, tag, at=9.0, run="another")
    for tag in ("step1", "step2"):
        text = manifest(f"content {tag[4:]}", at=float(tag[4:]))
        (tmp_path / tag / FILE_NAME).write_text(text)
    assert output_folder.prune(tmp_path, 1, RUN) == [
        "removed step4",
        "removed step3",
        "kept other1, other2: another run saved it",
        "kept step1, step2: no manifest says which run saved it",
    ]
    assert left(tmp_path) == ["other1", "other2", "step1", "step2", "step5"], "its newest stays"
    assert output_folder.retire(tmp_path / "other1", RUN) == "kept other1: another run saved it"
    assert output_folder.retire(tmp_path / "other1", "another") == "removed other1"


def test_a_tag_with_a_file_of_another_save_of_the_same_size_is_damaged(tmp_path: Path) -> None:
    for tag in ("one", "two", "six"):
        write_with_sums(tmp_path, tag)
    shutil.copy(tmp_path / "two" / STATE, tmp_path / "one")
    assert output_folder.prune(tmp_path, 1, RUN) == [
        "removed two",
        f"kept one: it is not whole: {STATE}",
    ]
    assert left(tmp_path) == ["one", "six"]


def write_with_sums(folder: Path, tag: str) -> None:
    """A save of a real file, which the manifest lists as it is."""
    order = ("one", "two", "six").index(tag)
    with output_folder.begin(folder, tag) as aside:
        torch.save({"weight": torch.full((3,), float(order))}, aside / STATE)
        text = json.loads(manifest("", float(order), tag=tag, run_id=RUN))
        entry = output_folder.entry_of(aside / STATE)
        text["files"] = [[entry.name, entry.size_bytes, entry.sha256]]
        output_folder.commit(aside, json.dumps(text), output_folder.Syncs())
        output_folder.replace_text(folder / LATEST, tag, output_folder.Syncs())


def test_a_tag_is_left_alone_where_the_pointer_names_another_runs(tmp_path: Path) -> None:
    """Two jobs take turns: the newest of each stays."""
    for number in (1, 2, 3):
        save(tmp_path, f"a{number}", f"a{number}", at=float(number), run="a")
        save(tmp_path, f"b{number}", f"b{number}", at=float(number), run="b")
    output_folder.prune(tmp_path, 1, "a")
    assert left(tmp_path) == ["a3", "b1", "b2", "b3"]


def test_one_that_is_being_read_stays(tmp_path: Path) -> None:
    many(tmp_path)
    reader = ManifestBeside(LocalFolder(tmp_path / "step1"), [STATE])
    assert "kept step1: it is being read" in output_folder.prune(tmp_path, 1)
    assert left(tmp_path) == ["step1", "step5"]
    reader.close()
    assert output_folder.prune(tmp_path, 1) == ["removed step1"]


def test_one_that_is_being_removed_is_not_read(tmp_path: Path) -> None:
    many(tmp_path)
    with open(tmp_path / "step1" / FILE_NAME, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NotFoundError, match="being removed"):
            ManifestBeside(LocalFolder(tmp_path / "step1"), [STATE])
    ManifestBeside(LocalFolder(tmp_path / "step1"), [STATE]).close()
