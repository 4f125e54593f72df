"""Shows what a folder holds without moving anything: `inspect`, `ls`, `describe`,
`newest_whole`, and `doctor` for the machine."""

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.manifest import (
    FILE_NAME,
    FINGERPRINT,
    RECORDED,
    FileEntry,
    Manifest,
    ParamSpec,
)
from megatron_ucp.core.mesh import EXPERT_RANK
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.rules import NOTHING_KNOWN, RuleSet
from megatron_ucp.errors import DamagedFileError, NotFoundError, StoreError, UcpError, UsageError
from megatron_ucp.families.arguments import with_model
from megatron_ucp.formats import store_saves
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.files import is_universal
from megatron_ucp.formats.deepspeed.lost_states import NOT_SAVED
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE, read_json
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.megatron.distcp import SUFFIX
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.registry import (
    checkpoint_folder,
    find_checkpoint,
    is_hugging_face,
    open_checkpoint,
)
from megatron_ucp.formats.store import Location, StorePath, folder_at, location, look_once
from megatron_ucp.formats.tags import (
    LATEST_UNIVERSAL,
    find_tag,
    has_state_files,
    has_tags,
    is_unfinished,
    named_or_note,
    newest_named,
    pointers_in,
    require_folder,
    saved_at,
    state_files,
)
from megatron_ucp.reshard.findings import in_short
from megatron_ucp.reshard.options import plain_path

# ---- describe
#
# What a checkpoint is, from its directories and pickles alone.


def describe(
    path: str | os.PathLike[str], tag: str | None = None, rules: str | Path | None = None
) -> Manifest:
    """The manifest of a checkpoint: recorded beside it, or rebuilt from the files. Reads no tensor.

    Args:
        path: A tag folder, or the folder above it.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        Mesh, parameters, flat buffers, groups, files. A stage-0 checkpoint without a manifest
        keeps optimizer states by position only: its manifest has weights alone.

    Raises:
        NotFoundError: Where there is no checkpoint.
        UcpError: For one that can't be read.

    Example:
        >>> import megatron_ucp as ucp
        >>> str(ucp.describe("runs/llama").mesh)
        'tp=2,pp=1,dp=2,zero=1'
    """
    with open_checkpoint(path, tag, rules) as checkpoint:
        return checkpoint.manifest


def look(
    path: str | os.PathLike[str], tag: str | None = None, rules: str | Path | RuleSet | None = None
) -> Manifest:
    """As `describe`, but a manifest is believed once every file that it lists is there with its
    size: none is opened.

    So it takes no longer on thousands of ranks. `verify` compares the manifest with the files.
    Raises a UcpError.
    """
    folder = checkpoint_folder(path, tag)
    if rules is not None or is_universal(folder_at(folder)) or FILE_NAME not in folder_at(folder):
        with open_checkpoint(folder, rules=rules) as checkpoint:
            files = tuple(
                FileEntry(name, checkpoint.folder.size_bytes(name))
                for name in checkpoint.file_names
            )
            return replace(checkpoint.manifest, files=files)
    opened = folder_at(folder)
    states = [name for name in opened.names() if name.endswith("_states.pt")]
    recorded = ManifestBeside(opened, states)
    recorded.close()
    for entry in recorded.files.values():
        opened.check_size(entry)
    if recorded.manifest is None:
        raise DamagedFileError("the manifest went away while it was read", file=folder / FILE_NAME)
    return recorded.manifest


def experts(manifest: Manifest) -> dict[str, list[str]]:
    """Experts in words ("8, 4 on each of 2 ranks") -> the layers with so many."""
    counts = {
        spec.name.rpartition(f".{spec.expert[0]}.")[0]: spec.expert[1]
        for spec in manifest.params
        if spec.expert is not None
    }
    ranks = manifest.mesh.size(EXPERT_RANK)
    out: dict[str, list[str]] = {}
    for layer, count in counts.items():
        text = f"{count}, {count // ranks} on each of {ranks} ranks" if ranks > 1 else f"{count}"
        out.setdefault(text, []).append(layer)
    return out


def sizes(manifest: Manifest) -> dict[str, tuple[tuple[str, ...], int]]:
    """Each element-wise state: its dtypes, and its bytes over all parameters, whole and once
    ("weights": the training copy)."""
    dtypes: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    has_one_copy = manifest.keeper in (Keeper.UNIVERSAL, Keeper.WEIGHTS)
    for spec in manifest.params:
        copies = [] if has_one_copy else [("weights", spec.dtype)]
        for state, dtype in (*copies, *manifest.states_of(spec.name).items()):
            dtypes.setdefault(state, set()).add(dtype)
            size = spec.elems * ITEMSIZE.get(dtype, 0)
            sizes[state] = sizes.get(state, 0) + size
    return {state: (tuple(sorted(dtypes[state])), sizes[state]) for state in sizes}


# ---- newest tag
#
# The tag of a folder to resume from: the newest one that is whole.


@dataclass(frozen=True)
class Newest:
    """The tag to resume from, and what was passed over on the way to it, with the reason."""

    folder: Location
    passed_over: tuple[str, ...]


def newest_whole(path: str | os.PathLike[str]) -> Newest:
    """The tag to resume from: the one that the pointer names if it is whole, else the newest that
    is. Whole: every file is there, with the size, directory, step and mesh that belong to it;
    tensor bytes are not read.

    Args:
        path: The folder above the tags; or the one above several such folders, as trainers make
            them (`out` with `out/checkpoint-400`), of which the one that was saved last counts.

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
        return _newest_of(path, below)
    named = named_or_note(path)
    passed = [named.note] if named.note else []
    tags = {p.name: time_of_save(p) for p in path.iterdir() if p.is_dir() and has_state_files(p)}
    if named.tag and named.tag not in tags:
        passed.append(f"{named.tag}: `{named.pointer}` names it, and it is not there")
    for tag in sorted(tags, key=lambda tag: (tag == named.tag, tags[tag], tag), reverse=True):
        try:
            check_whole(path / tag)
        except StoreError:
            raise
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
        fix="restore the files of one of them"
        if tags
        else "give the folder with the tags, or the one above several such folders",
        id="missing-file",
    )


def _newest_of(path: Location, folders: Sequence[Location]) -> Newest:
    """The newest of several folders with tags: of each its own."""
    found: dict[Location, Newest] = {}
    passed: list[str] = []
    for folder in sorted(folders):
        try:
            newest, named = newest_whole(folder), newest_named(folder)
        except StoreError:
            raise
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


def unfinished(path: Location) -> list[str]:
    """A note for each save in a folder that was not finished."""
    if isinstance(path, StorePath):
        return store_saves.notes_of_left_overs(path)
    names = sorted(one.name for one in path.iterdir() if is_unfinished(one.name))
    return [f"{name}: a save that was not finished" for name in names]


def check_whole(folder: Location) -> None:
    """Raises a UcpError for a tag folder that lacks a file, or holds one that is damaged or of
    another save."""
    checkpoint, _ = open_anyhow(folder)
    with checkpoint:
        checkpoint.check_all(checkpoint.file_names)
        checkpoint.check_beside()


def open_anyhow(folder: str | os.PathLike[str]) -> tuple[Checkpoint, bool]:
    """A checkpoint, and whether anything says how its parameters are cut: without, they have the
    shapes that one rank holds. Raises a UcpError."""
    try:
        return open_checkpoint(folder), True
    except UcpError as error:
        if error.id != "layout-unknown":
            raise
        return open_checkpoint(folder, rules=NOTHING_KNOWN), False


def time_of_save(folder: Location) -> float:
    """Seconds since the epoch: as the manifest says; for a folder without one the time of its
    newest state file."""
    said = saved_at(folder)
    return said if said is not None else max(path.stat().st_mtime for path in state_files(folder))


# ---- doctor
#
# The versions on this machine, beside those that were tested.


# What the tests run against; an engine of another version than one of the first two is said once.
# The sources that are tagged core_v0.19.0 call themselves 0.19.1.
CHECKED = {
    "deepspeed": ("0.19.8",),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.19.2"),
}
TESTED = {**CHECKED, "torch": ("2.13.0", "2.14.1"), "transformers": ("5",)}
_MODULES = {"megatron-core": "megatron.core"}  # named otherwise than the distribution
_NEEDED = ("torch", "numpy", "safetensors", "isal")
_FOR = {
    "deepspeed": "to train with DeepSpeed",
    "megatron-core": "to train with Megatron-core",
    "transformers": "to load what export-hf writes",
    "accelerate": "for its trainer",
    "lightning": "for its trainer",
    "peft": "for LoRA",
}


@dataclass(frozen=True)
class MachinePart:
    """One thing: what was found of it, what was tested, and whether that is all right."""

    name: str
    found: str
    says: str
    ok: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was looked at. True where nothing that is needed is missing."""

    rows: tuple[MachinePart, ...]

    def __bool__(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        lines = say.table([(row.name, row.found, row.says) for row in self.rows])
        return "\n".join([*lines, "all right" if self else "something that is needed is missing"])


def doctor() -> Diagnosis:
    """Versions of Python and of libraries beside those that were tested."""
    import platform  # for `doctor` alone

    says = "3.11 and 3.12 are tested, 3.13 is accepted"
    python = MachinePart("python", platform.python_version(), says)
    return Diagnosis((python, *(_library(name) for name in (*_NEEDED, *_FOR))))


def imported_version(package: str) -> str | None:
    """The version that the imported module of a package says, None where it is not imported. A
    checkout that stands before an installed package is another version than the installed one."""
    said = getattr(sys.modules.get(_MODULES.get(package, package)), "__version__", None)
    return said if isinstance(said, str) else None


def is_tested(package: str, found: str) -> bool:
    """Whether a version is one of the `TESTED`; any is, where none is named. What stands behind a
    plus does not count: megatron-core puts the git hash of the current folder there
    (`0.19.2+446de22`), torch its build (`2.13.0+cpu`)."""
    plain, tested = found.split("+")[0], TESTED.get(package, ())
    return not tested or any(plain == one or plain.startswith(f"{one}.") for one in tested)


def _library(name: str) -> MachinePart:
    """A library in the version that is imported, else as it is installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = imported_version(name) or version(name)
    except PackageNotFoundError:
        needed = name in _NEEDED
        return MachinePart(name, "none", "needed" if needed else f"only {_FOR[name]}", not needed)
    says = f"tested with {', '.join(TESTED[name])}" if name in TESTED else ""
    other = "" if is_tested(name, found) else "; another version may differ"
    return MachinePart(name, found, f"{says}{other}")


# ---- inspect
#
# What a checkpoint is, in the words of those who ask.


# How the program calls what an engine's name says; the others are DeepSpeed's.
_FORMATS = {
    Keeper.UNIVERSAL: "DeepSpeed's universal folder",
    Keeper.TORCH_DIST: "Megatron-LM's torch_dist",
    Keeper.LEGACY: "Megatron-LM's legacy torch format",
    Keeper.DCP: "torch.distributed.checkpoint (FSDP2)",
    Keeper.WEIGHTS: "a Hugging Face folder, weights alone",
}
_OF_MEGATRON = (Keeper.MEGATRON, Keeper.TORCH_DIST, Keeper.LEGACY)
_STATES = {MASTER: "master weights", VALUE: "values"}
_WIDTH, _INDENT = 100, 13  # of lines with settings
_KNOWN = (
    *("global_steps", "skipped_steps", "saved_at", "ds_version", "moved_latest"),
    *(NOT_SAVED, FINGERPRINT),
)


@dataclass(frozen=True)
class ParamRow:
    """One parameter or buffer: its logical `shape`, the `dtype` of its training copy, the number of
    its group (None: of none), the states of its optimizer, other names of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    group: int | None
    states: tuple[str, ...]
    also: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """What `inspect` found. As text it is the lines that people ask for; `details()` are the rest.

    `states` are state -> (dtypes, bytes of all parameters, each once).
    """

    path: str
    manifest: Manifest
    states: Mapping[str, tuple[tuple[str, ...], int]]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[ParamRow]:
        manifest = self.manifest
        ties = {tie.canonical: tie.aliases for tie in manifest.ties}
        return [_row(manifest, spec, ties.get(spec.name, ())) for spec in manifest.params]

    @property
    def elems(self) -> int:
        return sum(spec.elems for spec in self.manifest.params)

    def __str__(self) -> str:
        lines = [f"{name:12} {text}" for name, text in self._lines() if text]
        lines += [_named("not saved", str(one)) for one in self.manifest.run.get(NOT_SAVED) or ()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def details(self) -> str:
        """Steps and versions, groups, states, the model's sizes, the table of parameters."""
        heads = ("name", "shape", "dtype", "kind", "group", "states", "also")
        return "\n".join([*_details(self), "", *say.table([heads, *map(_texts, self.rows)])])

    @property
    def _model_type(self) -> str:
        """What config.json calls the model; empty where there is none."""
        file = location(self.path) / CONFIG_FILE
        kind = read_json(file).get("model_type", "") if file.is_file() else ""
        return kind if isinstance(kind, str) else ""

    def _lines(self) -> Iterator[tuple[str, str]]:
        manifest, run = self.manifest, self.manifest.run
        yield "checkpoint", f"{self.path}: {_format(manifest)}"
        yield "model", _model(manifest, self.elems, self._model_type)
        skipped = run.get("skipped_steps") or 0
        more = f" ({skipped:,} skipped)" if skipped else ""
        is_weights = manifest.keeper == Keeper.WEIGHTS
        yield "step", "" if is_weights else f"{run.get('global_steps', 0):,}{more}"
        mesh = manifest.written_on
        ranks = mesh.world
        layout = str(mesh)
        keeper = manifest.keeper
        if keeper in _OF_MEGATRON:  # whose optimizer knows no stages
            layout = layout.removesuffix(",zero=0")
        no_mesh = is_weights or keeper == Keeper.DCP  # whose files say none
        yield "mesh", "" if no_mesh else f"{layout} ({ranks:,} rank{'s' if ranks != 1 else ''})"
        yield "optimizer", _optimizer(manifest)
        yield "tensors", _dtypes(self.states)
        yield "saved", _saved(manifest, location(self.path))
        files = len(manifest.files)
        yield (
            "size",
            f"{say.amount(manifest.size_bytes)} in {files:,} file{'s' if files != 1 else ''}",
        )


def inspect(
    path: str | os.PathLike[str], *, tag: str | None = None, rules: str | Path | None = None
) -> Inspected:
    """What a checkpoint is: format, model, step, mesh, optimizer, dtypes, date, size. Reads no
    tensor.

    Args:
        path: A tag folder, the folder above it, or a Hugging Face folder.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        What was found; printed it is a few lines, and `manifest` has all of it.

    Raises:
        NotFoundError: Where there is no checkpoint.
        UcpError: For one that can't be read.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.inspect("runs/llama").manifest.mesh.tp
        2
    """
    found = find_checkpoint(path, tag)
    notes = tuple(found.notes)
    try:
        manifest = look(found.folder, None, rules)
    except UcpError as error:
        if error.id != "layout-unknown" or rules is not None:
            raise
        manifest = look(found.folder, None, NOTHING_KNOWN)
        notes += (
            "nothing says how tensor-parallel ranks cut the parameters: shapes are those that one "
            "rank holds (give --rules FILE)",
        )
    manifest = with_model(manifest)
    return Inspected(str(found.folder), manifest, sizes(manifest), notes)


def date(seconds: float) -> str:
    """A time since the epoch, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _dtypes(states: Mapping[str, tuple[tuple[str, ...], int]]) -> str:
    """The states of each dtype: "weights bfloat16; master weights, exp_avg float32"."""
    held: dict[str, list[str]] = {}
    for state, (dtypes, _) in states.items():
        held.setdefault(" and ".join(dtypes), []).append(_STATES.get(state, state))
    return "; ".join(f"{', '.join(names)} {dtype}" for dtype, names in held.items())


def _format(manifest: Manifest) -> str:
    version = manifest.run.get("ds_version")
    program = f"DeepSpeed {version}" if version else "DeepSpeed"
    usual = f"{program}, ZeRO stage {manifest.mesh.zero}"
    keeper = manifest.keeper
    if keeper == Keeper.MEGATRON:  # a manifest of this package's says who trained, not the format
        is_dist = any(file.name.endswith(SUFFIX) for file in manifest.files)
        keeper = Keeper.TORCH_DIST if is_dist else Keeper.LEGACY
    return _FORMATS.get(keeper, usual)


def _model(manifest: Manifest, elems: int, model_type: str) -> str:
    found = [f"{text}: {len(layers)} layers" for text, layers in experts(manifest).items()]
    mixtures = f"experts {'; '.join(found)}" if found else ""
    kind = manifest.family or model_type or "no family (any model of torch)"
    count = f"{len(manifest.params):,} tensors, {elems:,} elements"
    return ", ".join(filter(None, [kind, count, _vocabulary(manifest), mixtures]))


def _vocabulary(manifest: Manifest) -> str:
    """Rows of the vocabulary, where the checkpoint says what its model is."""
    said = manifest.run.get(RECORDED)
    sizes = said.get("sizes") if isinstance(said, Mapping) else None
    rows = sizes.get("vocab") if isinstance(sizes, Mapping) else None
    return f"vocabulary of {rows:,} rows" if isinstance(rows, int) else ""


def _optimizer(manifest: Manifest) -> str:
    if manifest.keeper == Keeper.WEIGHTS:
        return ""
    names = dict.fromkeys(filter(None, (group.optimizer for group in manifest.groups)))
    groups = f"{len(manifest.groups)} parameter group{'s' if len(manifest.groups) != 1 else ''}"
    return f"{', '.join(names) or 'not named by the files'}, {groups}"


def _saved(manifest: Manifest, folder: Location) -> str:
    if manifest.keeper == Keeper.WEIGHTS:
        return ""
    by = "with a manifest (an attached engine, or convert)"
    at = manifest.saved_at if manifest.saved_at is not None else time_of_save(folder)
    return f"{date(at)}, {by if manifest.save_id else 'without a manifest'}"


def _row(manifest: Manifest, spec: ParamSpec, also: tuple[str, ...]) -> ParamRow:
    held = manifest.holders.get(spec.name)
    buffer = manifest.buffers[held[0][0]] if held else None
    states = tuple(state for state, _ in buffer.states) if buffer else ()
    group = None if buffer is None else buffer.group
    return ParamRow(spec.name, spec.shape, spec.dtype, spec.kind, group, states, also)


def _details(found: Inspected) -> Iterator[str]:
    manifest, run = found.manifest, dict(found.manifest.run)
    for key, value in run.items():
        text = _pairs(_flat(value)) if isinstance(value, Mapping) else value
        if key not in _KNOWN and text not in ("", None, (), []):
            yield _named(key, str(text))
    for number, group in enumerate(manifest.groups):
        said = {key: value for key, value in group.settings.items() if value is not None}
        yield _named(f"group {number}", f"{group.optimizer} {_pairs(said)}")
    for state, (dtypes, size) in found.states.items():
        yield _named(_STATES.get(state, state), f"{' '.join(dtypes)}, {say.amount(size)}")


def _named(name: str, text: str) -> str:
    """A name and what is said of it, in lines that a terminal shows whole."""
    indent = " " * _INDENT
    return textwrap.fill(
        text, _WIDTH, initial_indent=f"{name:{_INDENT - 1}} ", subsequent_indent=indent
    )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """One level of a tree of settings, without what is empty."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value)
        elif value not in ("", None, {}, [], ()):
            out[key] = value
    return out


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _texts(row: ParamRow) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    group = "-" if row.group is None else str(row.group)
    return row.name, shape, row.dtype, row.kind, group, " ".join(row.states), " ".join(row.also)


# ---- listing
#
# Which tags a folder has, and which of them can be resumed from.


@dataclass(frozen=True)
class ListedTag:
    """A tag. `wrong` is empty where it is whole: every file there, with the size, step and mesh
    that belong to it. `pointer` is the one that names it and is followed. Of a tag that can't be
    read `step` is None and `mesh` empty."""

    tag: str
    step: int | None
    mesh: str
    saved: str
    size_bytes: int
    wrong: str
    pointer: str = ""

    @property
    def whole(self) -> bool:
        """Whether a job can resume from it."""
        return not self.wrong

    @property
    def texts(self) -> tuple[str, ...]:
        state = self.wrong or "whole"
        named = f", {self.pointer}" if self.pointer else ""
        step = "-" if self.step is None else f"{self.step:,}"
        size = say.amount(self.size_bytes)
        return self.tag, step, self.mesh or "-", self.saved or "-", size, f"{state}{named}"


@dataclass(frozen=True)
class Listed:
    """The tags of a folder, by step; `notes` say what else is there."""

    path: str
    tags: tuple[ListedTag, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        heads = ("tag", "step", "mesh", "saved", "size", "state")
        lines = say.table([heads, *(one.texts for one in self.tags)])
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def ls(path: str | os.PathLike[str], *, remove_left_overs: bool = False) -> Listed:
    """The tags of a folder: step, mesh, date, size, whether each is whole, which one a load takes.
    Reads no tensor.

    Args:
        path: The folder above the tags. Of a tag folder that one alone is listed.
        remove_left_overs: Whether to remove, in an object store, what saves left that were not
            finished. Nobody may be saving there meanwhile.

    Returns:
        The tags, by step.

    Raises:
        NotFoundError: Where there is no tag.
        UsageError: For left-overs on a disk, which the next save removes.

    Example:
        >>> import megatron_ucp as ucp
        >>> [one.tag for one in ucp.ls("runs/llama").tags if one.whole]
        ['global_step80']
    """
    folder = location(plain_path(path))
    removed: list[str] = []
    if remove_left_overs:
        if not isinstance(folder, StorePath):
            raise UsageError(
                "what saves left on a disk is removed by the next save",
                file=folder,
                expected="a folder in an object store, such as s3://bucket/run",
                found=str(folder),
                fix="leave --remove-left-overs out (Python: remove_left_overs=)",
            )
        removed = store_saves.remove_left_overs(folder)
    return look_once(folder, lambda: _tags_in(folder, removed))


def _tags_in(folder: Location, removed: Sequence[str]) -> Listed:
    """What `ls` gives."""
    if not folder.is_dir() or (has_state_files(folder) and not pointers_in(folder)):
        return Listed(str(folder), (_listed(find_tag(folder).folder, ""),), ())
    named = named_or_note(folder)
    found = [one for one in folder.iterdir() if one.is_dir() and has_state_files(one)]
    notes = [*([named.note] if named.note else []), *unfinished(folder), *removed]
    if not found and not (isinstance(folder, StorePath) and notes):
        raise _no_tags(folder)
    tags = [_listed(one, named.pointer if one.name == named.tag else "") for one in found]
    if (folder / LATEST_UNIVERSAL).is_file():
        text = (folder / LATEST_UNIVERSAL).read_text(errors="replace").strip()
        notes.append(f"{LATEST_UNIVERSAL} names {text[:80]}, which counts where no other does")
    ordered = sorted(tags, key=lambda one: (one.step is None, one.step or 0, one.tag))
    return Listed(str(folder), tuple(ordered), tuple(notes))


def _no_tags(folder: Location) -> NotFoundError:
    if not is_hugging_face(folder):
        find_tag(folder)  # which says what is there instead
    return NotFoundError(
        "this folder holds no tags",
        file=folder,
        expected="tag folders",
        found="a Hugging Face folder, or files alone",
        fix="give the folder of a run; `megatron-ucp inspect` takes this one",
    )


def _listed(folder: Location, pointer: str) -> ListedTag:
    wrong, step, mesh, saved = "", None, "", ""
    try:
        manifest = look(folder)
        step, mesh = int(manifest.run.get("global_steps", 0)), str(manifest.written_on)
        saved = date(time_of_save(folder))
        check_whole(folder)
    except StoreError:
        raise
    except UcpError as error:
        wrong = in_short(error)
    there = folder.rglob("*")
    if isinstance(folder, StorePath):
        there = store_saves.objects_that_count(folder)
    size = sum(one.stat().st_size for one in there if one.is_file())
    return ListedTag(folder.name, step, mesh, saved, size, wrong, pointer)
