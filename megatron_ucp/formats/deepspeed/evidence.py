"""A recorded manifest against what the files say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import ForeignFileError


def difference(ours: object, theirs: object) -> dict[str, str]:
    """The first entries that differ, short enough for a message."""
    if (
        isinstance(ours, list | tuple)
        and isinstance(theirs, list | tuple)
        and len(ours) == len(theirs)
    ):
        for a, b in zip(ours, theirs, strict=True):
            if a != b:
                return difference(a, b)
    return {"expected": repr(ours)[:200], "found": repr(theirs)[:200]}


def group_order(manifest: Manifest, stage: int = 0) -> list[list[str]] | None:
    """Names of each parameter group of a stage, in the optimizer's order; None where the files say
    it themselves."""
    if manifest.engine != "zero0":
        return None
    here = [b for b in manifest.buffers if b.group is not None and dict(b.at).get("pp", 0) == stage]
    numbers = (
        range(len(manifest.groups))
        if manifest.mesh.pp == 1
        else sorted({b.group for b in here if b.group is not None})
    )
    return [[m.param for b in here if b.group == number for m in b.members] for number in numbers]


def compare(recorded: Manifest, derived: Manifest, file: Path) -> None:
    """Raises ForeignFileError where the manifest describes another save than the files hold."""
    count = len([b for b in derived.buffers if VALUE not in dict(b.states)])
    pairs = {
        "engine": (recorded.engine, derived.engine),
        "mesh": tuple((m.mesh.tp, m.mesh.pp, m.mesh.partitions) for m in (recorded, derived)),
        "optimizer buffers": (recorded.buffers[:count], derived.buffers[:count]),
        # files say which layer holds a value, not which stage
        "values": tuple(
            {b.members: replace(b, at=()) for b in m.buffers[count:]} for m in (recorded, derived)
        ),
        "shapes": tuple({p.name: (p.shape, p.kind) for p in m.params} for m in (recorded, derived)),
        "groups": (
            _plain(recorded.groups),
            _plain(derived.groups if any(derived.groups) else recorded.groups),
        ),
        "scalars": (recorded.scalars[:count], derived.scalars[:count]),
        **{key: (recorded.run.get(key), value) for key, value in derived.run.items()},
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ForeignFileError(
                f"manifest and files disagree in the {what}", file=file, **difference(ours, theirs)
            )


def _plain(value: Any) -> Any:
    """Lists as tuples, mappings as sorted items: JSON keeps neither tuples nor the order that a
    comparison needs."""
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return (
        tuple(sorted((k, _plain(v)) for k, v in value.items()))
        if isinstance(value, dict)
        else value
    )
