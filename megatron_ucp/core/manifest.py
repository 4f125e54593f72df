"""The whole checkpoint without its bytes: mesh, parameters, flat buffers, groups, files. JSON,
evidence, no authority."""

import gc
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import (
    Extent,
    Layout,
    Piece,
    Place,
    Replicate,
    layout_from_json,
    layout_to_json,
)
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import DamagedFileError

FORMAT_VERSION = 1
FILE_NAME = "ucp_manifest.json"
MAX_BYTES = 64 * 2**20  # three times that of 16,384 ranks and 10^12 parameters
MAX_VALUES = 4_000_000  # what JSON builds from a small text is large: 64 bytes for an empty list
MAX_RANKS = 2**24
KINDS = ("trainable", "frozen", "buffer")
PLACEMENT = (
    "pp",
    "vpp",
    "ep",
)  # axes that decide who holds a parameter; the first of several holders is the smallest place


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter, free of topology. `shape` is the whole tensor's, with vocabulary
    padding; `dtype` that of the training copy; `order` the dims as the memory stores them (None: as
    they are)."""

    name: str
    shape: Ints
    dtype: str
    kind: str = "trainable"
    layout: Layout = field(default_factory=Replicate)
    extent: Extent | None = None
    order: Ints | None = None

    def pieces(self, place: Place) -> tuple[Piece, ...]:
        """What the rank at `place` holds; see Layout.pieces."""
        return self.layout.pieces(self.name, self.shape, place, self.order)


@dataclass(frozen=True)
class Tie:
    """One parameter under several names: `canonical` is read, every alias is written."""

    canonical: str
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file of the tag folder: a plain name, its size, and a SHA-256: of the zip directory (names,
    sizes, CRC-32s) of a .pt file, of all bytes of another one."""

    name: str
    size_bytes: int
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """`groups` are the hyper-parameters of each parameter group, by number; `scalars` the
    per-buffer scalar states of the optimizer (`step`), by buffer number; `names` of a pipeline's
    parameters, with their canonical ones; `run` what identifies the save (steps, versions)."""

    engine: str
    mesh: Mesh
    params: tuple[ParamSpec, ...]
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[Mapping[str, Any], ...] = ()
    scalars: tuple[Mapping[str, float], ...] = ()
    ties: tuple[Tie, ...] = ()
    files: tuple[FileEntry, ...] = ()
    optimizer: str = ""
    family: str = ""
    save_id: str = ""
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if len(self.by_name) != len(self.params):
            raise ValueError("a parameter is listed twice")
        for buffer in self.buffers:
            for member in buffer.members:
                if member.param not in self.by_name:
                    raise ValueError(f"a buffer holds {member.param}, which is no parameter")
            if any(
                axis not in PLACEMENT or index >= self.mesh.size(axis) for axis, index in buffer.at
            ):
                raise ValueError(
                    f"a buffer lies at {buffer.at}, which is no place of the mesh {self.mesh}"
                )
        for name, held in self.holders.items():
            if len({self.buffers[b].at for b, _ in held}) < len(held):
                raise ValueError(f"{name} is held twice at one place")

    @cached_property
    def by_name(self) -> dict[str, ParamSpec]:
        return {spec.name: spec for spec in self.params}

    @cached_property
    def holders(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Parameter -> (buffer number, member number) of every buffer that holds it, first stage
        first."""
        out: dict[str, list[tuple[int, int]]] = {}
        for b, buffer in enumerate(self.buffers):
            for m, member in enumerate(buffer.members):
                out.setdefault(member.param, []).append((b, m))
        return {
            name: tuple(
                found
                if len(found) == 1
                else sorted(found, key=lambda bm: (self.buffers[bm[0]].at, bm))
            )
            for name, found in out.items()
        }

    def group_of(self, param: str) -> Mapping[str, Any]:
        """Hyper-parameters of the group of a trainable parameter."""
        group = self.buffers[self.holders[param][0][0]].group
        return self.groups[group] if group is not None else {}

    def scalars_of(self, param: str) -> Mapping[str, float]:
        """Scalar optimizer states of a trainable parameter."""
        return self.scalars[self.holders[param][0][0]] if self.scalars else {}


def to_json(manifest: Manifest) -> str:
    """Text of the manifest file."""
    data = {f.name: getattr(manifest, f.name) for f in fields(manifest)}
    data["mesh"] = asdict(manifest.mesh)
    data["params"] = [
        [
            p.name,
            p.shape,
            p.dtype,
            p.kind,
            layout_to_json(p.layout),
            p.extent and [p.extent.true, p.extent.stored],
            p.order,
        ]
        for p in manifest.params
    ]
    data["buffers"] = [
        {
            **{f.name: getattr(b, f.name) for f in fields(b)},
            "members": [[m.param, m.start, m.size] for m in b.members],
        }
        for b in manifest.buffers
    ]
    data["ties"] = [[tie.canonical, tie.aliases] for tie in manifest.ties]
    data["files"] = [[f.name, f.size_bytes, f.sha256] for f in manifest.files]
    return json.dumps(
        {"format": "megatron_ucp", "version": FORMAT_VERSION, **data},
        indent=None,
        separators=(",", ":"),
    )


def from_json(text: str | bytes, file: str) -> Manifest:
    """The inverse of `to_json`. Raises DamagedFileError for text that is no manifest of a known
    version."""
    collects = gc.isenabled()
    # a million values that all stay: looking for cycles in them takes twice the time of the rest
    gc.disable()
    try:
        _check_extent(text)
        data = json.loads(text)
        if data.pop("format") != "megatron_ucp" or data["version"] != FORMAT_VERSION:
            raise DamagedFileError(
                "this is no manifest that this version reads",
                file=file,
                expected=f"version {FORMAT_VERSION}",
                found=data.get("version"),
                fix="use the version of megatron_ucp that wrote it, or remove the manifest to read "
                "the DeepSpeed files by themselves",
            )
        del data["version"]
        return _build(data)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise DamagedFileError(
            "the manifest can't be read",
            file=file,
            found=f"{type(error).__name__}: {error}",
            fix="remove it to read the DeepSpeed files by themselves",
        ) from None
    finally:
        if collects:
            gc.enable()


def _check_extent(text: str | bytes) -> None:
    """Refuses by its length what would take all memory as values."""
    marks = "[,{" if isinstance(text, str) else (b"[", b",", b"{")
    values = sum(text.count(mark) for mark in marks)  # type: ignore[arg-type]
    if len(text) > MAX_BYTES or values > MAX_VALUES:
        raise ValueError(
            f"{len(text)} bytes with {values} values, and at most {MAX_BYTES} with {MAX_VALUES} "
            "are read"
        )


def _build(data: dict[str, Any]) -> Manifest:
    data["mesh"] = _mesh(data["mesh"])
    data["params"] = tuple(
        ParamSpec(
            str(name),
            _ints(shape),
            str(dtype),
            _kind(kind),
            layout_from_json(layout),
            Extent(*extent) if extent else None,
            None if order is None else _ints(order),
        )
        for name, shape, dtype, kind, layout, extent, order in data["params"]
    )
    data["buffers"] = tuple(_buffer(b) for b in data["buffers"])
    data["ties"] = tuple(Tie(str(c), tuple(map(str, a))) for c, a in data["ties"])
    data["files"] = tuple(FileEntry(plain_name(n), _count(s), str(d)) for n, s, d in data["files"])
    data["groups"] = tuple(dict(g) for g in data["groups"])
    data["names"] = {_pipe_name(pipe): str(name) for pipe, name in data.get("names", {}).items()}
    data["scalars"] = tuple(
        {str(k): v for k, v in s.items() if isinstance(v, int | float)} for s in data["scalars"]
    )
    for key, kind in (
        ("run", dict),
        ("engine", str),
        ("optimizer", str),
        ("family", str),
        ("save_id", str),
    ):
        if not isinstance(data[key], kind):
            raise ValueError(f"{key} is a {type(data[key]).__name__}")
    manifest = Manifest(**data)
    if manifest.scalars and len(manifest.scalars) != len(manifest.buffers):
        raise ValueError("one set of scalars per buffer is needed")
    if any(
        b.group is not None and not 0 <= b.group < len(manifest.groups) for b in manifest.buffers
    ):
        raise ValueError("a buffer names a group that does not exist")
    return manifest


def _mesh(data: dict[str, Any]) -> Mesh:
    mesh = Mesh(**data)
    if max(mesh.world, mesh.vpp, mesh.ep, mesh.etp) > MAX_RANKS:
        raise ValueError(f"a mesh of {mesh.world} ranks")
    return mesh


def _buffer(data: dict[str, Any]) -> FlatBuffer:
    data["members"] = tuple(
        Member(str(p), _count(start), _count(size)) for p, start, size in data["members"]
    )
    data["states"] = tuple((str(n), str(d)) for n, d in data["states"])
    data["at"] = tuple((str(axis), _count(i)) for axis, i in data["at"])
    data["axes"] = tuple(map(str, data["axes"]))
    for key in ("length", "partitions"):
        _count(data[key])
    return FlatBuffer(**data)


def _ints(values: object) -> Ints:
    if not isinstance(values, list):
        raise ValueError(f"{values!r} is no list of sizes")
    return tuple([_count(item) for item in cast("list[Any]", values)])


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of parameter")
    return kind


def _pipe_name(name: str) -> str:
    if not re.fullmatch(r"([0-9]{1,6}|tied_modules\.[^.]+)\..+", name):
        raise ValueError(f"{name!r} is no name in a pipeline")
    return name


_PLAIN = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")


def plain_name(name: object) -> str:
    """A file name inside the tag folder. Raises ValueError for a path, a hidden name or anything
    but a plain name."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise ValueError(f"{name!r} is no plain file name")
    return name
