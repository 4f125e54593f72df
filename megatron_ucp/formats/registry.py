"""The table of formats: opens a checkpoint, whatever its format. A new one is one more row."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.errors import NotFoundError, some_of
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Format
from megatron_ucp.formats.dcp.checkpoint import MODEL_FOLDER, OPTIMIZER_FOLDER, DcpFormat
from megatron_ucp.formats.deepspeed.native import NativeFormat
from megatron_ucp.formats.deepspeed.universal import UniversalFormat
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.hugging_face.checkpoint import HuggingFaceFormat, refuse_unnamed
from megatron_ucp.formats.megatron.distcp import INDEX_FILE
from megatron_ucp.formats.megatron.dp_reshardable import DpReshardableCheckpoint
from megatron_ucp.formats.megatron.legacy import LegacyFormat
from megatron_ucp.formats.megatron.params import split_keys
from megatron_ucp.formats.megatron.torch_dist import TorchDistCheckpoint, check_backend
from megatron_ucp.formats.per_rank import FILES as OF_RANKS
from megatron_ucp.formats.per_rank import RANDOM_STATES
from megatron_ucp.formats.rule_file import read_rules
from megatron_ucp.formats.store import Location, folder_at, location, look_once
from megatron_ucp.formats.tags import FoundTag, find_tag

# ---- the two rows for Megatron's checkpoints


class TorchDistFormat:
    """Folders of `--ckpt-format torch_dist`; other ones with torch's index are refused by name."""

    def recognises(self, folder: Folder) -> bool:
        return folder.is_file(INDEX_FILE)

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        # it takes numpy, whose import is felt by who opens another format
        from megatron_ucp.formats.megatron.index import index_in

        check_backend(folder)
        index = index_in(folder)
        states = split_keys(index.tensors, folder / INDEX_FILE)
        flat = states.flat and not told.weights
        kind = DpReshardableCheckpoint if flat else TorchDistCheckpoint
        return kind(folder, told, index, states)


# ---- all rows


# the first one that recognises a folder opens it
_HUGGING_FACE = HuggingFaceFormat()
_MEGATRON: tuple[Format, ...] = (TorchDistFormat(), LegacyFormat())
FORMATS: tuple[Format, ...] = (
    _HUGGING_FACE,
    DcpFormat(),
    *_MEGATRON,
    UniversalFormat(),
    NativeFormat(),
)


def open_checkpoint(
    path: str | os.PathLike[str],
    tag: str | None = None,
    rules: str | Path | RuleSet | None = None,
    told: CallerModel | None = None,
) -> Checkpoint:
    """A checkpoint of any format, to look into and to read; a context manager.

    `rules` is a file of rules (docs/reference/rules.md), or what was read from one: how
    parameters are cut and named, where the checkpoint does not say so itself; `told` is what
    an engine knows. A stage-0 checkpoint without a manifest keeps optimizer states by position
    only: without `told.order` it is read without its optimizer. Raises a UcpError.
    """
    read = rules if rules is None or isinstance(rules, RuleSet) else read_rules(rules)
    known = told or CallerModel()
    if read is not None:
        known = replace(known, rules=read)

    def look() -> Checkpoint:
        found = find_checkpoint(path, tag)
        return open_folder(folder_at(found.folder), found.notes, known)

    return look_once(path, look)


def open_folder(folder: Folder, notes: Sequence[str], told: CallerModel) -> Checkpoint:
    """The checkpoint in a folder that was found, with `notes` about the way to it. Raises a
    UcpError."""
    checkpoint = format_of(folder).open(folder, told)
    unread = checkpoint.unread()
    left = [f"left out, as nothing here reads them: {some_of(unread)}"] if unread else []
    checkpoint.path_notes = [*notes, *left]
    return checkpoint


def checkpoint_folder(path: str | os.PathLike[str], tag: str | None = None) -> Location:
    """The folder that `find_checkpoint` finds."""
    return find_checkpoint(path, tag).folder


def find_checkpoint(path: str | os.PathLike[str], tag: str | None = None) -> FoundTag:
    """The folder that holds the files of a checkpoint: a Hugging Face folder itself, or a tag
    folder. Raises NotFoundError, UsageError."""
    if isinstance(path, str | os.PathLike) and tag is None and is_hugging_face(location(path)):
        return FoundTag(location(path))
    try:
        found = find_tag(path, tag)
    except NotFoundError:
        if tag is None and location(path).is_dir():  # it may be a model's, under names of its own
            refuse_unnamed(folder_at(path))
        raise
    notes = [*found.notes, *_lost_manifest(folder_at(found.folder))]
    above, optimizer = found.folder.parent, found.folder.parent / OPTIMIZER_FOLDER
    if found.folder.name == MODEL_FOLDER and (optimizer / INDEX_FILE).is_file():
        notes.append(
            f"{MODEL_FOLDER} was given, and {OPTIMIZER_FOLDER} lies beside it: both are read"
        )
        return FoundTag(above, tuple(notes))
    return replace(found, notes=tuple(notes))


def _lost_manifest(folder: Folder) -> list[str]:
    """A note where files that a manifest lists are in a folder, and no manifest is."""
    is_lost = FILE_NAME not in folder and any(
        name.startswith((RANDOM_STATES, OF_RANKS)) for name in folder.names()
    )
    return [LOST_MANIFEST] if is_lost else []


LOST_MANIFEST = (
    f"{FILE_NAME} is missing, as files beside it show: the folder is read as the program alone "
    "would have written it, without random states and what else the manifest alone says"
)


def is_hugging_face(folder: Location) -> bool:
    """Whether a folder is one of a Hugging Face model."""
    return _HUGGING_FACE.recognises(folder_at(folder))


def is_megatron(folder: Location) -> bool:
    """Whether a tag folder is one that Megatron wrote, or that was written for it."""
    opened = folder_at(folder)
    return any(row.recognises(opened) for row in _MEGATRON)


def format_of(folder: Folder) -> Format:
    """The row that recognises a tag folder."""
    return next(row for row in FORMATS if row.recognises(folder))
