"""The manifest as JSON. Text of another version, or of none, is refused by name."""

import gc
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Extent, layout_from_json, layout_to_json
from megatron_ucp.core.manifest import KINDS, FileEntry, Manifest, ParamGroup, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.values import NOT_CODED, coded, decoded
from megatron_ucp.errors import DamagedFileError

FORMAT_VERSION = 3
MAX_BYTES = 64 * 2**20  # three times that of 16,384 ranks and 10^12 parameters
MAX_VALUES = 4_000_000  # what JSON builds from a small text is large: 64 bytes for an empty list
MAX_RANKS = 2**24


def to_json(manifest: Manifest) -> str:
    """Text of the manifest file."""
    data: dict[str, Any] = {
        "format": "megatron_ucp",
        "version": FORMAT_VERSION,
        "engine": manifest.keeper,
        "mesh": asdict(manifest.mesh),
        "params": [_param_to_json(spec) for spec in manifest.params],
        "buffers": [_buffer_to_json(buffer) for buffer in manifest.buffers],
        "groups": [[g.optimizer, coded(dict(g.settings)), g.steps_as] for g in manifest.groups],
        "ties": [[tie.canonical, tie.aliases] for tie in manifest.ties],
        "files": [[f.name, f.size_bytes, f.sha256] for f in manifest.files],
        **{key: getattr(manifest, key) for key in _AS_THEY_ARE},
        "run": coded(dict(manifest.run)),
    }
    return json.dumps(data, indent=None, separators=(",", ":"))


_AS_THEY_ARE: dict[str, type] = {"family": str, "save_id": str, "run": dict, "names": dict}


def _param_to_json(spec: ParamSpec) -> list[Any]:
    extent = [spec.extent.true, spec.extent.stored] if spec.extent else None
    layout = layout_to_json(spec.layout)
    out = [spec.name, spec.shape, spec.dtype, spec.kind, layout, extent, spec.order]
    more = [spec.expert, *([True] if spec.first_counts else [])]
    return out if more == [None] else [*out, *more]


def _buffer_to_json(buffer: FlatBuffer) -> dict[str, Any]:
    out: dict[str, Any] = {
        "members": [[m.param, m.start, m.size] for m in buffer.members],
        "length": buffer.length,
        "partitions": buffer.partitions,
        "rule": buffer.rule,
        "states": buffer.states,
        "at": buffer.at,
        "axes": buffer.axes,
    }
    # members of one buffer are mostly alike: said once then
    for key in _OF_MEMBERS:
        values = [getattr(member, key) for member in buffer.members]
        if any(value not in (None, {}) for value in values):
            alike = all(value == values[0] for value in values)
            out[key] = values[0] if alike else values
    if any(member.slice_of for member in buffer.members):
        out["slice_of"] = [member.slice_of for member in buffer.members]
    if buffer.uncut:
        out["uncut"] = buffer.uncut
    return out


_OF_MEMBERS = ("group", "scalars", "chunk")


def from_json(text: str | bytes, file: str) -> Manifest:
    """The inverse of `to_json`. Raises DamagedFileError for text that is no manifest of a known
    version."""
    collects = gc.isenabled()
    # a million values that all stay: looking for cycles in them takes twice the time of the rest
    gc.disable()
    try:
        check_extent(text, MAX_BYTES, MAX_VALUES)
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
    except NOT_CODED as error:
        raise DamagedFileError(
            "the manifest can't be read",
            file=file,
            found=f"{type(error).__name__}: {getattr(error, 'problem', error)}",
            fix="remove it to read the DeepSpeed files by themselves",
        ) from None
    finally:
        if collects:
            gc.enable()


def check_extent(text: str | bytes, max_bytes: int, max_values: int) -> None:
    """Refuses by its length what would take all memory as values. Raises ValueError."""
    marks = "[,{" if isinstance(text, str) else (b"[", b",", b"{")
    values = sum(text.count(mark) for mark in marks)  # type: ignore[arg-type]
    if len(text) > max_bytes or values > max_values:
        raise ValueError(
            f"{len(text)} bytes with {values} values, and at most {max_bytes} with {max_values} "
            "are read"
        )


_BUILT = ("engine", "mesh", "params", "buffers", "groups", "ties", "files")


def _build(data: dict[str, Any]) -> Manifest:
    if unknown := data.keys() - {*_BUILT, *_AS_THEY_ARE}:
        raise ValueError(f"an unknown key {sorted(unknown)[0]!r}")
    for key, kind in {"engine": str, **_AS_THEY_ARE}.items():
        if not isinstance(data[key], kind):
            raise ValueError(f"{key} is a {type(data[key]).__name__}")
    return Manifest(
        Keeper(data["engine"]),
        _mesh(data["mesh"]),
        tuple(_param(*entry) for entry in data["params"]),
        tuple(_buffer(entry) for entry in data["buffers"]),
        tuple(_group(*entry) for entry in data["groups"]),
        tuple(Tie(str(name), tuple(map(str, aliases))) for name, aliases in data["ties"]),
        tuple(
            FileEntry(file_name(name), _count(size), str(sha256))
            for name, size, sha256 in data["files"]
        ),
        data["family"],
        data["save_id"],
        decoded(data["run"]),
        {str(name): str(canonical) for name, canonical in data["names"].items()},
    )


def _group(name: Any, settings: Any, steps_as: Any) -> ParamGroup:
    return ParamGroup(dict(decoded(settings)), str(name), steps_as=str(steps_as))


def _param(
    name: Any,
    shape: Any,
    dtype: Any,
    kind: Any,
    layout: Any,
    extent: Any,
    order: Any,
    expert: Any = None,
    first_counts: Any = False,
) -> ParamSpec:
    return ParamSpec(
        str(name),
        _ints(shape),
        str(dtype),
        _kind(kind),
        layout_from_json(layout),
        Extent(*extent) if extent else None,
        None if order is None else _ints(order),
        None if expert is None else _expert(*expert),
        first_counts=first_counts is True,
    )


def _expert(number: Any, count: Any) -> tuple[int, int]:
    if _count(number) >= _count(count):
        raise ValueError(f"expert {number} of {count}")
    return number, count


def _mesh(data: dict[str, Any]) -> Mesh:
    mesh = Mesh(**data)
    if max(mesh.world, mesh.vpp, mesh.ep, mesh.etp) > MAX_RANKS:
        raise ValueError(f"a mesh of {mesh.world} ranks")
    return mesh


def _members(data: dict[str, Any]) -> tuple[Member, ...]:
    listed: list[Any] = data["members"]
    groups = _each(data.get("group"), len(listed))
    kept = data.get("scalars")
    each = cast("list[Any]", kept) if isinstance(kept, list) else None
    scalars = [_scalars(kept)] * len(listed) if each is None else list(map(_scalars, each))
    chunks = _each(data.get("chunk"), len(listed))
    slices = _each(data.get("slice_of"), len(listed))
    return tuple(
        Member(
            str(param),
            _count(start),
            _count(size),
            _optional(group),
            steps,
            _optional(chunk),
            _slice(within),
        )
        for (param, start, size), group, steps, chunk, within in zip(
            listed, groups, scalars, chunks, slices, strict=True
        )
    )


def _buffer(data: dict[str, Any]) -> FlatBuffer:
    return FlatBuffer(
        _members(data),
        _count(data["length"]),
        _count(data["partitions"]),
        data["rule"],
        tuple((str(name), str(dtype)) for name, dtype in data["states"]),
        tuple((str(axis), _count(index)) for axis, index in data["at"]),
        tuple(map(str, data["axes"])),
        tuple(map(str, data.get("uncut", ()))),
    )


def _each(value: Any, count: int) -> Sequence[Any]:
    """What is said of every member: one value for all, or a list."""
    return cast("list[Any]", value) if isinstance(value, list) else [value] * count


def _scalars(kept: Any) -> Mapping[str, float]:
    items: Mapping[Any, Any] = kept or {}
    return {str(key): value for key, value in items.items() if isinstance(value, int | float)}


def _optional(value: Any) -> int | None:
    return None if value is None else _count(value)


def _slice(within: Any) -> tuple[int, int] | None:
    if within is None:
        return None
    first, total = within
    return _count(first), _count(total)


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


_PLAIN = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]*")


def plain_name(name: object) -> str:
    """A file name inside a folder. Raises ValueError for a path, a hidden name or anything but a
    plain name."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise ValueError(f"{name!r} is no plain file name")
    return name


def file_name(name: object) -> str:
    """The name of a file of a tag, also of one in a folder there ("zero/weight/fp32.pt"). Raises as
    `plain_name`."""
    return "/".join(plain_name(part) for part in str(name).split("/"))
