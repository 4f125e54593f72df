"""A recorded manifest against what the files say."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ucp.core.flat import FlatBuffer, Scalars
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
    both = recorded, derived
    count = len([buffer for buffer in derived.buffers if buffer.stepped])
    groups: list[Any] = [[group.settings for group in m.groups] for m in both]
    if not any(group.settings for group in derived.groups) or _says(*groups):
        groups[1] = groups[0]
    pairs: dict[str, Any] = {
        "engine": (recorded.keeper, derived.keeper),
        "mesh": tuple(
            (m.mesh.tp, m.mesh.pp, m.mesh.partitions, m.mesh.ep, m.mesh.etp) for m in both
        ),
        "scalars": tuple(_scalars(m.buffers[:count]) for m in both),
        "optimizer buffers": tuple(m.buffers[:count] for m in both),
        "values": tuple(_values(m.buffers[count:]) for m in both),
        "shapes": tuple({p.name: (p.shape, p.kind, p.order) for p in m.params} for m in both),
        "groups": groups,
        **{key: (recorded.run.get(key), value) for key, value in derived.run.items()},
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ForeignFileError(
                f"manifest and files disagree in the {what}", file=file, **difference(ours, theirs)
            )


def _values(buffers: Sequence[FlatBuffer]) -> dict[str, dict[Any, FlatBuffer]]:
    """What lies under each name: files say which layer holds a value, not which stage."""
    out: dict[str, dict[Any, FlatBuffer]] = {}
    for buffer in buffers:
        name = ", ".join(member.param for member in buffer.members)
        out.setdefault(name, {})[buffer.members] = replace(buffer, at=())
    return out


def _scalars(buffers: Sequence[FlatBuffer]) -> list[list[Scalars]]:
    return [[member.scalars for member in buffer.members] for buffer in buffers]


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
