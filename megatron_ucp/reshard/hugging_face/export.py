"""A checkpoint of any mesh as a folder of a Hugging Face model, straight from its own files.

The folder is a mesh more, of one rank, with other names: what is written is planned and proved as
a whole before the first byte, then moved window by window through a buffer of bounded size,
whatever the model, by as many threads as there are cores. The bytes depend on the model alone, not
on the mesh that saved it. The folder appears whole or not at all.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.dtypes import dtype_name
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import SaveError, UnsupportedError, UsageError
from megatron_ucp.families.arguments import unknown_padding
from megatron_ucp.formats.base import Checkpoint, Readable, Told
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE, read_json
from megatron_ucp.formats.hugging_face.shards import parse_size
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.allowances import EXPORT, check_words
from megatron_ucp.reshard.arguments import plain_path
from megatron_ucp.reshard.diff import Difference, unequal, weight_differences
from megatron_ucp.reshard.file_source import THREADS, FileSource, Memory
from megatron_ucp.reshard.findings import Progress, checked
from megatron_ucp.reshard.folder_sink import (
    FolderOutput,
    FolderSink,
    check_source,
    require_plain,
)
from megatron_ucp.reshard.hugging_face.beside import Beside, beside_weights
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.hugging_face.merge import Merge, open_merge
from megatron_ucp.reshard.hugging_face.model_config import config_for, family_of
from megatron_ucp.reshard.hugging_face.model_folder import (
    WEIGHT_DTYPES,
    Outgoing,
    publish,
    refuse_foreign,
    training_dtype,
)
from megatron_ucp.reshard.hugging_face.twin import needs_family, pipe_names, twin_of
from megatron_ucp.reshard.match import replica_notes, require_one_copy
from megatron_ucp.reshard.transfer import TransferRun, WindowSource, proved, transfer

_OF_FILES = ("tag", "rules", "family", "merge", "verify", "force", "allow")
LIVE_EXPORT = "ucp_export_hf"  # of an attached engine: what writes its weights


def export_hf(
    src: Any,
    dst: str | Path,
    *,
    dtype: Any = None,
    max_shard_size: str | int = "5GB",
    tag: str | None = None,
    rules: str | Path | None = None,
    config: str | Path | None = None,
    family: str = "",
    tokenizer: str | Path | None = None,
    merge: str | Path | None = None,
    verify: bool = False,
    force: bool = False,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights of a checkpoint as a folder that
    `AutoModelForCausalLM.from_pretrained` takes; of a model that peft wrapped, the adapter, in
    peft's format.

    Args:
        src: The checkpoint: a tag folder, or the folder above it. Or an attached engine, whose
            weights in memory are written; collective, and only with `dtype`, `max_shard_size`,
            `config` and `tokenizer`.
        dst: The new folder. It appears whole or not at all.
        dtype: That of the weights, such as "bf16" or `torch.float32`, to which the fp32 master
            weights are rounded. Default: the training dtype.
        max_shard_size: The most bytes of a file, such as "5GB".
        tag: The tag in `src`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.
        config: The model's config.json (an adapter's adapter_config.json), or its folder. Default:
            what the checkpoint says, else the file in the tag folder or in the one above.
        family: The model family, where neither the checkpoint nor its config says one.
        tokenizer: A folder whose tokenizer files are copied. Default: that of the config.
        merge: The folder of the base model of a LoRA run: that model is written, with the adapter
            added.
        verify: Whether to read the files back and compare them with the source, bit by bit.
        force: Whether to replace a folder that an earlier export wrote, and nobody changed.
        allow: What may happen besides exact copies and rounding: "mean", "stale", "weights".
        progress: `progress(done, total)` counts bytes.

    Returns:
        What was done. `loadable` is false where no config was found: the weights are there, and
        no library loads them without one.

    Raises:
        UsageError: For arguments that can't be.
        SaveError: Where the output can't be written; nothing is left of it.
        UcpError: Where the weights can't be carried over exactly.

    Example:
        >>> import megatron_ucp as ucp
        >>> assert ucp.export_hf("runs/llama", "hf", dtype="bf16", verify=True).loadable
    """
    asked = _Asked(dtype, max_shard_size, config, tokenizer, tag, rules, family, merge)
    asked = replace(asked, verify=verify, force=force, allow=allow)
    if hasattr(src, LIVE_EXPORT):
        return _of_engine(src, dst, asked)
    if hasattr(src, "save_checkpoint"):
        raise UsageError(
            "this engine is not attached",
            expected="an engine that ucp.attach was given, or the path of a checkpoint",
            found=type(src).__qualname__,
            fix="call ucp.attach(engine) first",
        )
    return _of_files(src, dst, asked, progress=progress)


@dataclass(frozen=True)
class _Asked:
    """What an export is asked for; see `export_hf`."""

    dtype: Any
    max_shard_size: str | int
    config: str | Path | None
    tokenizer: str | Path | None
    tag: str | None
    rules: str | Path | None
    family: str
    merge: str | Path | None
    verify: bool = False
    force: bool = False
    allow: Collection[str] = ()


@say.shown("export-hf", ends=True)
def _of_files(
    src: str | Path, dst: str | Path, asked: _Asked, *, progress: Progress | None = None
) -> Exported:
    """The export of a checkpoint on disk."""
    started, folder = time.perf_counter(), Path(plain_path(dst))
    dtype = check_output(folder, asked.dtype, asked.allow, asked.force)
    asked = replace(asked, dtype=dtype, max_shard_size=parse_size(asked.max_shard_size))
    names = _pipe_names(asked)
    told = Told(names=names, weights="weights" in asked.allow)
    with ExitStack() as opened:
        source = opened.enter_context(open_checkpoint(src, asked.tag, asked.rules, told))
        check_source(source, folder, asked.allow)
        mesh = str(source.manifest.written_on)
        prepared = _prepared(source, asked, opened)
        moved = _write(prepared, folder, asked, progress)
        seen = "read back and equal" if asked.verify else checked(prepared.source)
        sizes = *moved, time.perf_counter() - started
        return prepared.out.exported(folder, mesh, sizes, asked.verify, prepared.notes, seen)


def _pipe_names(asked: _Asked) -> Mapping[str, str] | None:
    """Names in a pipeline of the model that the config says. A family that is not asked for is that
    of any model with such a config: what it does not compute, transformers may."""
    if asked.family:
        return pipe_names(asked.family, asked.config)
    with suppress(UnsupportedError):
        return pipe_names(family_of(asked.config), asked.config)
    return None


@dataclass(frozen=True)
class _Prepared:
    """What is read, and what is written: `merged` where an adapter is added to its base;
    `readable` are the source's masters, or the weights that the model computed with."""

    source: Checkpoint
    readable: Readable
    out: Outgoing
    beside: Beside
    notes: Sequence[str]
    merged: Merge | None


def _prepared(source: Checkpoint, asked: _Asked, opened: ExitStack) -> _Prepared:
    """Finds the config, and decides under which names and in which files tensors are written."""
    found = config_for(source.manifest, asked.config, source.folder)
    given = None if found is None else found.tree
    notes, merged, family = _notes(source, given is None), None, asked.family
    if found is not None and asked.config is None:
        notes.append(f"the model's config was found in {found.folder}")
    if asked.merge is not None:
        source, merged = open_merge(opened, asked.merge, source, given)
        given, family = read_json(source.folder / CONFIG_FILE), ""
    elif found is not None and needs_family(source.manifest):
        family = family or found.family
    chosen = asked.dtype or training_dtype(source.manifest)
    twin = twin_of(source.manifest, given, family, chosen, str(source.folder))
    # an adapter's folder has the tokenizer that the run used, its base's the rest
    of_model = None if found is None else found.folder
    beside = beside_weights(twin, asked.tokenizer, of_model, asked.merge)
    notes += beside.notes
    out = Outgoing(source.manifest, twin, chosen, int(asked.max_shard_size))
    return _Prepared(source, _readable(source, out, asked.allow), out, beside, notes, merged)


def _write(
    prepared: _Prepared, folder: Path, asked: _Asked, progress: Progress | None
) -> tuple[int, int]:
    """Bytes read, and bytes written."""
    values, run = _values(prepared), TransferRun(progress=progress)
    tiles = THREADS if prepared.merged is None else 0
    written = _Written(prepared, folder, values, asked)
    output = prepared.out.output(
        values, prepared.beside, lambda aside: written.publish(output, aside), tiles
    )
    transfer(values, FolderSink(folder, output), frozenset(asked.allow), run=run, alone=True)
    return values.read_bytes, run.done


def _values(prepared: _Prepared) -> WindowSource:
    """What is written."""
    if prepared.merged is not None:
        return prepared.merged
    source, file = prepared.source, str(prepared.source.folder)
    is_copy = prepared.readable is not source
    return FileSource(prepared.readable, file, masters=source if is_copy else None)


def _of_engine(engine: Any, dst: str | Path, asked: _Asked) -> Exported:
    """The export of a live engine. Raises UsageError for what only files have."""
    if given := [name for name in _OF_FILES if getattr(asked, name)]:
        raise UsageError(
            "the export of a live engine does not take this",
            expected="dtype, max_shard_size, config, tokenizer",
            found=", ".join(given),
            fix="leave it out, or save and export the checkpoint",
        )
    how = asked.dtype, asked.max_shard_size, asked.config, asked.tokenizer
    return getattr(engine, LIVE_EXPORT)(plain_path(dst), *how)


def check_output(
    folder: Path, dtype: Any, allow: Collection[str], force: bool = False
) -> str | None:
    """The name of the dtype. Raises UsageError for arguments of an export that can't be."""
    require_plain(folder, lambda: force and refuse_foreign(folder))
    name = None if dtype is None else dtype_name(dtype)
    if name not in (None, *WEIGHT_DTYPES):
        raise UsageError(
            "weights have no such dtype",
            expected=", ".join(WEIGHT_DTYPES),
            found=name,
            fix="give one of these",
        )
    check_words(allow, {EXPORT})
    return name


def _notes(source: Checkpoint, alone: bool) -> list[str]:
    """What the source has to say of an export; `alone`: no config says what its model is."""
    padding = unknown_padding(source.manifest) if alone else []
    copies = require_one_copy(source, source.manifest.by_name, None)
    return [*source.notes, *copies, *replica_notes(source.manifest), *padding]


def _readable(source: Checkpoint, out: Outgoing, allow: Collection[str]) -> Readable:
    """What an export reads: the masters, or where these would be rounded to the dtype of training
    the weights that the model computed with, which were rounded so already."""
    trained = [one for one in out.tensors if one.state == MASTER and one.is_rounded]
    dtypes = {source.manifest.by_name[one.share.param].dtype for one in trained}
    if dtypes != {out.dtype} or "stale" in allow:
        return source
    return source.copies() or source


class _Written:
    """The folder of an export, once its tensors are there: read back where that is asked for, then
    named."""

    def __init__(
        self, prepared: _Prepared, folder: Path, values: WindowSource, asked: _Asked
    ) -> None:
        self.prepared, self.folder, self.values, self.asked = prepared, folder, values, asked

    def publish(self, output: FolderOutput, aside: Path) -> None:
        """Raises SaveError where what was read back is something else, UsageError for a name that
        was taken meanwhile."""
        if self.asked.verify:
            self._verify(output, aside)
        publish(aside, self.folder, self.asked.force)

    def _verify(self, output: FolderOutput, written: Path) -> None:
        """Reads the files back under the names of the source, and compares every parameter with the
        source's masters, rounded as the files are; what was merged with a second merge."""
        twin = self.prepared.out.twin
        told = twin.told if twin.family or twin.is_adapter else None
        if told is None and self.prepared.merged is None:
            like = self.prepared.source.manifest
            told = Told(like=like, tensors=lambda _: twin.shares)
        with open_checkpoint(written, told=told) as found:
            if self.prepared.merged is None:
                source = self.prepared.source
                differences = weight_differences(source, found, among=twin.specs)
            else:
                differences = self._merged_differences(output, found)
        if differences:
            copies = self.prepared.readable is not self.prepared.source
            raise _not_as_written(written, differences, copies)

    def _merged_differences(self, output: FolderOutput, found: Checkpoint) -> list[Difference]:
        """Where a folder does not hold what was merged."""
        (part,) = output.parts
        back = replace(part, wants=tuple((slot, VALUE) for slot, _ in part.wants))
        file = FileSource(found, str(found.folder))
        sides = [
            self.values.windows(proved(self.values, part)),
            file.windows(proved(file, back)),
        ]
        out: list[Difference] = []
        memory = Memory()
        for slot, _ in part.wants:
            count, first = unequal(part.target, slot, sides, memory)
            if first is not None:
                what = f"{count} elements, the first is {first[0]}"
                out.append(Difference(part.names[slot.buffer], what, *first[1:]))
        return out


def _not_as_written(written: Path, differences: Sequence[Difference], copies: bool) -> SaveError:
    """`copies`: not the masters were written, with which the comparison is."""
    first, fix = differences[0], "check the disk and the memory of this machine, then try again"
    if copies:
        fix += '; were the masters changed on purpose: --allow stale (Python: allow={"stale"})'
    return SaveError(
        "what was read back is not what the checkpoint holds; nothing is left of it",
        file=written,
        parameter=first.parameter,
        expected=first.a,
        found=f"{first.what}: {first.b}; {len(differences)} differences",
        fix=fix,
        id="",
    )
