"""A recorded manifest against what the files say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.values import Global, alike, shown
from megatron_ucp.errors import ForeignFileError


def difference(ours: object, theirs: object) -> dict[str, str]:
    """The first entries that differ, short enough for a message."""
    if (
        isinstance(ours, list | tuple)
        and isinstance(theirs, list | tuple)
        and len(ours) == len(theirs)
    ):
        for a, b in zip(ours, theirs, strict=True):
            if not alike(a, b):
                return difference(a, b)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return _first_entry(dict[Any, Any](ours), dict[Any, Any](theirs))
    return {"expected": shown(ours), "found": shown(theirs)}


def _first_entry(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> dict[str, str]:
    """The first key under which two mappings that are not equal differ."""
    both = ours.keys() & theirs.keys()
    key = next(
        key for key in {**ours, **theirs} if key not in both or not alike(ours[key], theirs[key])
    )
    if key in both:
        inner = difference(ours[key], theirs[key])
        return {side: f"{key}: {text}"[:200] for side, text in inner.items()}
    sides = {"expected": ours, "found": theirs}
    return {side: f"{'' if key in held else 'no '}{key}"[:200] for side, held in sides.items()}


def group_order(manifest: Manifest, at: Coords = ()) -> list[list[str]] | None:
    """Names of each parameter group at a place (see `Mesh.holding`), in the optimizer's order; None
    where the files say it themselves."""
    if manifest.keeper != Keeper.ZERO_0:
        return None
    here = [b for b in manifest.buffers if b.stepped and b.is_held_at(at)]
    numbers = sorted({m.group for b in here for m in b.members if m.group is not None})
    if manifest.mesh.pp == 1:
        numbers = list(range(len(manifest.groups)))
    return [[m.param for b in here for m in b.members if m.group == n] for n in numbers]


def compare(recorded: Manifest, derived: Manifest, file: Path) -> None:
    """Raises ForeignFileError where the manifest describes another save than the files hold."""
    stepped = len([buffer for buffer in derived.buffers if buffer.stepped])
    said, found = _aspects(recorded, stepped), _aspects(derived, stepped)
    if not any(found["groups"]) or _says(said["groups"], found["groups"]):
        found["groups"] = said["groups"]
    said |= {key: recorded.run.get(key) for key in derived.run}
    found |= derived.run
    require_equal(said, found, "manifest and files disagree in the", file)


def require_equal(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], problem: str, file: str | Path
) -> None:
    """Raises ForeignFileError for the first of some values that differs; `problem` is a sentence
    that its name ends."""
    for what, value in ours.items():
        if value != theirs[what]:
            raise ForeignFileError(
                f"{problem} {what}", file=file, **difference(value, theirs[what])
            )


def _values(buffers: Sequence[FlatBuffer]) -> dict[str, dict[Any, FlatBuffer]]:
    """What lies under each name: files say which layer holds a value, not which stage."""
    out: dict[str, dict[Any, FlatBuffer]] = {}
    for buffer in buffers:
        name = ", ".join(member.param for member in buffer.members)
        out.setdefault(name, {})[buffer.members] = replace(buffer, at=())
    return out


def _aspects(manifest: Manifest, stepped: int) -> dict[str, Any]:
    """What manifest and files both say, by its name in an error; the first `stepped` buffers are
    those of the optimizer."""
    mesh, buffers = manifest.mesh, manifest.buffers[:stepped]
    return {
        "engine": manifest.keeper,
        "mesh": (mesh.tp, mesh.pp, mesh.partitions, mesh.ep, mesh.etp),
        "scalars": [[member.scalars for member in buffer.members] for buffer in buffers],
        "optimizer buffers": buffers,
        "values": _values(manifest.buffers[stepped:]),
        "shapes": {p.name: (p.shape, p.kind, p.order) for p in manifest.params},
        "groups": [group.settings for group in manifest.groups],
    }


def _says(said: Any, found: Any) -> bool:
    """Whether a manifest's value is the one that a file has. Manifests of before version 3 had
    lists for tuples, and text for what JSON does not know."""
    if isinstance(said, list | tuple) and isinstance(found, list | tuple):
        return len(said) == len(found) and all(map(_says, said, found))
    if isinstance(said, dict) and isinstance(found, Mapping):
        return said.keys() == found.keys() and all(_says(said[key], found[key]) for key in said)
    if isinstance(said, Global) and not isinstance(found, Global):
        return True  # left to the engine that loads: the manifest has its class alone
    return alike(said, found) or (type(said) is str and not isinstance(found, str))
