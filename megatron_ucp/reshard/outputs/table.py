"""The formats that can be written: a row for each, beside those of `formats/registry` for
reading."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.pointers import LATEST, MEGATRON_LATEST
from megatron_ucp.formats.tags import LATEST_UNIVERSAL
from megatron_ucp.reshard.folder_sink import FolderOutput
from megatron_ucp.reshard.outputs.deepspeed import native, universal
from megatron_ucp.reshard.outputs.torch_dist import torch_dist
from megatron_ucp.reshard.source_settings import Origin
from megatron_ucp.reshard.wanted import Wanted

FolderPlan = Callable[[Origin, Wanted, Mapping[str, Any] | None, Path], FolderOutput]


@dataclass(frozen=True)
class Writable:
    """One format. `plan` says everything about a folder but its tensors. `pointer` is the file that
    names the newest tag, one of `pointers`, which decide together what a load takes; Megatron's
    names none but `numbered` folders. `for_ranks`: its files are those of the ranks of one mesh;
    else `as_source`: it names the tensor-parallel ranks and stages of a mesh, of the source's where
    nobody says one. `unused` are the words of a target that it has no place for."""

    name: str
    plan: FolderPlan
    pointer: str
    pointers: tuple[str, ...]
    unused: tuple[str, ...] = ()
    for_ranks: bool = False
    as_source: bool = False
    numbered: bool = False


NATIVE = Writable("native", native, LATEST, (LATEST, MEGATRON_LATEST), for_ranks=True)
UNIVERSAL = Writable("universal", universal, LATEST_UNIVERSAL, (LATEST_UNIVERSAL,), ("stages",))
TORCH_DIST = Writable(
    "torch_dist",
    torch_dist,
    MEGATRON_LATEST,
    (LATEST, MEGATRON_LATEST),
    (
        *("optimizer", "groups", "stages", "sub_group_size", "alignment", "round_robin"),
        *("grad_accum_fp32", "offloaded"),
    ),
    as_source=True,
    numbered=True,
)
WRITABLE = {row.name: row for row in (NATIVE, UNIVERSAL, TORCH_DIST)}


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


def default_target(origin: Origin, to: Writable) -> Target:
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
