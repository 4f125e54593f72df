"""The files that name the newest tag of a run, DeepSpeed's and Megatron's, and which of the two is
followed where they disagree."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ucp.core.manifest import FILE_NAME, RUN, Manifest
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.errors import NotFoundError, UcpError

LATEST, MEGATRON_LATEST = "latest", "latest_checkpointed_iteration.txt"
_RELEASE = "release"  # what Megatron names weights without an iteration
_MAX_NAME_CHARS = 255
# A manifest that is so much younger than its save came here by a copy that kept no times.
_COPIED_S = 60.0


@dataclass(frozen=True)
class Named:
    """The tag that a folder names as its newest one, and the pointer that does; `note` says which
    other one was not followed, and why."""

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


def newest_named(folder: Path) -> Named | None:
    """The pointer that was written last, and its tag; None where there is none. Raises
    NotFoundError for one that names none."""
    there = [name for name in (LATEST, MEGATRON_LATEST) if (folder / name).is_file()]
    if not there:
        return None
    if len(there) == 1:
        return Named(there[0], _tag_of(folder / there[0]))
    tags = {name: _tag_or_none(folder / name) for name in there}
    if tags[LATEST] == tags[MEGATRON_LATEST] is not None:
        return Named(LATEST, _tag_of(folder / LATEST))
    return _followed(folder, tags)


def pointers_to(folder: Path, tag: str, own: str) -> tuple[dict[str, str], list[str]]:
    """What each pointer of a folder says so that it names a tag: those that are there, and last of
    all the program's `own`; and lines about those that can't name it."""
    moving: dict[str, str] = {}
    notes: list[str] = []
    for name in (LATEST, MEGATRON_LATEST):
        text = _text_for(name, tag)
        if name == own or not (folder / name).is_file():
            continue
        if text is not None:
            moving[name] = text
        elif (named := _tag_or_none(folder / name)) is not None:
            notes.append(
                f"`{name}` still names {named}, as it can't name {tag}: `{own}`, which is newer, "
                "is followed"
            )
    return {**moving, own: _text_for(own, tag) or tag}, notes


def names_a_later_save(pointer: Path, manifest: Manifest) -> bool:
    """Whether a pointer names a save of the same run that was made later than that of a manifest.
    Then it does not move: that of a process that hung would lead back.

    Later is who has the later `saved_at`. That is an order and no clock: a save gets a stamp behind
    all that its process gave, and behind that of the tag which the folder names (engines/saves,
    `stamp`). Steps don't decide: a run that went back to an older tag goes on from there. Saves of
    other runs are not compared: the last one is named.
    """
    tag = _tag_or_none(pointer) if pointer.is_file() else None
    if tag is None:
        return False
    path = pointer.with_name(tag) / FILE_NAME
    with suppress(OSError, UcpError):
        named = from_json(path.read_bytes(), str(path))
        is_same_run = named.run.get(RUN) == manifest.run.get(RUN) is not None
        return is_same_run and (named.saved_at or 0.0) > (manifest.saved_at or 0.0)
    return False


def read_pointer(path: Path) -> str:
    """The text of a file like `latest`. Raises NotFoundError for one that names no folder."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:  # some editors add a mark
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


def _text_for(pointer: str, tag: str) -> str | None:
    """How a pointer names a tag; None where it can't."""
    if pointer == LATEST or tag == _RELEASE:
        return tag
    iteration = iteration_of_name(tag)
    return None if iteration is None else str(iteration)


def _tag_of(pointer: Path) -> str:
    """The tag that a pointer names. Raises NotFoundError."""
    text = read_pointer(pointer)
    if pointer.name == LATEST or text == _RELEASE:
        return text
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise _bad_pointer(pointer, f"an iteration, or {_RELEASE}", text)
    return iteration_name(int(text))


def _tag_or_none(pointer: Path) -> str | None:
    with suppress(NotFoundError):
        return _tag_of(pointer)
    return None


def _bad_pointer(path: Path, expected: str, text: str) -> NotFoundError:
    return NotFoundError(
        "the pointer to the newest tag can't be used",
        file=path,
        expected=expected,
        found=repr(text[:80]),
        fix="name the tag (--tag; Python: tag=), or write its name into the file",
        id="no-such-tag",
    )


# ------------------------------------------------ which one


def _followed(folder: Path, tags: dict[str, str | None]) -> Named:
    """The pointer that was written last. Where a copy lost these times, or they are the same, that
    of the newer save; else `latest`. Raises NotFoundError where it names no tag."""
    written = {name: (folder / name).stat().st_mtime_ns for name in tags}
    saved = {name: saved_at(folder / tag) for name, tag in tags.items() if tag is not None}
    known = {name: time for name, time in saved.items() if time is not None}
    is_lost = _is_copy(folder, tags, known) and not _since(folder, tags)
    is_newer = written[MEGATRON_LATEST] > written[LATEST]
    why = "was written later"
    if is_lost or written[MEGATRON_LATEST] == written[LATEST]:
        is_newer = len(known) == len(tags) and known[MEGATRON_LATEST] > known[LATEST]
        why = "is of the newer save, as the files' times say nothing"
    last, other = (MEGATRON_LATEST, LATEST) if is_newer else (LATEST, MEGATRON_LATEST)
    tag = _tag_of(folder / last)
    names = tags[other] or "no tag"
    return Named(last, tag, f"`{last}`, which {why}, names {tag}; `{other}` names {names}")


def saved_at(tag: Path) -> float | None:
    """When a tag was saved, in seconds since the epoch, as its manifest says; None where nothing
    says it."""
    path = tag / FILE_NAME
    with suppress(OSError, UcpError):
        return from_json(path.read_bytes(), str(path)).saved_at
    return None


def _is_copy(folder: Path, tags: dict[str, str | None], saved: dict[str, float]) -> bool:
    """Whether the manifests of all tags that are named are much younger than their saves."""
    if len(saved) < len(tags):
        return False
    ages = [
        (folder / (tag or "") / FILE_NAME).stat().st_mtime - saved[name]
        for name, tag in tags.items()
    ]
    return min(ages) > _COPIED_S


def _since(folder: Path, tags: dict[str, str | None]) -> bool:
    """Whether one of the pointers was written when the copy was done."""
    times = sorted((folder / name).stat().st_mtime for name in tags)
    last = max((path.stat().st_mtime for path in folder.iterdir() if path.is_dir()), default=0.0)
    return times[-1] > max(last, times[0]) + _COPIED_S
