"""The tag of a folder to resume from: the newest one that is whole."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.errors import NotFoundError, UcpError
from megatron_ucp.formats.base import Told
from megatron_ucp.formats.pointers import Named, newest_named, saved_at
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.tags import (
    has_state_files,
    has_tags,
    is_unfinished,
    require_folder,
    state_files,
)
from megatron_ucp.reshard.findings import in_short


@dataclass(frozen=True)
class Newest:
    """The tag to resume from, and what was passed over on the way to it, with the reason."""

    folder: Path
    passed_over: tuple[str, ...]


def newest_whole(
    path: str | Path,
    specs: Callable[[Path], Mapping[str, ParamSpec] | None] = lambda _: None,
    names: Mapping[str, str] | None = None,
) -> Newest:
    """The tag to resume from: the one that the pointer names if it is whole, else the newest that
    is. Whole: every file is there, with the size, directory, step and mesh that belong to it;
    tensor bytes are not read.

    Args:
        path: The folder above the tags; or the one above several such folders, as trainers make
            them (`out` with `out/checkpoint-400`), of which the one that was saved last counts.
        specs: What gives the parameters of a tag folder, where neither its files nor a family say
            them.
        names: Names in a pipeline, with those of the model.

    Returns:
        The folder of the tag, and what was passed over, with the reason.

    Raises:
        NotFoundError: Where no tag is whole; it names each and what is wrong with it.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.newest_whole("runs/llama").folder.name
        'global_step80'
    """
    path = require_folder(path)
    if not has_tags(path) and (below := [one for one in path.iterdir() if has_tags(one)]):
        return _newest_of(path, below, specs, names)
    named = newest_named(path) or Named("", "")
    passed = [named.note] if named.note else []
    tags = {p.name: time_of_save(p) for p in path.iterdir() if p.is_dir() and has_state_files(p)}
    if named.tag and named.tag not in tags:
        passed.append(f"{named.tag}: `{named.pointer}` names it, and it is not there")
    for tag in sorted(tags, key=lambda tag: (tag == named.tag, tags[tag], tag), reverse=True):
        try:
            check_whole(path / tag, specs(path / tag), names)
        except UcpError as error:
            passed.append(f"{tag}: {in_short(error)}")
            continue
        newer = [
            f"{other}: newer, but `{named.pointer}` names {tag}"
            for other in tags
            if tag == named.tag and tags[other] > tags[tag]
        ]
        return Newest(path / tag, (*passed, *sorted(newer), *unfinished(path)))
    raise NotFoundError(
        "no tag in this folder is whole",
        file=path,
        expected="a tag with all its files",
        found="; ".join(passed) or "no tag",
        fix="restore the files of one of them",
        id="missing-file",
    )


def _newest_of(
    path: Path,
    folders: Sequence[Path],
    specs: Callable[[Path], Mapping[str, ParamSpec] | None],
    names: Mapping[str, str] | None,
) -> Newest:
    """The newest of several folders with tags: of each its own."""
    found: dict[Path, Newest] = {}
    passed: list[str] = []
    for folder in sorted(folders):
        try:
            newest, named = newest_whole(folder, specs, names), newest_named(folder)
        except UcpError as error:
            passed.append(f"{folder.name}: {in_short(error)}")
            continue
        # who resumes from the folder follows its pointer: without it the save had not ended
        if named is not None and newest.folder == folder / named.tag:
            found[folder] = newest
        else:
            passed.append(f"{folder.name}: no file names its newest whole tag")
    if not found:
        raise NotFoundError(
            "no checkpoint below this folder is whole",
            file=path,
            expected="a folder with a tag that has all its files",
            found="; ".join(passed),
            fix="restore the files of one of them",
            id="missing-file",
        )
    last = max(found, key=lambda folder: (time_of_save(found[folder].folder), folder))
    return Newest(found[last].folder, (*passed, *found[last].passed_over))


def unfinished(path: Path) -> list[str]:
    """A note for each save in a folder that was not finished."""
    names = sorted(one.name for one in path.iterdir() if is_unfinished(one.name))
    return [f"{name}: a save that was not finished" for name in names]


def check_whole(
    folder: Path,
    specs: Mapping[str, ParamSpec] | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Raises a UcpError for a tag folder that lacks a file, or holds one that is damaged or of
    another save."""
    with open_checkpoint(folder, told=Told(specs=specs, names=names)) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)
        checkpoint.check_beside()


def time_of_save(folder: Path) -> float:
    """Seconds since the epoch: as the manifest says; for a folder without one the time of its
    newest state file."""
    said = saved_at(folder)
    return said if said is not None else max(path.stat().st_mtime for path in state_files(folder))
