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


@pytest.mark.parametrize("fault", ["another run", "no run", "one time", "no manifest", "no tags"])
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
        (folder / MEGATRON_LATEST).write_text("7")
    with pytest.raises(NotFoundError, match="name different tags") as refused:
        find_tag(folder)
    named = "iter_0000007" if fault == "no tags" else MEGATRON
    assert named in refused.value.found and "tag=" in refused.value.what_to_do
    assert named_or_note(folder).tag == "" and named in named_or_note(folder).note
    assert find_tag(folder, MEGATRON).folder == folder / MEGATRON


@pytest.mark.parametrize(("lost", "kept"), [(LATEST, MEGATRON_LATEST), (MEGATRON_LATEST, LATEST)])
def test_a_pointer_to_a_lost_tag_names_nothing_beside_another(
    tmp_path: Path, lost: str, kept: str
) -> None:
    folder = run(tmp_path, 100, 106)
    (folder / lost).write_text("gone" if lost == LATEST else "7")
    found = find_tag(folder)
    assert found.folder.name == (DS if kept == LATEST else MEGATRON)
    (note,) = found.notes
    assert note.startswith(f"`{kept}` names ") and note.endswith("which is not there")


def of_program(folder: Path, *steps: int) -> Path:
    """What Megatron-DeepSpeed's program leaves: both pointers for one tag, and no manifest."""
    for step in steps:
        save(folder, f"global_step{step}", f"global_step{step}")
        (folder / f"global_step{step}" / FILE_NAME).unlink(missing_ok=True)
    (folder / LATEST).write_text(f"global_step{steps[-1]}")
    (folder / MEGATRON_LATEST).write_text(str(steps[-1]))
    return folder


def test_two_spellings_of_one_step_agree(tmp_path: Path) -> None:
    assert newest_named(of_program(tmp_path, 4, 6)) == Named(LATEST, "global_step6")
    (tmp_path / LATEST).unlink()
    assert newest_named(tmp_path) == Named(MEGATRON_LATEST, "global_step6")


def test_where_they_name_two_steps_its_load_follows_latest(tmp_path: Path) -> None:
    of_program(tmp_path, 4, 6)
    (tmp_path / LATEST).write_text(DS)  # as somebody who goes back writes it
    found = find_tag(tmp_path)
    assert found.folder.name == DS and "global_step6" in found.notes[0]


def test_a_save_moves_the_programs_count_with_it(tmp_path: Path) -> None:
    of_program(tmp_path, 4, 6)
    moved, notes = pointers_to(tmp_path, "global_step8", LATEST)
    assert moved == {MEGATRON_LATEST: "8", LATEST: "global_step8"} and notes == []


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
