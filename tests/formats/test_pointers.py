"""Which of two pointers is followed, and where a save moves them."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_ucp.errors import NotFoundError
from megatron_ucp.formats.tags import (
    LATEST,
    MEGATRON_LATEST,
    Named,
    find_tag,
    newest_named,
    pointers_to,
)
from tests.formats.test_tags import save

DS, MEGATRON = "global_step4", "iter_0000006"
NOW = 1_800_000_000.0


def written(path: Path, text: str, at: float) -> None:
    path.write_text(text)
    os.utime(path, (at, at))


def run(folder: Path, latest: float, megatron: float) -> Path:
    """Two tags, saved at 100 and 106 seconds, and both pointers, written at these times."""
    for tag, at in ((DS, NOW + 100), (MEGATRON, NOW + 106)):
        save(folder, tag, tag, at=at)
        os.utime(folder / tag / "ucp_manifest.json", (at, at))
        os.utime(folder / tag, (at, at))
    written(folder / LATEST, DS, NOW + latest)
    written(folder / MEGATRON_LATEST, "6", NOW + megatron)
    return folder


def named(folder: Path) -> Named:
    found = newest_named(folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("latest", "megatron", "followed"),
    [
        (100, 106, MEGATRON),  # a run that went on under Megatron
        (110, 106, DS),  # somebody rolled `latest` back by hand
        (106.000001, 106, DS),
        (106, 106.000001, MEGATRON),
        (106, 106, MEGATRON),  # the newer save
    ],
)
def test_the_pointer_that_was_written_last_is_followed_and_the_other_is_named(
    tmp_path: Path, latest: float, megatron: float, followed: str
) -> None:
    found = find_tag(run(tmp_path, latest, megatron))
    assert found.folder == tmp_path / followed
    (note,) = found.notes
    assert DS in note and MEGATRON in note and LATEST in note and MEGATRON_LATEST in note
    assert note.startswith(f"`{LATEST if followed == DS else MEGATRON_LATEST}`, which ")
    assert find_tag(tmp_path, DS).notes == () and find_tag(tmp_path / DS).notes == ()


def test_pointers_that_agree_are_no_note(tmp_path: Path) -> None:
    run(tmp_path, 100, 106)
    written(tmp_path / LATEST, MEGATRON, NOW)
    assert named(tmp_path) == Named(LATEST, MEGATRON)
    (tmp_path / LATEST).unlink()
    assert named(tmp_path) == Named(MEGATRON_LATEST, MEGATRON)


@pytest.mark.parametrize("first", [LATEST, MEGATRON_LATEST])
def test_a_copy_that_lost_the_times_is_judged_by_the_saves(tmp_path: Path, first: str) -> None:
    copied = NOW + 10_000
    folder = run(tmp_path, 100, 106)
    for tag in (DS, MEGATRON):
        os.utime(folder / tag / "ucp_manifest.json", (copied, copied))
        os.utime(folder / tag, (copied, copied))
    for name in (LATEST, MEGATRON_LATEST):  # in any order
        at = copied if name == first else copied + 5
        os.utime(folder / name, (at, at))
    found = named(folder)
    assert found.tag == MEGATRON and "of the newer save" in found.note
    written(folder / LATEST, DS, copied + 300)  # by hand, in the copy
    assert named(folder).tag == DS and "written later" in named(folder).note


def test_times_that_are_equal_where_a_save_does_not_say_its_own(tmp_path: Path) -> None:
    folder = run(tmp_path, 106, 106)
    (folder / MEGATRON / "ucp_manifest.json").unlink()
    assert named(folder).tag == DS


def test_a_pointer_that_names_nothing(tmp_path: Path) -> None:
    folder = run(tmp_path, 100, 106)
    written(folder / LATEST, "", NOW)  # the older one: the other is followed
    assert named(folder).tag == MEGATRON and "names no tag" in named(folder).note
    written(folder / LATEST, "../elsewhere", NOW + 200)
    with pytest.raises(NotFoundError, match="can't be used"):
        newest_named(folder)
    written(folder / LATEST, "gone", NOW + 200)
    with pytest.raises(NotFoundError, match="the tag that `latest` names does not exist"):
        find_tag(folder)


def test_a_save_moves_every_pointer_that_can_name_it(tmp_path: Path) -> None:
    assert pointers_to(tmp_path, DS, LATEST) == ({LATEST: DS}, [])
    (tmp_path / MEGATRON_LATEST).write_text("4")
    moved, notes = pointers_to(tmp_path, DS, LATEST)
    assert moved == {LATEST: DS}
    assert notes == [
        f"`{MEGATRON_LATEST}` still names iter_0000004, as it can't name {DS}: `{LATEST}`, which "
        "is newer, is followed"
    ]
    moved, notes = pointers_to(tmp_path, MEGATRON, LATEST)
    assert list(moved.items()) == [(MEGATRON_LATEST, "6"), (LATEST, MEGATRON)] and notes == []
    (tmp_path / LATEST).write_text(DS)
    moved, notes = pointers_to(tmp_path, MEGATRON, MEGATRON_LATEST)
    assert list(moved.items()) == [(LATEST, MEGATRON), (MEGATRON_LATEST, "6")] and notes == []


def test_cp_without_times_as_the_shell_does_it(tmp_path: Path) -> None:
    """The real thing: whatever the order in which files are copied, the newer save is followed."""
    folder = run(tmp_path / "run", 100, 106)
    for tag in (DS, MEGATRON):  # saved long before this copy
        save(folder, tag, tag, at=1000.0 if tag == DS else 2000.0)
    written(folder / LATEST, DS, 1000.0)
    written(folder / MEGATRON_LATEST, "6", 2000.0)
    copy = Path(shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile))
    assert named(copy).tag == MEGATRON
