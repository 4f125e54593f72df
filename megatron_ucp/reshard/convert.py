"""One checkpoint as another one on disk: native files of any mesh, or DeepSpeed's universal folder.

The output is planned and proved as a whole before its first byte, then written window by window
through a buffer of bounded size, whatever the model. It appears whole or not at all: everything is
written into a folder aside, brought to disk, and renamed. Every byte of the source that a copy used
is compared with its record's CRC-32 before that.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.experts import is_stacked
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed import muon
from megatron_ucp.formats.deepspeed.doctor import refuse_lost_moments
from megatron_ucp.formats.deepspeed.native_structure import RunSettings
from megatron_ucp.formats.deepspeed.native_writer import NativeWriter
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.deepspeed.universal_writer import UniversalWriter
from megatron_ucp.formats.pt.output import Output
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.arguments import (
    check_allow,
    check_switch,
    no_mesh,
    one_target,
    parsed_config,
    plain_path,
)
from megatron_ucp.reshard.conversion_job import NARROW, ConversionJob, write_tag
from megatron_ucp.reshard.expert_meshes import notes_of_groups, notes_of_universal
from megatron_ucp.reshard.findings import Progress, checked
from megatron_ucp.reshard.output_folder import (
    require_outside,
    require_plain,
)
from megatron_ucp.reshard.pointing import (
    NATIVE,
    TORCH_DIST,
    UNIVERSAL,
    check_name,
    point_at,
)
from megatron_ucp.reshard.source_settings import Origin
from megatron_ucp.reshard.stage_division import no_layers, with_stages
from megatron_ucp.reshard.target import Wanted, target_manifest, universal_manifest
from megatron_ucp.reshard.to_torch_dist import TorchDistJob, written
from megatron_ucp.reshard.unused import refuse_unused

ALLOWED = NARROW | {"mean", "stale", "per_rank"}


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
        allow: What may happen besides exact copies: "mean", "narrow", "per_rank", "stale".
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
    asked, to = _check_arguments(folder, to, mesh, target, latest, allow)
    config = parsed_config(ds_config)
    with open_checkpoint(src, tag, rules) as source:
        require_outside(folder, source.folder)
        _check_files(source, allow)
        origin = Origin(source, rules is not None)
        wanted = _wanted(origin, asked, to, config)
        origin.take_values(wanted.target.mesh if to == NATIVE else None, allow)
        how = folder, frozenset(allow), progress
        write = _to_torch_dist if to == TORCH_DIST else partial(_to_tag, _WRITERS[to])
        job, files = write(origin, wanted, config, *how)
        pointer, proved = point_at(folder, to, latest, _steps(source)), checked(source)
    meshes = str(source.manifest.written_on), str(wanted.target.mesh) if to == NATIVE else to
    moved = files, job.reader.read_bytes, job.done, time.perf_counter() - started
    notes = (*source.notes, *origin.notes)
    return Converted(str(folder), *meshes, *moved, pointer, notes, proved)


def _wanted(
    origin: Origin, asked: Target | None, to: str, config: Mapping[str, Any] | None
) -> Wanted:
    """What is written, with all that nobody said. Raises UsageError for what the format lacks."""
    asked = (asked or _as_source(origin, to)).with_zero_of(origin.manifest.mesh)
    refuse_unused(asked, to)
    return origin.wanted(asked, config)


def _steps(source: Checkpoint) -> int:
    return int(source.extras.counters.get("global_steps", 0))


def _to_tag(
    outputs_of: Callable[..., tuple[Manifest, list[Output]]],
    origin: Origin,
    wanted: Wanted,
    config: Mapping[str, Any] | None,
    folder: Path,
    allow: frozenset[str],
    progress: Progress | None,
) -> tuple[ConversionJob, int]:
    """Writes the files of DeepSpeed's formats; the job that did, and the number of files."""
    manifest, outputs = outputs_of(origin, wanted, config)
    job = ConversionJob(origin.source, manifest, allow, progress)
    return job, write_tag(job, outputs, folder, origin.apart)


def _to_torch_dist(
    origin: Origin,
    wanted: Wanted,
    config: Mapping[str, Any] | None,
    folder: Path,
    allow: frozenset[str],
    progress: Progress | None,
) -> tuple[TorchDistJob, int]:
    """Writes a folder for Megatron; the job that did, and the number of files."""
    _refuse_muon(wanted, "folder for Megatron")
    out = written(wanted, origin.source, wanted.target.mesh, origin.notes)
    job = TorchDistJob(origin.source, out, allow, progress)
    job.prove()
    job.write(folder)
    return job, len(out.plan.sizes) + 1


def _check_files(source: Checkpoint, allow: Collection[str]) -> None:
    """Compares the files with each other, and refuses those that lack what was trained."""
    for name in source.file_names:
        source.check(name, allow)
    refuse_lost_moments(source.manifest, str(source.folder))


def _native(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None
) -> tuple[Manifest, list[Output]]:
    """The manifest and the files that DeepSpeed would have written on the target's mesh."""
    keeper = wanted.target.keeper(wanted.dtype)
    if keeper == Keeper.ZERO_0 and _stacked(wanted.source):
        raise _no_writer(wanted, "files of stage 0", "convert to ZeRO 1, 2 or 3")
    if wanted.target.mesh.zero > 1 and _stacked(wanted.source, "frozen"):
        raise _no_writer(wanted, "frozen parameters at ZeRO 2 and 3", "convert to ZeRO-1")
    wanted, notes = with_stages(wanted)
    origin.notes += notes
    manifest = target_manifest(wanted)
    settings = origin.settings(wanted, manifest, config)
    origin.notes += muon.other_steps(wanted.source, manifest)
    listed = wanted.target.groups is not None
    origin.notes += notes_of_groups(wanted.source, manifest.mesh, listed)
    if keeper == Keeper.ZERO_3 and muon.is_used(manifest):
        origin.notes.append(_AT_INIT)
    manifest = _versioned(manifest, settings)
    return manifest, list(NativeWriter(manifest, settings, wanted.layers).outputs())


def _universal(
    origin: Origin, wanted: Wanted, config: Mapping[str, Any] | None
) -> tuple[Manifest, list[Output]]:
    """The manifest and the files of a universal folder."""
    if _stacked(wanted.source):
        raise _no_writer(wanted, "universal folders", "convert to native, which loads on any mesh")
    _refuse_muon(wanted, "universal folder, whose momentum stock DeepSpeed would cut wrongly")
    manifest = universal_manifest(wanted)
    origin.notes += notes_of_universal(wanted.source)
    if wanted.target.mesh.pp > 1 and wanted.layers is None:
        raise no_layers(wanted.file)
    manifest = replace(manifest, names=dict(wanted.layers.names) if wanted.layers else {})
    settings = origin.settings(wanted, manifest, config)
    manifest = _versioned(manifest, settings)
    pipe = {name: pipe for pipe, name in manifest.names.items()}
    return manifest, list(UniversalWriter(manifest, settings, pipe).outputs())


def _versioned(manifest: Manifest, settings: RunSettings) -> Manifest:
    """The manifest of files in the form of a version of DeepSpeed, which the source's need not
    be."""
    return replace(manifest, run={"ds_version": settings.version, **manifest.run})


def _stacked(source: Manifest, *kinds: str) -> bool:
    """Whether the experts are slices of stacked parameters, of some kinds or of any."""
    return any(is_stacked(s.name) and (not kinds or s.kind in kinds) for s in source.params)


def _refuse_muon(wanted: Wanted, what: str) -> None:
    """Raises UnsupportedError where Muon steps a group, of whose momentum a format knows
    nothing."""
    if muon.is_used(wanted.source):
        raise UnsupportedError(
            f"there is no {what}, of a run with Muon",
            file=wanted.file,
            expected="native files",
            found="a group that Muon steps",
            fix="convert to native, which loads on any mesh",
        )


_AT_INIT = (
    "Muon at ZeRO-3: parameters are in the order of the source's optimizer; for a job that builds "
    "its model under zero.Init, or without it where the source did, list the groups in its order"
)


def _no_writer(wanted: Wanted, what: str, fix: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} with AutoEP's stacked experts are not written",
        file=wanted.file,
        expected="native files at ZeRO 1, 2 or 3",
        found=str(wanted.target.mesh),
        fix=fix,
    )


_WRITERS = {NATIVE: _native, UNIVERSAL: _universal}
_KNOWN = (*_WRITERS, TORCH_DIST)


def _check_arguments(
    folder: Path,
    to: str | None,
    mesh: Mesh | str | None,
    target: Target | Mesh | str | None,
    latest: bool,
    allow: Collection[str],
) -> tuple[Target | None, str]:
    """The target, None where nobody said one, and the format. Raises UsageError."""
    check_allow(allow, ALLOWED)
    check_switch("latest", latest)
    given = one_target(mesh, target)
    to = to or (UNIVERSAL if given is None else NATIVE)
    if to not in _KNOWN:
        raise UsageError(
            "there is no such format to convert to",
            expected=", ".join(_KNOWN),
            found=to,
            fix="give --to (Python: to=) one of these; export-hf writes a Hugging Face folder",
        )
    if given is None and to == NATIVE:
        raise no_mesh("native files are")
    require_plain(folder)
    check_name(folder, to, latest)
    return given, to


def _as_source(origin: Origin, to: str) -> Target:
    """Where nobody said a mesh: the tensor-parallel ranks and stages of the source, which a folder
    for Megatron names as the run's. Of a mixture it then says that experts have no optimizer of
    their own, whatever the source has."""
    manifest = origin.manifest
    if to != TORCH_DIST or any(spec.expert is not None for spec in manifest.params):
        return Target(Mesh())
    tp, pp = manifest.mesh.tp, manifest.mesh.pp
    return Target(Mesh(tp=tp, pp=pp, dp=manifest.mesh.world // (tp * pp)))
