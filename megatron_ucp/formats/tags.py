"""The way from a path that a user gives to a tag folder, whatever program saved there."""

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from megatron_ucp.errors import NotFoundError, UsageError, some_of
from megatron_ucp.formats.pointers import LATEST, MEGATRON_LATEST, newest_named, read_pointer

LATEST_UNIVERSAL = "latest_universal"  # of converted folders: counts where nothing else does
POINTERS = (LATEST, MEGATRON_LATEST, LATEST_UNIVERSAL)
SAVING = ".saving"  # how the name of a folder ends that is not finished
_LEGACY_FOLDER = re.compile(r"mp_rank_\d\d(_\d\d\d){0,2}")
AS_SAFETENSORS = "save the model again: save_pretrained of transformers writes safetensors"


@dataclass(frozen=True)
class FoundTag:
    """The folder that a path leads to; `notes` say which other way was not taken."""

    folder: Path
    notes: tuple[str, ...] = ()


def tag_folder(path: str | Path, tag: str | None = None) -> Path:
    """The folder that `find_tag` finds."""
    return find_tag(path, tag).folder


def find_tag(path: str | Path, tag: str | None = None) -> FoundTag:
    """The tag folder for a path that is a tag folder or the folder above it, whose pointer to the
    newest tag (see `pointers`) is always followed.

    Raises NotFoundError that lists what is there instead.
    """
    path = require_folder(path)
    if is_unfinished(path.absolute().name):
        raise NotFoundError(
            "this is a save that was not finished",
            file=path,
            expected="a tag folder",
            found=path.name,
            fix="load another tag; the next save removes this folder",
            id="missing-file",
        )
    if tag is not None:
        if not isinstance(cast("object", tag), str) or not tag or "/" in tag or tag in (".", ".."):
            raise UsageError(
                "a tag is the plain name of a folder",
                file=path,
                expected="global_step100",
                found=repr(tag)[:200],
                fix="name a tag of this folder without a slash (--tag; Python: tag=)",
                id="no-such-tag",
            )
        return FoundTag(_tag_folder(path, tag, "the tag that was asked for"))
    if (named := newest_named(path)) is not None:
        folder = _tag_folder(path, named.tag, f"the tag that `{named.pointer}` names")
        return FoundTag(folder, (named.note,) if named.note else ())
    if has_state_files(path):
        return FoundTag(path)
    if (path / LATEST_UNIVERSAL).is_file():
        tag = read_pointer(path / LATEST_UNIVERSAL)
        return FoundTag(_tag_folder(path, tag, f"the tag that `{LATEST_UNIVERSAL}` names"))
    pickles, below = weights_as_pickles(path), checkpoints_below(path)
    if below:
        raise NotFoundError(
            "this folder holds no checkpoint, and folders below it do",
            file=path,
            expected="one of these folders",
            found=some_of([*reversed(below)]),
            fix=f"give the one that is meant; the newest is {path / below[-1]}",
            id="no-checkpoint",
        )
    raise NotFoundError(
        "this folder holds no checkpoint",
        file=path,
        expected=f"a file `{LATEST}` or `{MEGATRON_LATEST}`, or state files",
        found=pickles or _tags(path),
        fix=AS_SAFETENSORS
        if pickles
        else f"give the folder with the file `{LATEST}`, or a tag folder in it",
        id="no-checkpoint",
    )


def checkpoints_below(path: Path) -> list[str]:
    """Names of folders in a folder that hold checkpoints, as trainers lay them out; the newest is
    the last."""
    found: list[tuple[float, str]] = []
    for folder in path.iterdir():
        with suppress(OSError):
            if not folder.is_dir() or is_unfinished(folder.name) or has_state_files(folder):
                continue  # a tag is found by its own name
            if not nothing_there(folder):
                there = [folder / name for name in POINTERS if (folder / name).is_file()]
                found.append(
                    (max((one.stat().st_mtime for one in there), default=0.0), folder.name)
                )
    return [name for _, name in sorted(found)]


def require_no_pointer(folder: Path) -> None:
    """Raises UsageError for a tag, or a converted folder, with the name of a pointer: that is a
    file beside the tags, and both can't be there."""
    if folder.name in POINTERS:
        raise UsageError(
            f"`{folder.name}` is the name of a pointer, and no tag can have it",
            file=folder,
            expected="another name, such as global_step100",
            found=folder.name,
            fix=f"give another name: what is saved is found by the file `{folder.name}` then",
            id="no-such-tag",
        )


def require_folder(path: Any) -> Path:
    """A path that is a folder. Raises UsageError for what is no path, NotFoundError for one where
    there is no folder."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            "this is no path of a checkpoint",
            expected="a folder",
            found=repr(path)[:200],
            fix="give the path of a folder as text",
        )
    path = Path(path)
    if path.is_file():
        raise NotFoundError(
            "this is a file, and a folder is meant",
            file=path,
            expected="a tag folder, or the folder above it",
            found="a file",
            fix=f"give the folder: {path.parent}",
            id="not-a-folder",
        )
    if not path.is_dir():
        raise NotFoundError(
            "there is no such checkpoint folder",
            file=path,
            fix=f"{_meant(path)}check the path: it must exist on this machine, and on each one of "
            "a run",
            id="no-checkpoint",
        )
    return path


def _meant(path: Path) -> str:
    """The folder whose name is nearest to one that is not there, as the beginning of an advice."""
    near: list[str] = []
    with suppress(OSError):
        beside = [one.name for one in path.absolute().parent.iterdir() if one.is_dir()]
        near = get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.parent / near[0]}? Else " if near else ""


def weights_as_pickles(folder: Path) -> str:
    """The first of the files in which transformers once kept a model; empty where there is none."""
    return min((path.name for path in folder.glob("pytorch_model*.bin")), default="")


def is_unfinished(name: str) -> bool:
    """Whether a folder of that name is a save on its way, or what is left of one."""
    return name.startswith(".") and name.endswith(SAVING)


def _tag_folder(path: Path, tag: str, what: str) -> Path:
    if not (path / tag).is_dir():
        raise NotFoundError(
            f"{what} does not exist",
            file=path / tag,
            expected="a folder",
            found=_tags(path),
            fix="name a tag that exists (--tag; Python: tag=)",
            id="no-such-tag",
        )
    return path / tag


def _tags(path: Path) -> str:
    found = sorted(p.name for p in path.iterdir() if p.is_dir() and has_state_files(p))
    return "tags: " + ", ".join(found) if found else "no tag folder with state files"


def content_id(folder: Path) -> str:
    """What a tag folder is known by that no manifest gives an id: a digest of the names, sizes and
    times of its files. A copy that keeps times has the same. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        found = path.stat()
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def nothing_there(path: str | Path) -> bool:
    """Whether a folder is missing, or holds neither a pointer nor anything like a checkpoint: a
    run's first start."""
    path = Path(path)
    if not path.exists():
        return True
    return (
        path.is_dir()
        and not has_tags(path)
        and not any(path.glob("*.safetensors"))  # of a Hugging Face folder
        and not weights_as_pickles(path)
    )


def has_tags(path: Path) -> bool:
    """Whether a folder is a tag, has tags in it, or has what names one."""
    return path.is_dir() and (
        any((path / name).exists() for name in POINTERS)
        or has_state_files(path)
        or any(one.is_dir() and has_state_files(one) for one in path.iterdir())
    )


def has_state_files(path: Path) -> bool:
    """Whether a folder looks like a tag's."""
    return not is_unfinished(path.name) and bool(state_files(path))


def state_files(path: Path) -> list[Path]:
    """What of a folder every tag of some format has."""
    return [p for p in path.iterdir() if _is_state(p)]


def _is_state(path: Path) -> bool:
    """Whether a file is one that every tag of some format has: DeepSpeed's state files, the index
    of torch's distributed checkpoints, the folders of Megatron's legacy format."""
    if path.name.endswith("_states.pt") or path.name == ".metadata":
        return True
    return bool(_LEGACY_FOLDER.fullmatch(path.name)) and path.is_dir()
