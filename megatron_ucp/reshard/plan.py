"""What a resume would read, rank by rank, from manifests alone: no tensor is touched, no rank needs
to exist."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.box import span
from megatron_ucp.core.flat import FlatBuffer, States
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coord, Mesh
from megatron_ucp.core.plan import Op, Side, Slot, Windows
from megatron_ucp.core.proof import prove
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.convert import refuse_unused
from megatron_ucp.reshard.execute import ROWS_FROM_BYTES, STAGING_BYTES
from megatron_ucp.reshard.options import needed_target, parsed_config
from megatron_ucp.reshard.target import SourceSettings, target_manifest, with_stages

_PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class RankReads:
    """What one rank reads: `files` -> bytes, the number of strided copies, the bytes of the states
    that it fills, and the most memory that it needs meanwhile besides the model's weights."""

    rank: int
    coord: Coord
    files: Mapping[str, int]
    copies: int
    state_bytes: int
    peak_bytes: int

    @property
    def read_bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Preview:
    """A resume that was planned. `stored_bytes` is what the source holds of states, each once."""

    source_mesh: str
    mesh: str
    ranks: tuple[RankReads, ...]
    stored_bytes: int
    notes: tuple[str, ...] = ()


@say.shown("plan", "ranks")
def plan(
    path: str | Path,
    mesh: Mesh | str | None = None,
    *,
    target: Target | Mesh | str | None = None,
    tag: str | None = None,
    rules: str | Path | None = None,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Preview:
    """What each rank of a job on another mesh would read of a checkpoint: the dry run of a resume.
    No tensor is read.

    Args:
        path: A tag folder, or the folder above it.
        mesh: The mesh of the job, such as "tp=2,dp=4". An axis that is left out is 1, a ZeRO stage
            the source's.
        target: In place of `mesh`: a `Target`, which says more than a mesh.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.
        ds_config: The DeepSpeed config of the job, or its file.
        progress: `progress(done, total)` counts ranks.

    Returns:
        Meshes, and for each rank the files and bytes that it reads.

    Raises:
        UsageError: For a mesh that can't be.
        UcpError: For a checkpoint that can't be carried over to that mesh.

    Example:
        >>> import megatron_ucp as ucp
        >>> [rank.read_bytes for rank in ucp.plan("runs/llama", "dp=3,zero=1").ranks]
        [3543680, 3543552, 3543552]
    """
    asked = needed_target(mesh, target, "a plan is")
    config = parsed_config(ds_config)
    with open_checkpoint(path, tag, rules) as source:
        origin = SourceSettings(source, rules is not None)
        asked = asked.with_zero_of(source.manifest.mesh)
        refuse_unused(asked)
        wanted, staged = with_stages(origin.wanted(asked, config))
        manifest = target_manifest(wanted)

        def file_of(slot: Slot) -> str:
            return source.folder.name_of(source.where(slot).file.path)

        notes = (*source.notes, *origin.notes, *staged)
        return of_manifests(source.manifest, manifest, file_of, progress, notes)


def of_manifests(
    source: Manifest,
    target: Manifest,
    file_of: Callable[[Slot], str],
    progress: Callable[[int, int], None] | None = None,
    notes: tuple[str, ...] = (),
) -> Preview:
    """Every rank of the target's mesh. Each rank's plan is proved. Raises PlanError,
    InexactError."""
    reads = _Reads(source, target, file_of)
    out: list[RankReads] = []
    for rank in range(target.mesh.world):
        out.append(reads.of_rank(rank))
        if progress is not None:
            progress(rank + 1, target.mesh.world)
    stored = sum(
        source.by_name[name].elems * ITEMSIZE[dtype]
        for name in source.holders
        for dtype in source.states_of(name).values()
    )
    return Preview(str(source.written_on), str(target.mesh), tuple(out), stored, notes)


class _Reads:
    """What each rank of a target reads of a source."""

    def __init__(self, source: Manifest, target: Manifest, file_of: Callable[[Slot], str]) -> None:
        self.source, self.target, self._file_of = source, target, file_of
        self._windows = Windows(source, target)
        # where the states of a source's place are: file, bytes of an element
        self._read_of: dict[Slot, list[tuple[str, int]]] = {}

    def of_rank(self, rank: int) -> RankReads:
        files, copies, filled = Counter[str](), 0, 0
        for number, cut, part in self.target.parts_of(rank):
            buffer = self.target.buffers[number]
            for states in self._cut_alike(buffer):
                place = Slot(number, cut, part, states[0][0])
                elems = buffer.of(place.state).elems(part)
                plan = self._windows.plan(place, place.state, 0, elems)
                prove(plan, self.source, self.target)
                for op in plan.ops:
                    self._count(op, states, files)
                copies += len(plan.ops) * len(states)
                filled += elems * sum(ITEMSIZE[dtype] for _, dtype in states)
        coord, most = self.target.mesh.coord(rank), filled + STAGING_BYTES
        return RankReads(rank, coord, dict(sorted(files.items())), copies, filled, most)

    def _cut_alike(self, buffer: FlatBuffer) -> list[States]:
        """The states of a buffer, those together that are cut alike on both sides: what is planned
        and proved for the first one holds for all."""
        apart = self.source.uncut | self.target.uncut
        together = tuple(one for one in buffer.states if one[0] not in apart)
        alone = [(one,) for one in buffer.states if one[0] in apart]
        return [*([together] if together else []), *alone]

    def _count(self, op: Op, states: States, files: Counter[str]) -> None:
        """Adds what an operation reads, for all of some states of a buffer."""
        for side in op.sources:
            if side.slot not in self._read_of:
                held = dict(self.source.buffers[side.slot.buffer].states)
                self._read_of[side.slot] = [
                    (self._file_of(replace(side.slot, state=state)), ITEMSIZE[held[state]])
                    for state, _ in states
                ]
            for file, itemsize in self._read_of[side.slot]:
                files[file] += read_size(op, side, itemsize)


def read_size(op: Op, side: Side, itemsize: int) -> int:
    """Bytes that `execute` reads for one side of an operation: a small region with the gaps in it,
    a large one row by row."""
    elems = span(op.shape, side.strides)
    rows = side.strides[-1] == 1 and elems * itemsize > ROWS_FROM_BYTES
    return (op.box.numel if rows else elems) * itemsize


def draw(found: Preview, file: str | Path) -> None:
    """A picture of who reads what from whom: a row for each rank, a column for each file. Raises
    UsageError without matplotlib and for a file that can't be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("a picture needs matplotlib", fix="pip install matplotlib") from None
    if Path(file).suffix.lower() not in _PICTURES:
        raise UsageError(
            "the picture can't be written: there is none of this kind",
            file=file,
            expected=f"a name that ends in {', '.join(_PICTURES)}",
            found=Path(file).suffix or "no ending",
            fix="give --picture such a name",
        )
    names = sorted({name for one in found.ranks for name in one.files}, key=_numbers)
    width, height = 5 + 0.3 * len(names), 4 + 0.22 * len(found.ranks)
    figure = Figure(figsize=(min(width, 14), min(height, 14)), layout="constrained")
    _draw_table(found, names, figure)
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a kind of file that matplotlib lacks
        raise UsageError(
            "the picture can't be written",
            file=file,
            found=getattr(error, "strerror", None) or str(error),
            fix="give --picture a path that can be written, ending in .png, .pdf or .svg",
        ) from None


def _draw_table(found: Preview, names: list[str], figure: Any) -> None:
    from matplotlib.colors import LogNorm

    table = [
        [one.files[name] / 2**20 if name in one.files else math.nan for name in names]
        for one in found.ranks
    ]
    axes = figure.add_subplot()
    # few bytes must be seen too: every file costs its rank an open and a seek
    image = axes.imshow(
        table, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=LogNorm()
    )
    shown = found.ranks[0].coord.shown
    axes.set_title(f"{found.source_mesh}  to  {found.mesh}", fontsize=9)
    axes.set_xlabel("file of the checkpoint")
    axes.set_ylabel(f"rank that reads it ({', '.join(shown)})")
    if len(names) <= 64:
        labels = [name.removesuffix("_states.pt") for name in names]
        axes.set_xticks(range(len(names)), labels, rotation=90, fontsize=7)
    if len(found.ranks) <= 64:
        places = [", ".join(map(str, one.coord.shown.values())) for one in found.ranks]
        labels = [f"{one.rank} ({at})" for one, at in zip(found.ranks, places, strict=True)]
        axes.set_yticks(range(len(found.ranks)), labels, fontsize=7)
    figure.colorbar(image, label="MiB read")


def _numbers(name: str) -> list[str | int]:
    """Rank 10 comes after rank 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
