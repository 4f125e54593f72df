"""What pointers that disagree name, and where a save moves them."""

import json
from pathlib import Path

import pytest

from megatron_ucp.core.manifest import FILE_NAME, RUN
from megatron_ucp.errors import NotFoundError
from megatron_ucp.formats.tags import (
    LATEST,
    MEGATRON_LATEST,
    Named,
    find_tag,
    named_or_note,
    newest_named,
    pointers_to,
)
from tests.formats.test_tags import save

DS, MEGATRON = "global_step4", "iter_0000006"


def run(folder: Path, deepspeed: float, megatron: float) -> Path:
    """Two tags of one run, saved at these times, and a pointer to each."""
    for tag, at in ((DS, deepspeed), (MEGATRON, megatron)):
        save(folder, tag, tag, at=at, run="one")
    (folder / LATEST).write_text(DS)
    (folder / MEGATRON_LATEST).write_text("6")
    return folder


def change(tag: Path, **run: object) -> None:
    """What a manifest says of its run."""
    data = json.loads((tag / FILE_NAME).read_text())
    data["run"].update(run)
    (tag / FILE_NAME).write_text(json.dumps(data))


@pytest.mark.parametrize(("times", "followed"), [((100, 106), MEGATRON), ((106, 100), DS)])
def test_of_two_saves_of_one_run_the_later_one_is_named(
    tmp_path: Path, times: tuple[float, float], followed: str
) -> None:
    found = find_tag(run(tmp_path, *times))
    assert found.folder == tmp_path / followed
    (note,) = found.notes
    assert DS in note and MEGATRON in note and LATEST in note and MEGATRON_LATEST in note
    assert note.startswith(f"`{LATEST if followed == DS else MEGATRON_LATEST}` names ")
    assert find_tag(tmp_path, DS).notes == () and find_tag(tmp_path / DS).notes == ()


def test_pointers_that_agree_are_no_note(tmp_path: Path) -> None:
    run(tmp_path, 100, 106)
    (tmp_path / LATEST).write_text(MEGATRON)
    assert newest_named(tmp_path) == Named(LATEST, MEGATRON)
    (tmp_path / LATEST).unlink()
    assert newest_named(tmp_path) == Named(MEGATRON_LATEST, MEGATRON)


@pytest.mark.parametrize("fault", ["another run", "no run", "one time", "no manifest", "no tag"])
def test_any_other_disagreement_is_refused_with_the_tags(tmp_path: Path, fault: str) -> None:
    folder = run(tmp_path, 100, 106)
    if fault == "another run":
        change(folder / DS, **{RUN: "other"})
    elif fault == "no run":
        change(folder / DS, **{RUN: None})
        change(folder / MEGATRON, **{RUN: None})
    elif fault == "one time":
        change(folder / DS, saved_at=106.0)
    elif fault == "no manifest":
        (folder / MEGATRON / FILE_NAME).unlink()
    else:
        (folder / LATEST).write_text("gone")
    with pytest.raises(NotFoundError, match="name different tags") as refused:
        find_tag(folder)
    assert MEGATRON in refused.value.found and "tag=" in refused.value.what_to_do
    assert named_or_note(folder).tag == "" and MEGATRON in named_or_note(folder).note
    assert find_tag(folder, MEGATRON).folder == folder / MEGATRON


@pytest.mark.parametrize("text", ["", "../elsewhere"])
def test_a_pointer_that_names_no_tag(tmp_path: Path, text: str) -> None:
    folder = run(tmp_path, 100, 106)
    (folder / LATEST).write_text(text)
    with pytest.raises(NotFoundError, match="can't be used"):
        newest_named(folder)


def test_a_save_moves_every_pointer_that_can_name_it(tmp_path: Path) -> None:
    assert pointers_to(tmp_path, DS, LATEST) == ({LATEST: DS}, [])
    (tmp_path / MEGATRON_LATEST).write_text("4")
    moved, notes = pointers_to(tmp_path, DS, LATEST)
    assert moved == {LATEST: DS}
    assert notes == [f"`{MEGATRON_LATEST}` still names iter_0000004, as it can't name {DS}"]
    moved, notes = pointers_to(tmp_path, MEGATRON, LATEST)
    assert list(moved.items()) == [(MEGATRON_LATEST, "6"), (LATEST, MEGATRON)] and notes == []
    (tmp_path / LATEST).write_text(DS)
    moved, notes = pointers_to(tmp_path, MEGATRON, MEGATRON_LATEST)
    assert list(moved.items()) == [(LATEST, MEGATRON), (MEGATRON_LATEST, "6")] and notes == []
