"""The way from a path that a user gives to a tag folder: which tag the pointers name, and what
else lies there."""

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from megatron_ucp.core.manifest import FILE_NAME, RUN, Manifest
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.errors import NotFoundError, StoreError, UcpError, UsageError, some_of
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.store import (
    CLEAN_UP,
    Location,
    StorePath,
    folder_at,
    is_left_over,
    location,
    look_once,
)

# ---- pointers
#
# The files that name the newest tag of a run, DeepSpeed's and Megatron's. Megatron-DeepSpeed writes
# both at each save: `latest` has the tag of the step, which its load follows, and
# `latest_checkpointed_iteration.txt` has the number of that step.


LATEST, MEGATRON_LATEST = "latest", "latest_checkpointed_iteration.txt"
_RELEASE = "release"  # what Megatron names weights without an iteration
_MAX_NAME_CHARS = 255


@dataclass(frozen=True)
class Named:
    """The tag that a folder names as its newest one, and the pointer that does; `note` says what
    the other pointer names."""

    pointer: str
    tag: str
    note: str = ""


def iteration_name(iteration: int) -> str:
    """The tag folder of an iteration, as Megatron names it."""
    return f"iter_{iteration:07d}"


def iteration_of_name(name: str) -> int | None:
    """The iteration of a tag folder that Megatron named; None for another name."""
    found = re.fullmatch(r"iter_(\d{7,18})", name, re.ASCII)
    return int(found[1]) if found else None


def pointers_in(folder: Location) -> dict[str, str | None]:
    """The pointers of a folder, and the tag that each names; None of one that names no tag."""
    there = [name for name in (LATEST, MEGATRON_LATEST) if (folder / name).is_file()]
    return {name: _tag_or_none(folder / name) for name in there}


def newest_named(folder: Location) -> Named | None:
    """The tag that the pointers name; None where there is none. A pointer to a tag that is not
    there does not count where the other one's is. Of two saves of one run that is the later one.
    Raises NotFoundError for a pointer that names no tag, and for two that disagree otherwise: which
    of them counts is the user's to say."""
    tags = {name: _tag_of(folder / name) for name in pointers_in(folder)}
    if not tags:
        return None
    if len({*tags.values()}) == 1:
        pointer, tag = next(iter(tags.items()))
        return Named(pointer, tag)
    there = [name for name, tag in tags.items() if (folder / tag).is_dir()]
    if _is_of_deepspeed(tags[MEGATRON_LATEST]) and LATEST in there:
        there = [LATEST]  # which the program's load follows, and not its own count
    if len(there) == 1:
        (other,) = tags.keys() - {*there}
        note = f"`{there[0]}` names {tags[there[0]]}; `{other}` names {tags[other]}"
        missing = "" if (folder / tags[other]).is_dir() else ", which is not there"
        return Named(there[0], tags[there[0]], note + missing)
    saves = {name: _manifest_of(folder / tag) for name, tag in tags.items()}
    runs = {manifest.run.get(RUN) if manifest else None for manifest in saves.values()}
    times = {name: manifest.saved_at or 0.0 for name, manifest in saves.items() if manifest}
    if None not in runs and len(runs) == 1 and len({*times.values()}) == 2:
        last, other = sorted(tags, key=times.__getitem__, reverse=True)
        note = f"`{last}` names {tags[last]}, the later save; `{other}` names {tags[other]}"
        return Named(last, tags[last], note)
    raise NotFoundError(
        "the pointers of this folder name different tags, and nothing says which of them counts",
        file=folder,
        expected=f"`{LATEST}` and `{MEGATRON_LATEST}` that name one tag",
        found=", ".join(f"`{name}` names {tag}" for name, tag in tags.items()),
        fix="name the tag (--tag; Python: tag=), or remove the pointer that is out of date",
        id="latest-moved",
    )


def named_or_note(folder: Location) -> Named:
    """As `newest_named`, for what looks at all tags: where no tag is named, the note says why."""
    try:
        return newest_named(folder) or Named("", "")
    except NotFoundError as error:
        return Named("", "", f"{error.problem}: {error.found}")


def pointers_to(folder: Location, tag: str, own: str) -> tuple[dict[str, str], list[str]]:
    """What each pointer of a folder says so that it names a tag: those that are there, and last of
    all the program's `own`; and lines about those that can't name it."""
    moving: dict[str, str] = {}
    notes: list[str] = []
    for name in (LATEST, MEGATRON_LATEST):
        if name == own or not (folder / name).is_file():
            continue
        named = _tag_or_none(folder / name)
        if (text := _text_for(name, tag, named)) is not None:
            moving[name] = text
        elif named is not None:
            notes.append(f"`{name}` still names {named}, as it can't name {tag}")
    return {**moving, own: _text_for(own, tag, None) or tag}, notes


def names_a_later_save(pointer: Location, manifest: Manifest) -> bool:
    """Whether a pointer names a save of the same run that was made later than that of a manifest.
    Then it does not move: that of a process that hung would lead back.

    Later is who has the later `saved_at`. That is an order and no clock: a save gets a stamp behind
    all that its process gave, and behind that of the tag which the folder names (engines/save,
    `stamp`). Steps don't decide: a run that went back to an older tag goes on from there. Saves of
    other runs are not compared: the last one is named.
    """
    tag = _tag_or_none(pointer) if pointer.is_file() else None
    if tag is None:
        return False
    named = _manifest_of(pointer.with_name(tag))
    if named is None or named.run.get(RUN) is None or named.run[RUN] != manifest.run.get(RUN):
        return False
    return (named.saved_at or 0.0) > (manifest.saved_at or 0.0)


def read_pointer(path: Location) -> str:
    """The text of a file like `latest`. Raises NotFoundError for one that names no folder."""
    # some editors add a mark
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        text = file.read(_MAX_NAME_CHARS + 2).strip()
    if (
        not text
        or "/" in text
        or "\0" in text
        or text in (".", "..")
        or len(text) > _MAX_NAME_CHARS
    ):
        raise _bad_pointer(path, "the name of a folder", text)
    return text


def _text_for(pointer: str, tag: str, named: str | None) -> str | None:
    """How a pointer names a tag; None where it can't. Megatron's names one of DeepSpeed's where
    that is what it `named` so far: Megatron-LM would look for another folder."""
    if pointer == LATEST or tag == _RELEASE:
        return tag
    if named is not None and _is_of_deepspeed(named) and _is_of_deepspeed(tag):
        return str(int(tag.removeprefix(_STEP)))
    iteration = iteration_of_name(tag)
    return None if iteration is None else str(iteration)


_STEP = "global_step"  # how DeepSpeed's names of tags begin


def _is_of_deepspeed(tag: str) -> bool:
    return re.fullmatch(rf"{_STEP}\d{{1,18}}", tag, re.ASCII) is not None


def _tag_of(pointer: Location) -> str:
    """The tag that a pointer names: Megatron's by its iteration, whose folder may have DeepSpeed's
    spelling. Raises NotFoundError."""
    text = read_pointer(pointer)
    if pointer.name == LATEST or text == _RELEASE:
        return text
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise _bad_pointer(pointer, f"an iteration, or {_RELEASE}", text)
    name, deepspeeds = iteration_name(int(text)), f"{_STEP}{int(text)}"
    is_deepspeeds = not pointer.with_name(name).is_dir() and pointer.with_name(deepspeeds).is_dir()
    return deepspeeds if is_deepspeeds else name


def _tag_or_none(pointer: Location) -> str | None:
    with suppress(NotFoundError):
        return _tag_of(pointer)
    return None


def _bad_pointer(path: Location, expected: str, text: str) -> NotFoundError:
    return NotFoundError(
        "the pointer to the newest tag can't be used",
        file=path,
        expected=expected,
        found=repr(text[:80]),
        fix="name the tag (--tag; Python: tag=), or write its name into the file",
        id="no-such-tag",
    )


def _manifest_of(tag: Location) -> Manifest | None:
    """The manifest in a tag folder; None where there is none that can be read."""
    path = tag / FILE_NAME
    try:
        return from_json(path.read_bytes(), str(path))
    except StoreError:
        raise
    except (OSError, UcpError):
        return None


def saved_at(tag: Location) -> float | None:
    """When a tag was saved, in seconds since the epoch, as its manifest says; None where nothing
    says it."""
    manifest = _manifest_of(tag)
    return None if manifest is None else manifest.saved_at


# ---- tags
#
# The way from a path that a user gives to a tag folder, whatever program saved there.


LATEST_UNIVERSAL = "latest_universal"  # of converted folders: counts where nothing else does
POINTERS = (LATEST, MEGATRON_LATEST, LATEST_UNIVERSAL)
SAVING = ".saving"  # how the name of a folder ends that is not finished
_STATE_FOLDER = re.compile(r"mp_rank_\d\d(_\d\d\d){0,2}|pytorch_model_fsdp_\d+")
AS_SAFETENSORS = "save the model again: save_pretrained of transformers writes safetensors"


@dataclass(frozen=True)
class FoundTag:
    """The folder that a path leads to; `notes` say which other way was not taken."""

    folder: Location
    notes: tuple[str, ...] = ()


def find_tag(path: str | os.PathLike[str], tag: str | None = None) -> FoundTag:
    """The tag folder for a path that is a tag folder or the folder above it, whose pointer to the
    newest tag (see `pointers_in`) is always followed.

    Raises NotFoundError that lists what is there instead.
    """
    path = require_folder(path)
    _require_finished(path)
    if tag is not None:
        if not isinstance(tag, str) or not tag or "/" in tag or tag in (".", ".."):
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
    pickles, below = weights_as_pickles(folder_at(path)), checkpoints_below(path)
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


def checkpoints_below(path: Location) -> list[str]:
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


def require_no_pointer(folder: Location) -> None:
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


def require_folder(path: Any) -> Location:
    """A path that is a folder. Raises UsageError for what is no path, NotFoundError for one where
    there is no folder."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            "this is no path of a checkpoint",
            expected="a folder",
            found=repr(path)[:200],
            fix="give the path of a folder as text",
        )
    path = location(path)
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


def _meant(path: Location) -> str:
    """The folder whose name is nearest to one that is not there, as the beginning of an advice."""
    near: list[str] = []
    if str(path).startswith("~"):
        return "a ~ in quotes stays as it is: give the path in full. Else "
    with suppress(OSError):
        beside = [one.name for one in path.absolute().parent.iterdir() if one.is_dir()]
        near = get_close_matches(path.name, beside, n=1)
    return f"did you mean {path.parent / near[0]}? Else " if near else ""


def weights_as_pickles(folder: Folder) -> str:
    """The first of the files in which transformers once kept a model; empty where there is none."""
    return next((name for name in folder.names() if fnmatch(name, "pytorch_model*.bin")), "")


def is_unfinished(name: str) -> bool:
    """Whether a folder of that name is a save on its way, or what is left of one."""
    return name.startswith(".") and name.endswith(SAVING)


def _require_finished(path: Location) -> None:
    """Raises NotFoundError for a save on its way, or what is left of one."""
    if is_unfinished(path.absolute().name) or is_left_over(path):
        raise NotFoundError(
            "this is a save that was not finished",
            file=path,
            expected="a tag folder",
            found=path.name,
            fix="load another tag; "
            + (CLEAN_UP if isinstance(path, StorePath) else "the next save removes this folder"),
            id="missing-file",
        )


def _tag_folder(path: Location, tag: str, what: str) -> Location:
    if not (path / tag).is_dir():
        raise NotFoundError(
            f"{what} does not exist",
            file=path / tag,
            expected="a folder",
            found=_tags(path),
            fix="name a tag that exists (--tag; Python: tag=)",
            id="no-such-tag",
        )
    _require_finished(path / tag)
    return path / tag


def _tags(path: Location) -> str:
    found = sorted(p.name for p in path.iterdir() if p.is_dir() and has_state_files(p))
    return "tags: " + ", ".join(found) if found else "no tag folder with state files"


def content_id(folder: Location) -> str:
    """What a tag folder is known by that no manifest gives an id: a digest of the names, sizes and
    times of its files. A copy that keeps times has the same. Raises OSError."""
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        found = path.stat()
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def nothing_there(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is missing, or holds neither a pointer nor anything like a checkpoint: a
    run's first start. One with checkpoints in folders of it, as `out/checkpoint-10` in `out`, is no
    first start: nobody means to begin anew beside them."""
    there = location(path)

    def is_bare() -> bool:
        return (
            there.is_dir()
            and not has_tags(there)
            and not any(there.glob("*.safetensors"))  # of a Hugging Face folder
            and not weights_as_pickles(folder_at(there))
            and not any(has_tags(one) for one in there.iterdir())
        )

    return look_once(path, lambda: not there.exists() or is_bare())


def has_tags(path: Location) -> bool:
    """Whether a folder is a tag, has tags in it, or has what names one."""
    return path.is_dir() and (
        any((path / name).exists() for name in POINTERS)
        or has_state_files(path)
        or any(one.is_dir() and has_state_files(one) for one in path.iterdir())
    )


def has_state_files(path: Location) -> bool:
    """Whether a folder looks like a tag's."""
    return not is_unfinished(path.name) and holds_states(folder_at(path))


def holds_states(folder: Folder) -> bool:
    """Whether a folder has what every tag of some format has."""
    return any(_is_state(folder, name) for name in folder.names())


def state_files(path: Location) -> list[Location]:
    """What of a folder every tag of some format has."""
    folder = folder_at(path)
    return [path / name for name in folder.names() if _is_state(folder, name)]


def _is_state(folder: Folder, name: str) -> bool:
    if any(name.endswith(ending) for ending in STATE_FILES):
        return True
    return bool(_STATE_FOLDER.fullmatch(name)) and folder.is_folder(name)


# How a file ends that every tag of some format has: DeepSpeed's state files, the index of torch's
# distributed checkpoints. (Megatron's older format and Accelerate have folders, of
# `_STATE_FOLDER`.)
STATE_FILES = ("_states.pt", ".metadata")
# What saves write into a tag: anything else in it is a user's, and stays.
OF_A_SAVE = re.compile(
    r".*_states\.pt|ucp_.*|__\d+_\d+\.distcp|\.metadata|metadata\.json|common\.pt"
    r"|mp_rank_\d\d(_\d\d\d){0,2}"
)
