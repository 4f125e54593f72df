"""The law of absence, as a table that makes itself: a save, what is removed of it (each file, and
each class of files that their names form), and what every verb says of the rest.

The law: where a load fails, or gives anything else than it gave of the whole save, no verb calls
the save whole and nothing is exported. Where a load gives the same, every verb does what it did
before.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME, RENAMED
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state

OURS = "ucp_"  # what this package writes beside a program's own files begins with it
_NUMBERED = re.compile(r"([A-Za-z]+(?:_[A-Za-z]+)*)[-_](\d+)")


@dataclass(frozen=True)
class Save:
    """A tag folder in the folder of its run, and what an engine of that run would tell a reader."""

    run: Path
    tag: str
    told: CallerModel = field(default_factory=CallerModel)

    @property
    def folder(self) -> Path:
        return self.run / self.tag


def linked(source: Path, run: Path, tag: str) -> Path:
    """A run with one tag, whose files are hard links to those of another folder."""
    shutil.copytree(source, run / tag, copy_function=os.link)
    (run / "latest").write_text(tag)
    return run


# ---- what is removed


def removals(folder: Path) -> dict[str, list[str]]:
    """What can be removed of a folder: every file, and every class of files that share something of
    their names: a kind, an ending, a folder, the number behind a word ("mp_rank 1"). A class that
    is another one by other words is listed once."""
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    classes: dict[str, list[str]] = {}
    for name in names:
        words = re.split("[-_]", name.rpartition("/")[2])
        found = {
            f"file {name}",
            f"all of {name.rpartition('/')[0] or 'the top'}",
            f"all named {name.rpartition('/')[2]}",
            *(f"all that end with {'_'.join(words[-count:])}" for count in (1, 2)),
            f"all like {re.sub('[0-9]+', 'N', name)}",
            *(f"all of {word} {int(number)}" for word, number in _NUMBERED.findall(name)),
            *(f"all with {word}" for word, _ in _NUMBERED.findall(name)),
        }
        for one in found:
            classes.setdefault(one, []).append(name)
    if any(name.endswith("/step.pt") for name in names):
        states = [n for n in names if n.startswith("zero/") and not n.endswith("/fp32.pt")]
        classes["all states"] = [n for n in states if n.count("/") == 2]
    out: dict[tuple[str, ...], str] = {}
    for one in sorted(classes, key=lambda one: (not one.startswith("file "), one)):
        out.setdefault(tuple(classes[one]), one)
    return {
        one: [*listed] for listed, one in out.items() if len(listed) < len(names) or len(names) < 2
    }


def remove(folder: Path, names: list[str]) -> None:
    """Removes files, and folders that are empty then."""
    for name in names:
        path = folder / name
        path.unlink()
        while (path := path.parent) != folder and not any(path.iterdir()):
            path.rmdir()


# ---- what the verbs say


def _load(save: Save, run: Path) -> str:
    """What a load reads: of every state of every parameter the bytes, and all numbers."""
    out = hashlib.sha256()
    with open_checkpoint(run / save.tag, told=save.told) as read:
        for name in read.file_names:
            read.check(name)
        read.check_beside()
        for spec in sorted(read.manifest.params, key=lambda spec: spec.name):
            for state in sorted(read.manifest.states_of(spec.name)):
                values = read_state(read, spec.name, state)
                out.update(f"{spec.name} {state} {values.dtype} {spec.shape}".encode())
                out.update(bytes(values.untyped_storage()))
            out.update(repr(sorted(read.manifest.scalars_of(spec.name).items())).encode())
        out.update(repr(sorted(read.extras.counters.items())).encode())
    return out.hexdigest()


def _raised(found: Any) -> None:
    found.raise_if_damaged()


def _tag_of(save: Save, run: Path) -> None:
    (listed,) = ucp.ls(run).tags
    if not listed.whole:
        raise UcpError(listed.wrong)


def _export(save: Save, run: Path) -> None:
    out = run.parent / "exported"
    try:
        ucp.export_hf(run / save.tag, out)
    finally:
        written = out.exists()
        shutil.rmtree(out, ignore_errors=True)
    assert written


def _convert(save: Save, run: Path) -> None:
    try:
        ucp.convert(run / save.tag, run.parent / "converted", to="universal")
    finally:
        shutil.rmtree(run.parent / "converted", ignore_errors=True)


VERBS: dict[str, Callable[[Save, Path], Any]] = {
    "verify": lambda save, run: _raised(ucp.verify(run / save.tag)),
    "verify --deep": lambda save, run: _raised(ucp.verify(run / save.tag, deep=True)),
    "ls": _tag_of,
    "newest_whole": lambda save, run: ucp.newest_whole(run),
    "inspect": lambda save, run: _complete(ucp.inspect(run / save.tag)),
    "describe": lambda save, run: ucp.describe(run / save.tag),
    "export_hf": _export,
    "fp32_state_dict": lambda save, run: ucp.fp32_state_dict(run / save.tag),
    "convert": _convert,
    "fingerprint": lambda save, run: ucp.fingerprint(run / save.tag),
}
LENIENT = {"describe"}  # gives the manifest of what is there, and says no word of whole


def _complete(found: Any) -> None:
    if "not saved" in str(found):
        raise UcpError(str(found))


def answer(ask: Callable[[Save, Path], Any], save: Save, run: Path) -> str:
    """Nothing where a verb is content, else what it says; an error that is none of ours is a fault
    by itself."""
    try:
        ask(save, run)
    except UcpError as error:
        return f"{type(error).__name__} {error.id}: {error}"
    except Exception as error:
        return f"BARE {error!r}"
    return ""


Loads = Callable[[Save, list[Path]], list[str]]


def loaded(save: Save, runs: list[Path]) -> list[str]:
    """Of each run the digest of what a load reads, or what it says."""
    return [_loaded(save, run) for run in runs]


def _loaded(save: Save, run: Path) -> str:
    try:
        return _load(save, run)
    except UcpError as error:
        return f"{type(error).__name__}: {error}"


@dataclass
class Table:
    """A save, and what was found wrong with the answers about what is left of it. `loads` is in the
    place of `loaded`: what real engines say. `spare` is what a load does without."""

    save: Save
    scratch: Path
    loads: Loads = loaded
    cases: int = 0
    spare: list[str] = field(default_factory=list[str])

    def wrong(self, only: Callable[[str], bool] = lambda one: True) -> list[str]:
        """Every breach of the law, by what was removed and the verb."""
        found = {what: names for what, names in removals(self.save.folder).items() if only(what)}
        runs = [self._left(number, names) for number, names in enumerate(found.values())]
        want, *verdicts = self.loads(self.save, [self.save.run, *runs])
        assert ":" not in want, want
        content, plain = self._content(self.save.run), self._plain()
        self.cases, self.spare, out = len(found), [], list[str]()
        for (what, names), run, verdict in zip(found.items(), runs, verdicts, strict=True):
            of_plain = any(name.rpartition("/")[2] == FILE_NAME for name in names)
            out += self._breaches(what, run, verdict, want, plain if of_plain else content)
            shutil.rmtree(run)
        return out

    def _left(self, number: int, names: list[str]) -> Path:
        run = linked(self.save.folder, self.scratch / f"left{number}", self.save.tag)
        remove(run / self.save.tag, names)
        return run

    def _content(self, run: Path) -> set[str]:
        """The verbs that are content with a run."""
        return {name for name, ask in VERBS.items() if not answer(ask, self.save, run)}

    def _plain(self) -> set[str]:
        """The verbs that are content with the save without what this package put beside it."""
        run = linked(self.save.folder, self.scratch / "plain", self.save.tag)
        plain_of(run / self.save.tag)
        found = self._content(run)
        shutil.rmtree(run)
        return found

    def _breaches(
        self, what: str, run: Path, verdict: str, want: str, content: set[str]
    ) -> Iterator[str]:
        if verdict == want:
            self.spare.append(what)
        for name, ask in VERBS.items():
            said = answer(ask, self.save, run)
            if said.startswith("BARE"):
                yield f"{what}: {name} ends in {said}"
            elif verdict == want and said and name in content:
                yield f"{what}: a load is exact, and {name} says {said}"
            elif verdict != want and not said and name not in LENIENT:
                yield f"{what}: {name} is content, and a load says {verdict}"


def told_of(folder: Path) -> CallerModel:
    """What an engine of the run would tell a reader of its save, by the manifest of the whole
    one."""
    with open_checkpoint(folder) as read:
        manifest = read.manifest
        renamed = manifest.run.get(RENAMED) or {}
    return CallerModel(None, manifest.by_name, manifest.names, renamed=renamed)


def plain_of(folder: Path) -> Path:
    """Without what this package wrote beside a program's own files."""
    remove(folder, [path.name for path in folder.glob(f"{OURS}*")])
    return folder
