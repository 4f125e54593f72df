"""Converts a checkpoint into another format or onto another mesh, and moves the pointer to it."""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.manifest import CONVERTED_FROM, FILE_NAME, TAG
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import StoreError, UcpError, UsageError
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.files import is_universal
from megatron_ucp.formats.deepspeed.lost_states import refuse_lost_moments
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.registry import is_megatron, open_checkpoint
from megatron_ucp.formats.store import Location, folder_at, location
from megatron_ucp.formats.tags import (
    LATEST,
    LATEST_UNIVERSAL,
    MEGATRON_LATEST,
    has_state_files,
    iteration_name,
    iteration_of_name,
    pointers_to,
)
from megatron_ucp.reshard import agree, dcp
from megatron_ucp.reshard.findings import Progress, checked
from megatron_ucp.reshard.folder import FolderOutput, FolderSink, check_source, require_plain
from megatron_ucp.reshard.options import (
    CONVERT,
    OUTPUTS,
    check_switch,
    check_words,
    no_mesh,
    one_target,
    parsed_config,
    plain_path,
)
from megatron_ucp.reshard.target import Conversion, SourceSettings
from megatron_ucp.reshard.transfer import TransferRun, transfer
from megatron_ucp.reshard.work_sharing import as_rank_error, ranks_of, require_same, source_of
from megatron_ucp.reshard.writers import native, torch_dist, universal

# ---- table
#
# The formats that can be written: a row for each, beside those of `formats/registry` for reading.


FolderPlan = Callable[
    [SourceSettings, Conversion, Mapping[str, Any] | None, Location], FolderOutput
]


@dataclass(frozen=True)
class Writable:
    """One format. `plan` says everything about a folder but its tensors. `pointer` is the file that
    names the newest tag, one of `pointers`, which decide together what a load takes; Megatron's
    names none but `numbered` folders. `for_ranks`: its files are those of the ranks of one mesh;
    else `as_source`: it names the tensor-parallel ranks and stages of a mesh, of the source's where
    nobody says one. `unused` are the words of a target that it has no place for; where it is
    `whole`, a mesh of several ranks is one, too."""

    name: str
    plan: FolderPlan
    pointer: str
    pointers: tuple[str, ...]
    unused: tuple[str, ...] = ()
    for_ranks: bool = False
    as_source: bool = False
    numbered: bool = False
    whole: bool = False


NATIVE = Writable("native", native, LATEST, (LATEST, MEGATRON_LATEST), for_ranks=True)
UNIVERSAL = Writable("universal", universal, LATEST_UNIVERSAL, (LATEST_UNIVERSAL,), ("stages",))
TORCH_DIST = Writable(
    "torch_dist",
    torch_dist,
    MEGATRON_LATEST,
    (LATEST, MEGATRON_LATEST),
    (
        *("optimizer", "groups", "stages", "sub_group_size", "alignment", "round_robin"),
        *("grad_accum_fp32", "offloaded", "pipeline"),
    ),
    as_source=True,
    numbered=True,
)
_NO_PLACE = (
    *("dtype", "stages", "sub_group_size", "alignment", "round_robin"),
    *("grad_accum_fp32", "offloaded", "pipeline"),
)
DCP = Writable("dcp", dcp.plain, LATEST, (LATEST,), _NO_PLACE, whole=True)
ACCELERATE = Writable("accelerate", dcp.accelerate, LATEST, (LATEST,), _NO_PLACE, whole=True)
TORCHTITAN = Writable("torchtitan", dcp.torchtitan, LATEST, (LATEST,), _NO_PLACE, whole=True)
_ROWS = (NATIVE, UNIVERSAL, TORCH_DIST, DCP, ACCELERATE, TORCHTITAN)
WRITABLE = dict(zip(OUTPUTS, _ROWS, strict=True))


def writable(name: str | None, given: Target | None) -> Writable:
    """The format of a name; without one native files where a mesh is `given`, else a universal
    folder. Raises UsageError."""
    if name is None:
        return UNIVERSAL if given is None else NATIVE
    if name not in WRITABLE:
        raise UsageError(
            "there is no such format to convert to",
            expected=", ".join(WRITABLE),
            found=name,
            fix="give --to (Python: to=) one of these; export-hf writes a Hugging Face folder",
        )
    return WRITABLE[name]


def default_target(origin: SourceSettings, to: Writable) -> Target:
    """Where nobody said a mesh. Of a mixture a folder for Megatron then says that experts have no
    optimizer of their own, whatever the source has."""
    manifest = origin.manifest
    if not to.as_source or any(spec.expert is not None for spec in manifest.params):
        return Target(Mesh())
    tp, pp = manifest.mesh.tp, manifest.mesh.pp
    return Target(Mesh(tp=tp, pp=pp, dp=manifest.mesh.world // (tp * pp)))


def refuse_unused(target: Target, to: Writable = NATIVE) -> None:
    """Raises UsageError for what a target says that its format, or its mesh, has no place for."""
    found = [name for name in to.unused if getattr(target, name) is not None]
    found += ["mesh"] if to.whole and target.mesh.world > 1 else []
    where = f"a folder in the format {to.name}"
    if to.for_ranks and target.stages is not None and target.mesh.pp == 1:
        found, where = ["stages"], "a mesh without pipeline stages (pp=1)"
    if found:
        raise UsageError(
            f"{where} has no place for {', '.join(found)}",
            expected="only what is used",
            found=", ".join(f"{name}={getattr(target, name)}"[:80] for name in found),
            fix=f"leave out {', '.join('--' + name.replace('_', '-') for name in found)} (Python: "
            f"{', '.join(name + '=' for name in found)})",
        )


# ---- pointing
#
# Whether a folder that was converted gets a pointer such as `latest`, and what is said of it.
#
# A pointer decides what every later command and job loads. So none is moved that was not asked
# for.


_OWN_NAME = re.compile(r"global_step\d+|iter_\d{7,}")


def check_name(folder: Location, to: Writable, latest: bool) -> None:
    """Raises UsageError where a pointer is asked for that can't name the folder."""
    if latest and not _can_name(to, folder.absolute().name):
        raise UsageError(
            f"`{to.pointer}` can't name this folder",
            file=folder,
            expected=f"a name such as {iteration_name(100)}",
            found=folder.name,
            fix="name the output so, or leave --latest out (Python: latest=)",
        )


def _can_name(to: Writable, name: str) -> bool:
    return not to.numbered or iteration_of_name(name) is not None


def point_at(folder: Location, to: Writable, latest: bool, iteration: int) -> str:
    """Writes the pointer that belongs to a new folder, where that is asked for (`latest`), or where
    the folder above is a run of that format that has none; says what was done, or how to load the
    folder. `iteration` is that of the run."""
    folder = folder.absolute()
    parent, name, own = folder.parent, folder.name, to.pointer
    by_path = f"load it by its path, or with the tag {name}"
    if to.numbered:
        by_path = "Megatron-LM goes by that pointer: give --latest (Python: latest=True) for it"
    if not _can_name(to, name):
        return (
            f"no pointer was written: Megatron-LM looks for folders such as "
            f"{iteration_name(iteration)}; rename {name} for it"
        )
    if not latest and (kept := _left_alone(parent, name, to)):
        return f"{kept}: {by_path}"
    is_alone = to.pointers == (own,)
    moving, notes = ({own: name}, []) if is_alone else pointers_to(parent, name, own)
    try:
        for pointer, text in moving.items():
            output_folder.replace_text(parent / pointer, text, output_folder.Syncs())
    except (OSError, StoreError) as error:  # the output is whole all the same
        return f"`{own}` could not be written ({type(error).__name__}): {by_path}"
    named = " and ".join(f"`{pointer}`" for pointer in moving)
    return "; ".join([f"{named} in {parent} now names {name}", *notes])


def _left_alone(parent: Location, name: str, to: Writable) -> str:
    """Why no pointer of a folder is written that nobody asked for; "" where it is a run of that
    format without one."""
    there = [one for one in to.pointers if (parent / one).is_file()]
    if there:
        names = (parent / there[0]).read_text(errors="replace").strip()[:80]
        return f"`{there[0]}` still names {names}"
    return "" if _is_run(parent, name, to) else f"no `{to.pointer}` was written"


def _is_run(parent: Location, name: str, to: Writable) -> bool:
    """Whether a program saved tags of the same kind into a folder: not merely that copies of tags,
    or what was converted, lie there. DeepSpeed keeps universal folders beside its own tags."""
    others = [path for path in parent.iterdir() if path.is_dir() and path.name != name]
    tags = [path for path in others if has_state_files(path) and not is_universal(folder_at(path))]
    return any(is_megatron(path) == to.numbered and _was_saved(path) for path in tags)


def _was_saved(tag: Location) -> bool:
    """Whether a program saved this tag here, under this name: as its manifest says, else as
    DeepSpeed, transformers and Megatron-LM name their own."""
    if not (tag / FILE_NAME).is_file():
        return _OWN_NAME.fullmatch(tag.name) is not None
    try:
        run = from_json((tag / FILE_NAME).read_bytes(), str(tag / FILE_NAME)).run
    except StoreError:
        raise
    except (OSError, UcpError):
        return False
    return run.get(TAG) == tag.name and CONVERTED_FROM not in run


# ---- convert
#
# One checkpoint as another one on disk, in one of the formats of `outputs/table`.
#
# The output is planned and proved as a whole before its first byte, then written window by window
# through a buffer of bounded size, whatever the model. It appears whole or not at all. Every byte
# of the source that a copy used is compared with its record's CRC-32 before that.


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
    ranks: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Writes a checkpoint as a new tag folder of another mesh or format. Not needed to resume: an
    engine loads any checkpoint as it is.

    Args:
        src: The checkpoint: a tag folder, or the folder above it. It is never touched.
        dst: The new tag folder. It must not exist, and appears whole or not at all.
        to: "native" (files that DeepSpeed's own load takes on the mesh), "universal" (a universal
            folder of DeepSpeed's, which needs no mesh), "torch_dist" (a folder for Megatron; the
            mesh then says whether experts have an optimizer of their own), "dcp" (a folder for
            FSDP2's own `dcp.load`), "accelerate" (folders for FSDP2 under Accelerate or Trainer) or
            "torchtitan" (a folder for torchtitan's own checkpointer, under its names).
            Default: native where a mesh is given, else universal.
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
        ranks: Whether all ranks of torch.distributed's default group write the folder together,
            each a share of the bytes. Each of them then calls this, with the same arguments.
            Default: only the process that calls it works, whatever groups there are.
        progress: `progress(done, total)` counts bytes; with `ranks` those of this rank.

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
    started, together = time.perf_counter(), ranks_of(ranks)
    with as_rank_error("the conversion"), ExitStack() as opened:
        with agree.together(together):
            folder = location(plain_path(dst))
            asked, row = _check_arguments(folder, to, mesh, target, latest, allow)
            config = parsed_config(ds_config)
            source = opened.enter_context(open_checkpoint(src, tag, rules))
            check_source(source, folder, allow)
            refuse_lost_moments(source.manifest, str(source.folder))
            origin = SourceSettings(source, rules is not None)
            wanted = _wanted(origin, asked, row, config, allow)
            origin.take_values(wanted.target.mesh if row.for_ranks else None, allow)
            output = row.plan(origin, wanted, config, folder)
            mesh = str(wanted.target.mesh) if row.for_ranks else row.name
        require_same(output, together, dst=folder, to=row.name, mesh=mesh, latest=latest)
        writing = Writing(folder, row, latest, allow, progress, started, ranks)
        return writing.write(source, output, str(source.manifest.written_on), mesh, origin.notes)


def _wanted(
    origin: SourceSettings,
    asked: Target | None,
    to: Writable,
    config: Mapping[str, Any] | None,
    allow: Collection[str],
) -> Conversion:
    """What is written, with all that nobody said. Raises UsageError for what the format lacks."""
    asked = (asked or default_target(origin, to)).with_zero_of(origin.manifest.mesh)
    refuse_unused(asked, to)
    return origin.wanted(asked, config, allow)


@dataclass(frozen=True)
class Writing:
    """A folder that is written from the files of a checkpoint, in a format: `latest`, `allow`,
    `progress` and `ranks` as of `convert`, `started` as a clock says it."""

    folder: Location
    to: Writable
    latest: bool
    allow: Collection[str]
    progress: Progress | None
    started: float
    ranks: bool = False

    def write(
        self,
        source: Checkpoint,
        output: FolderOutput,
        source_mesh: str,
        mesh: str,
        notes: Sequence[str],
    ) -> Converted:
        """Writes it, and its pointer. Raises a UcpError."""
        values = source_of(source, str(source.folder), ranks=self.ranks)
        run = TransferRun(progress=self.progress)
        sink = FolderSink(self.folder, output, self.ranks)
        transfer(values, sink, frozenset(self.allow), run=run, alone=not self.ranks)
        steps, ranks = int(source.extras.counters.get("global_steps", 0)), ranks_of(self.ranks)
        pointer = agree.of_first(lambda: point_at(self.folder, self.to, self.latest, steps), ranks)
        read_bytes, written_bytes = agree.total(values.read_bytes, run.done, ranks=ranks)
        return Converted(
            str(self.folder),
            source_mesh,
            mesh,
            files=len(output.files),
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            pointer=pointer,
            proved=checked(source),
            notes=(*source.notes, *notes),
            seconds=time.perf_counter() - self.started,
        )


def _check_arguments(
    folder: Location,
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
