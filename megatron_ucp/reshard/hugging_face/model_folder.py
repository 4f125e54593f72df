"""A folder of a Hugging Face model that is to be written: its tensors, its files, and what lies
beside the weights."""

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import LOSSLESS, Slot, Want
from megatron_ucp.core.shares import Interleaved, Share, state_in, weights_manifest
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import UsageError, some_of
from megatron_ucp.formats import durable
from megatron_ucp.formats.file_layout import FileLayout, FilePiece, TiledRows
from megatron_ucp.formats.hugging_face.checkpoint import read_json
from megatron_ucp.formats.hugging_face.shards import Tensor, WeightFile, index_of, shards_of
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.diff import weight_of
from megatron_ucp.reshard.file_source import WIDE_WINDOW_BYTES
from megatron_ucp.reshard.folder_sink import FolderOutput, require_free
from megatron_ucp.reshard.hugging_face.beside import LIST_FILE, Beside
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.hugging_face.twin import Twin
from megatron_ucp.reshard.transfer import NARROW, SinkPart, Source

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class OutgoingTensor:
    """A tensor, and where it goes: from byte `place` of `file` on. `state` is the source's that has
    its values, in `saved_dtype`."""

    name: str
    share: Share
    state: str
    saved_dtype: str
    dtype: str
    shape: Ints
    file: str
    place: int

    @property
    def elems(self) -> int:
        return math.prod(self.shape)

    @property
    def is_rounded(self) -> bool:
        """Whether values may change with the dtype."""
        return self.dtype != self.saved_dtype and (self.saved_dtype, self.dtype) not in LOSSLESS


class Outgoing:
    """What is written of a source in `dtype`, into files of at most `max_bytes`. `tensors` are in
    the order of the twin's."""

    def __init__(self, source: Manifest, twin: Twin, dtype: str, max_bytes: int) -> None:
        self.twin, self.dtype = twin, dtype
        held = {share.param: weight_of(source, share.param) for share in twin.shares.values()}
        dtypes = {n: dtype if have in WEIGHT_DTYPES else have for n, (_, have) in held.items()}
        if twin.family:  # its buffers are in fp32 whatever the weights are
            own = [spec.name for spec in twin.specs.values() if spec.kind == "buffer"]
            dtypes |= dict.fromkeys(own, "float32")
        rows = [
            (name, dtypes[share.param], share.stored_shape(twin.specs[share.param]))
            for name, share in twin.shares.items()
        ]
        # peft reads an adapter from one file
        most = sys.maxsize if twin.is_adapter else max_bytes
        self.files = shards_of(_whole_tensors(rows, twin.shares), most, twin.weights_file)
        self.tensors = self._placed(rows, held)

    def _placed(
        self, rows: Sequence[Tensor], held: Mapping[str, tuple[str, str]]
    ) -> list[OutgoingTensor]:
        """The rows with their places in the files; `held` says state and dtype in the source."""
        places = {n: (file.name, at) for file in self.files for n, at in file.places.items()}
        out: list[OutgoingTensor] = []
        for name, dtype, shape in rows:
            share = self.twin.shares[name]
            within = share.slice_of
            file, at = places[name if within is None else within.tensor]
            at += (0 if within is None else within.first_elem(shape)) * ITEMSIZE[dtype]
            out.append(OutgoingTensor(name, share, *held[share.param], dtype, shape, file, at))
        return out

    @property
    def is_loadable(self) -> bool:
        """Whether the folder says what its model is."""
        return self.twin.config is not None

    @property
    def notes(self) -> list[str]:
        """What the class computes a little otherwise, and what the folder lacks."""
        if self.is_loadable:
            return [*self.twin.notes]
        reader = "peft" if self.twin.is_adapter else "transformers"
        file = self.twin.config_file
        return [
            *self.twin.notes,
            f"no {file} was found, which {reader} needs: export again with the folder of the model "
            "as --config (Python: config=)",
        ]

    def output(
        self, source: Source, beside: Beside, publish: Callable[[Path], object], tiles: int = 0
    ) -> FolderOutput:
        """The folder on paper. What the source stores transposed is written in so many `tiles` side
        by side (0: as all else)."""
        writer = _Slots(source.manifest_of(0), self.twin)
        files = tuple(self._layout(file, writer, tiles) for file in self.files)
        part = writer.part()
        return FolderOutput((part,), files, partial(self.finish, beside=beside), publish, "export")

    def exported(
        self,
        folder: Path,
        mesh: str,
        sizes: tuple[int, int, float],
        verified: bool,
        notes: Sequence[str],
        seen: str,
    ) -> Exported:
        """What an export did: bytes read and written, and seconds; `notes` are the source's, `seen`
        says what was compared."""
        counts = len(self.files), sum(len(file.places) for file in self.files)
        said = (*notes, *self.notes)
        where = str(folder), mesh, self.dtype
        return Exported(*where, *counts, *sizes, verified, said, self.is_loadable, seen)

    def _layout(self, file: WeightFile, slots: "_Slots", tiles: int) -> FileLayout:
        """One file: the pieces in the order of their bytes."""
        pieces: list[FilePiece] = []
        tiled: list[TiledRows] = []
        for one in sorted(self.tensors, key=lambda one: one.place):
            if one.file == file.name and self._is_tiled(one, tiles):
                tiled += self._tiles(one, slots, tiles)
            elif one.file == file.name:
                pieces.append(slots.piece(one, one.share, one.elems))
        blobs = [(0, partial(bytes, file.header))]
        return FileLayout(file.name, file.size_bytes, pieces, blobs, tiled=tiled)

    def _is_tiled(self, one: OutgoingTensor, tiles: int) -> bool:
        size_bytes = one.elems * ITEMSIZE[one.dtype]
        turned = one.share.order is not None and not one.share.stacked
        turned = turned and not isinstance(one.share.layout, Interleaved)
        return tiles > 0 and turned and size_bytes > WIDE_WINDOW_BYTES

    def _tiles(self, one: OutgoingTensor, slots: "_Slots", count: int) -> Iterator[TiledRows]:
        """Runs of rows of a tensor that the source stores transposed, in `count` tiles of about as
        many bytes. (Each run reads what lies between its columns, too.)"""
        spec, size_bytes = self.twin.specs[one.share.param], one.elems * ITEMSIZE[one.dtype]
        runs = min(-(-size_bytes // (WIDE_WINDOW_BYTES * count)), one.shape[0])
        place = one.place
        for shares in one.share.tiles(spec, runs, min(count, one.shape[-1])):
            shapes = [share.stored_shape(spec) for share in shares]
            pairs = zip(shares, shapes, strict=True)
            tiles = tuple(slots.piece(one, share, math.prod(shape)) for share, shape in pairs)
            yield TiledRows(shapes[0][0], tiles, place)
            place += sum(tile.size_bytes for tile in tiles)

    def finish(self, folder: Path, beside: Beside) -> None:
        """The index, and what else lies beside the weights. Raises OSError."""
        rows = [(one.name, one.dtype, one.shape) for one in self.tensors]
        params = {one.share.param for one in self.tensors}
        elems = sum(self.twin.specs[name].elems for name in params)
        for name, what in {**index_of(self.files, rows, elems), **beside.files}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if isinstance(what, Path):
                shutil.copyfile(what, folder / name)
            else:
                (folder / name).write_text(what, encoding="utf-8")
        written = _sizes(folder)
        (folder / LIST_FILE).write_text(_json(written), encoding="utf-8")


def _whole_tensors(rows: Sequence[Tensor], shares: Mapping[str, Share]) -> list[Tensor]:
    """The tensors of a folder, of which some rows are slices."""
    out: dict[str, Tensor] = {}
    for name, dtype, shape in rows:
        within = shares[name].slice_of
        whole = name if within is None else within.tensor
        out[whole] = whole, dtype, shape if within is None else within.whole_shape(shape)
    return list(out.values())


class _Slots:
    """The one part of a folder, as its pieces are counted: each has a buffer of its own."""

    def __init__(self, source: Manifest, twin: Twin) -> None:
        self._source, self._twin = source, twin
        self._rows: list[tuple[Share, str]] = []
        self._wants: list[Want] = []
        self._names: list[str] = []

    def piece(self, one: OutgoingTensor, share: Share, elems: int) -> FilePiece:
        """All of a tensor, or a tile."""
        slot = Slot(len(self._rows), (), 0, VALUE)
        self._rows.append((share, one.dtype))
        self._wants.append((slot, state_in(self._source, one.state)))
        self._names.append(one.name)
        return FilePiece(0, slot, elems, one.dtype, one.place)

    def part(self) -> SinkPart:
        """What the pieces are read into."""
        target = weights_manifest(self._twin.specs, self._rows)
        return SinkPart(target, tuple(self._wants), NARROW, names=tuple(self._names))


def training_dtype(manifest: Manifest) -> str:
    """That of the trained parameters, else of the first one."""
    trained = [spec.dtype for spec in manifest.params if spec.kind == "trainable"]
    return (trained or [spec.dtype for spec in manifest.params] or ["float32"])[0]


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file of a folder, and of the folders in it."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def refuse_foreign(folder: Path) -> bool:
    """Whether there is a folder that may be replaced. Raises UsageError for one that no export
    wrote, or that holds anything else by now."""
    if not os.path.lexists(folder):
        return False
    listed: Any = None
    if not folder.is_symlink() and (folder / LIST_FILE).is_file():
        listed = read_json(folder / LIST_FILE)
    there = _sizes(folder)
    there.pop(LIST_FILE, None)
    if listed is None or there != listed:
        other = sorted(name for name in there if (listed or {}).get(name) != there[name])
        raise UsageError(
            "the output is no folder that an export wrote as it is",
            file=folder,
            expected=f"the files that its {LIST_FILE} lists" if listed else LIST_FILE,
            found=some_of(other) or "fewer files",
            fix="give another name, or remove it",
        )
    return True


def publish(aside: Path, folder: Path, force: bool = False) -> None:
    """Gives a folder that is on disk its name; with `force` in the place of an earlier export.
    Raises OSError, UsageError."""
    if not (force and refuse_foreign(folder)):
        require_free(folder)
    durable.give_name(aside, durable.Syncs())
