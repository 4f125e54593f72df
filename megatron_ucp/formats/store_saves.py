"""Saves and outputs in an object store: whole or not there, without renames and without locks.

A save claims its tag by an object that is made by one alone (`CLAIM`). Where that is there
already, or the tag is, the objects go into a folder of their own in the tag: nobody can say whether
who claimed it lives, and so nobody's objects are touched. The manifest is written last, under the
condition that it is still the one of the beginning; with it the save is there.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.errors import RankError, SaveError, StoreError, UcpError
from megatron_ucp.formats.store import (
    AGAIN,
    BESIDE,
    CLAIM,
    CLEAN_UP,
    COMMITS,
    STORED_IN,
    StorePath,
    delete,
    keeps_conditions,
    level_of,
    object_or_none,
    objects_below,
    put_if,
    put_object,
    stored_in,
)
from megatron_ucp.formats.tags import OF_A_SAVE


def _require_conditions(folder: StorePath) -> None:
    """Raises SaveError where the store ignores conditions: nothing tells two writers apart."""
    if not keeps_conditions(folder):
        raise SaveError(
            "this object store ignores the conditions of a write, so two jobs could overwrite each "
            "other's saves without a word",
            file=folder,
            expected="a refusal of the second of two writes of a new object",
            found="both were taken",
            fix="use the store's own protocol (gs:// in place of s3://), or another store",
            id="object-store",
        )


@dataclass
class Attempt:
    """One save into a tag, or one output, on its way: the objects go below `aside`. `base` is the
    version of the manifest that it takes the place of, `older` what that one lists."""

    tag: StorePath
    aside: StorePath
    has_claim: bool
    base: str | None
    older: tuple[StorePath, ...] = ()
    is_committed: bool = False
    is_open: bool = False  # the last write was asked for, and nobody knows whether it was made

    def commit(self, data: bytes, names: Iterable[str], name: str = FILE_NAME) -> None:
        """Writes the object that makes the tag whole, with the files of these `names`. Raises
        SaveError where another save did meanwhile, StoreError."""
        self.is_open = True
        is_made = put_if(self.tag / name, data, self.base)
        self.is_open = False
        if not is_made:
            raise SaveError(
                "another job has saved into this tag meanwhile; what it saved is there",
                file=self.tag,
                expected="one at a time",
                found="its manifest is another one than at the beginning",
                fix="give another tag, or end the other job",
                id="folder-in-use",
            )
        self.is_committed = True
        own = {self.tag / name, *(self.aside / one for one in names)}
        self.older = tuple(path for path in self.older if path not in own)

    def end(self, is_known: bool) -> None:
        """Removes what does not count: this save's objects where it was not committed, else those
        that it replaced; and the claim, unless somebody may still write below it (not
        `is_known`): such objects would look like files that nobody else wrote. Raises
        StoreError."""
        if self.is_open:  # if the manifest is there after all, its objects are too
            return
        if self.is_committed:
            delete(self.older)
        else:
            delete(self._own_objects())
        if self.has_claim and (self.is_committed or is_known):
            delete([self.tag / CLAIM, self.tag / BESIDE])

    def _own_objects(self) -> list[StorePath]:
        if self.aside != self.tag:
            return [path for path, _ in objects_below(self.aside)]
        return [
            path
            for path, _ in objects_below(self.tag)
            # a manifest that is there is another save's, which came first
            if not _is_of_another(path, self.tag, "") and path.name not in COMMITS
        ]


def _is_of_another(path: StorePath, tag: StorePath, below: str) -> bool:
    """Whether an object of a tag is the claim, or lies in the folder of a save that is not in
    `below`."""
    first = path.relative_to(tag).parts[0]
    return first in (CLAIM, BESIDE) or (first.startswith(AGAIN) and f"{first}/" != below)


_ATTEMPTS: dict[StorePath, Attempt] = {}  # of this process, by `aside`


def attempt_at(aside: StorePath) -> Attempt:
    """The attempt of this process whose objects go below a folder."""
    return _ATTEMPTS[aside]


@contextmanager
def attempt(tag: StorePath) -> Iterator[Attempt]:
    """A save into a tag, claimed; behind the block what does not count is removed. Raises
    SaveError, StoreError."""
    _require_conditions(tag.parent)
    there = {path: path.relative_to(tag).parts[0] for path, _ in objects_below(tag)}
    has_marker = there.pop(tag / BESIDE, None) is not None
    bare = [path for path, first in there.items() if not first.startswith(AGAIN)]
    if {*there.values()} & {CLAIM, *COMMITS}:
        bare = []
    if bare:
        put_object(tag / BESIDE, b"")  # or they would look like parts of this save
    elif has_marker:
        delete([tag / BESIDE])
    number, has_claim = _claim(tag, "saves")
    manifest = object_or_none(tag / FILE_NAME)
    is_free = has_claim and manifest is None and not there
    aside = tag if is_free else tag / f"{AGAIN}{number}"
    older = [path for path in bare if OF_A_SAVE.fullmatch(there[path])]
    older = older if manifest is None else _objects_of(tag, manifest[0])
    base = manifest and manifest[1]
    with _ending(Attempt(tag, aside, has_claim, base, tuple(older))) as one:
        yield one


@contextmanager
def output(folder: StorePath, replaces: bool) -> Iterator[Attempt]:
    """An output, claimed; as `attempt`, but its objects have their plain names: what `replaces`
    another output takes that one's commit away first. Raises SaveError also where the name is
    taken."""
    _require_conditions(folder.parent)
    _, has_claim = _claim(folder, "writes")
    if not has_claim:
        raise _is_claimed(folder)
    older = [path for path, _ in objects_below(folder) if path != folder / CLAIM]
    if older and not replaces:
        delete([folder / CLAIM])
        raise SaveError(
            "the output exists by now",
            file=folder,
            expected="a folder that does not exist yet",
            found=f"{len(older)} objects",
            fix="give another name, or remove it",
            id="",
        )
    delete(folder / name for name in COMMITS)
    with _ending(Attempt(folder, folder, True, None, tuple(older))) as one:
        yield one


def _claim(tag: StorePath, doing: str) -> tuple[str, bool]:
    """The number of a save, and whether it is the one that claims a tag."""
    number = uuid.uuid4().hex[:12]
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    who = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
    claim = json.dumps({"doing": doing, "save": number, **who}).encode()
    return number, put_if(tag / CLAIM, claim, None)


@contextmanager
def _ending(one: Attempt) -> Iterator[Attempt]:
    _ATTEMPTS[one.aside] = one
    is_known = True
    try:
        yield one
    except (RankError, KeyboardInterrupt):
        is_known = False
        raise
    finally:
        if _ATTEMPTS.get(one.aside) is one:  # else a later one of this process has its place
            del _ATTEMPTS[one.aside]
        with suppress(StoreError):  # what is left is shown by `ls`
            one.end(is_known)


def _is_claimed(tag: StorePath) -> SaveError:
    return SaveError(
        "another job writes this folder, or was killed while it did",
        file=tag,
        expected="one at a time",
        found=_claimed_by(claim_of(tag)),
        fix=f"give another name, or wait for it; {CLEAN_UP}",
        id="folder-in-use",
    )


def claim_of(tag: StorePath) -> dict[str, Any]:
    """What the claim of a tag says; nothing where there is none."""
    there = object_or_none(tag / CLAIM)
    with suppress(ValueError):
        said = json.loads(there[0]) if there is not None else {}
        return said if isinstance(said, dict) else {}
    return {}


def _claimed_by(claim: Mapping[str, Any]) -> str:
    pid, host, since = (claim.get(key, "?") for key in ("pid", "host", "since"))
    return f"process {pid} on {host} claims it, since {since}"


RECOVERY_SCRIPT = "zero_to_fp32.py"  # which DeepSpeed puts beside its files, and no manifest lists


def _objects_of(tag: StorePath, manifest: bytes) -> list[StorePath]:
    """The objects that a manifest lists, but itself."""
    with suppress(UcpError):
        read = from_json(manifest, str(tag / FILE_NAME))
        below = str(read.run.get(STORED_IN, ""))
        names = [*(entry.name for entry in read.files), RECOVERY_SCRIPT]
        return [tag / below / name for name in names]
    return []


def move_pointer(path: StorePath, text: str, unless: Callable[[], bool]) -> bool:
    """Lets a pointer name another tag; whether it does: not where `unless` says so of what it names
    now. Who moves it meanwhile is asked again. Raises StoreError."""
    for _ in range(_RACES):
        there = object_or_none(path)
        if there is not None and there[0].decode(errors="replace").strip() == text.strip():
            return True
        if unless():
            return False
        if put_if(path, text.encode(), there and there[1]):
            return True
    raise StoreError(
        "the pointer could not be moved: others move it again and again",
        file=path,
        fix="let one job save into this folder",
    )


_RACES = 50


def remove_tag(tag: StorePath, is_ours: Callable[[], str]) -> str:
    """Removes a tag: the manifest first, so that it never looks whole. `is_ours` says, once nobody
    saves into it, why it stays. Returns a line. Raises StoreError."""
    if not _claim(tag, "removes")[1]:
        return f"kept {tag.name}: {_claimed_by(claim_of(tag))}; {CLEAN_UP}"
    if reason := is_ours():
        delete([tag / CLAIM])
        return f"kept {tag.name}: {reason}"
    below = stored_in(tag / FILE_NAME)
    delete([tag / FILE_NAME])
    delete(path for path, _ in objects_below(tag) if not _is_of_another(path, tag, below))
    delete([tag / CLAIM])
    return f"removed {tag.name}"


@dataclass(frozen=True)
class LeftOver:
    """What a save left that was not finished, or has written so far: its objects, and who claims
    the tag."""

    tag: StorePath
    objects: tuple[StorePath, ...]
    size_bytes: int
    claim: Mapping[str, Any]


def left_overs(folder: StorePath) -> list[LeftOver]:
    """What lies in the tags of a folder, or in the folder itself, and belongs to no whole save.
    Raises StoreError."""
    below = [one for one in folder.iterdir() if one.is_dir()]
    return [one for tag in (folder, *below) if (one := _left_in(tag)) is not None]


def _left_in(tag: StorePath) -> LeftOver | None:
    folders, files = level_of(tag)
    if CLAIM not in files and not any(name.startswith(AGAIN) for name in folders):
        return None
    there = {*objects_that_count(tag)}
    left = [
        (path, status)
        for path, status in objects_below(tag)
        if path not in there and _is_of_a_save(path.relative_to(tag).parts[0])
    ]
    if not left:
        return None
    size = sum(status.st_size for _, status in left)
    return LeftOver(tag, tuple(path for path, _ in left), size, claim_of(tag))


def _is_of_a_save(name: str) -> bool:
    """Whether saves write something of this name into a tag. What else is there is a user's."""
    return name in (CLAIM, BESIDE) or name.startswith(AGAIN) or bool(OF_A_SAVE.fullmatch(name))


def objects_that_count(tag: StorePath) -> Iterator[StorePath]:
    """The objects of a tag's whole save; none where it has none. Raises StoreError."""
    _, files = level_of(tag)
    is_whole = CLAIM not in files or any(name in files for name in (BESIDE, *COMMITS))
    below = stored_in(tag / FILE_NAME) if FILE_NAME in files else ""
    for path, status in objects_below(tag) if is_whole else ():
        first = path.relative_to(tag).parts[0]
        if below:
            counts = f"{first}/" == below or first == FILE_NAME
        else:
            counts = first not in (CLAIM, BESIDE) and not first.startswith(AGAIN)
        if counts:
            yield path.seen(status)


def notes_of_left_overs(folder: StorePath) -> list[str]:
    """A note for each save that was not finished, or is on its way. Raises StoreError."""
    notes: list[str] = []
    for one in left_overs(folder):
        who = f"; {_claimed_by(one.claim)}" if one.claim else ""
        amount = f"{len(one.objects)} objects, {one.size_bytes:,} bytes"
        notes.append(f"{one.tag.name}: left over of a save that was not finished: {amount}{who}")
    return [*notes, CLEAN_UP] if notes else []


def remove_left_overs(folder: StorePath) -> list[str]:
    """Removes `left_overs`; a line about each. Raises StoreError."""
    lines: list[str] = []
    for one in left_overs(folder):
        last = one.tag / CLAIM, one.tag / BESIDE  # without them others would look like nobody's
        delete(path for path in one.objects if path not in last)
        delete(last)
        lines.append(f"removed {len(one.objects)} objects that were left over in {one.tag}")
    return lines
