"""One checkpoint as another one on disk, in one of the formats of `outputs/table`.

The output is planned and proved as a whole before its first byte, then written window by window
through a buffer of bounded size, whatever the model. It appears whole or not at all. Every byte of
the source that a copy used is compared with its record's CRC-32 before that.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed.doctor import refuse_lost_moments
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.allowances import CONVERT, check_words
from megatron_ucp.reshard.arguments import (
    check_switch,
    no_mesh,
    one_target,
    parsed_config,
    plain_path,
)
from megatron_ucp.reshard.file_source import FileSource
from megatron_ucp.reshard.findings import Progress, checked
from megatron_ucp.reshard.folder_sink import (
    FolderOutput,
    FolderSink,
    check_source,
    require_plain,
)
from megatron_ucp.reshard.outputs.table import Writable, default_target, refuse_unused, writable
from megatron_ucp.reshard.pointing import check_name, point_at
from megatron_ucp.reshard.source_settings import Origin
from megatron_ucp.reshard.transfer import TransferRun, transfer
from megatron_ucp.reshard.wanted import Wanted


@dataclass(frozen=True)
class Converted:
    """What a conversion did. `read_bytes` and `written_bytes` are of tensors; `pointer` says which
    pointer was written, or how to load the folder without one; `notes` say what is not as in the
    source; `proved` what was compared."""

    path: str
    source_mesh: str
    mesh: str
    files: int
    read_bytes: int
    written_bytes: int
    seconds: float
    pointer: str
    notes: tuple[str, ...]
    proved: str = ""

    def __str__(self) -> str:
        return (
            f"wrote {self.path}: {self.source_mesh} -> {self.mesh}; "
            f"{say.amount(self.written_bytes)} of tensors in {self.files} files, "
            f"{say.duration(self.seconds)}, {self.proved}; {self.pointer}"
        )


@say.shown("convert", ends=True)
def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str | None = None,
    mesh: Mesh | str | None = None,
    target: Target | Mesh | str | None = None,
    latest: bool = False,
    tag: str | None = None,
    rules: str | Path | None = None,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint as a new tag folder of another mesh or format. Not needed to resume: an
    engine loads any checkpoint as it is.

    Args:
        src: The checkpoint: a tag folder, or the folder above it. It is never touched.
        dst: The new tag folder. It must not exist, and appears whole or not at all.
        to: "native" (files that DeepSpeed's own load takes on the mesh), "universal" (a universal
            folder of DeepSpeed's, which needs no mesh) or "torch_dist" (a folder for Megatron; the
            mesh then says whether experts have an optimizer of their own). Default: native where a
            mesh is given, else universal.
        mesh: The mesh that the folder is for, such as "tp=2,dp=4". An axis that is left out is 1; a
            ZeRO stage that a string leaves out is the source's.
        target: In place of `mesh`: a `Target`, which says more than a mesh.
        latest: Whether the pointer (`latest`) names the new folder, too. It does anyway where the
            folder above is a run of that format without one.
        tag: The tag in `src`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.
        ds_config: The DeepSpeed config of the job that will load the folder, or its file; what it
            does not say is as in the source.
        allow: What may happen besides exact copies: "mean", "narrow", "per_rank",
            "replicas", "stale".
        progress: `progress(done, total)` counts bytes.

    Returns:
        What was done: path, meshes, files, bytes, seconds, notes.

    Raises:
        UsageError: For arguments that can't be, or that this format does not use.
        SaveError: Where the output can't be written; nothing is left of it.
        UcpError: Where the source can't be carried over exactly.

    Example:
        >>> import megatron_ucp as ucp
        >>> done = ucp.convert("runs/llama", "dp3/global_step80", mesh="dp=3,zero=1")
    """
    started, folder = time.perf_counter(), Path(plain_path(dst))
    asked, row = _check_arguments(folder, to, mesh, target, latest, allow)
    writing = Writing(folder, row, latest, allow, progress, started)
    config = parsed_config(ds_config)
    with open_checkpoint(src, tag, rules) as source:
        check_source(source, folder, allow)
        refuse_lost_moments(source.manifest, str(source.folder))
        origin = Origin(source, rules is not None)
        wanted = _wanted(origin, asked, row, config, allow)
        origin.take_values(wanted.target.mesh if row.for_ranks else None, allow)
        output = row.plan(origin, wanted, config, folder)
        mesh = str(wanted.target.mesh) if row.for_ranks else row.name
        return writing.write(source, output, str(source.manifest.written_on), mesh, origin.notes)


def _wanted(
    origin: Origin,
    asked: Target | None,
    to: Writable,
    config: Mapping[str, Any] | None,
    allow: Collection[str],
) -> Wanted:
    """What is written, with all that nobody said. Raises UsageError for what the format lacks."""
    asked = (asked or default_target(origin, to)).with_zero_of(origin.manifest.mesh)
    refuse_unused(asked, to)
    return origin.wanted(asked, config, allow)


@dataclass(frozen=True)
class Writing:
    """A folder that is written from the files of a checkpoint, in a format: `latest`, `allow` and
    `progress` as of `convert`, `started` as a clock says it."""

    folder: Path
    to: Writable
    latest: bool
    allow: Collection[str]
    progress: Progress | None
    started: float

    def write(
        self,
        source: Checkpoint,
        output: FolderOutput,
        source_mesh: str,
        mesh: str,
        notes: Sequence[str],
    ) -> Converted:
        """Writes it, and its pointer. Raises a UcpError."""
        values, run = FileSource(source, str(source.folder)), TransferRun(progress=self.progress)
        sink = FolderSink(self.folder, output)
        transfer(values, sink, frozenset(self.allow), run=run, alone=True)
        steps = int(source.extras.counters.get("global_steps", 0))
        return Converted(
            str(self.folder),
            source_mesh,
            mesh,
            files=len(output.files),
            read_bytes=values.read_bytes,
            written_bytes=run.done,
            pointer=point_at(self.folder, self.to, self.latest, steps),
            proved=checked(source),
            notes=(*source.notes, *notes),
            seconds=time.perf_counter() - self.started,
        )


def _check_arguments(
    folder: Path,
    to: str | None,
    mesh: Mesh | str | None,
    target: Target | Mesh | str | None,
    latest: bool,
    allow: Collection[str],
) -> tuple[Target | None, Writable]:
    """The target, None where nobody said one, and the format. Raises UsageError."""
    check_words(allow, {CONVERT})
    check_switch("latest", latest)
    given = one_target(mesh, target)
    row = writable(to, given)
    if given is None and row.for_ranks:
        raise no_mesh("native files are")
    require_plain(folder)
    check_name(folder, row, latest)
    return given, row
