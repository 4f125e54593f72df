"""What the tests of pipelines share: sources by mesh, and resumes on other meshes."""

from typing import Any

from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Staged

# stages (0: an engine without a pipeline), tensor-parallel size, data-parallel size, ZeRO
Mesh = tuple[int, int, int, int]


def ranks_of(mesh: Mesh) -> int:
    return max(mesh[0], 1) * mesh[1] * mesh[2]


def setup(mesh: Mesh, family: str, **kwargs: Any) -> Staged:
    return Staged(family, mesh[1], mesh[3], pp=mesh[0], **kwargs)


def source(
    sources: Sources, mesh: Mesh, family: str, attach: bool = True, more: int = 0, **kwargs: Any
) -> str:
    return sources.get(ranks_of(mesh), setup(mesh, family, **kwargs), attach=attach, more=more)


def resume(
    sources: Sources, mesh: Mesh, family: str, folder: str, **kwargs: Any
) -> list[dict[str, Any]]:
    asked = {key: kwargs.pop(key) for key in ("more", "plant") if key in kwargs}
    return sources.resume(ranks_of(mesh), setup(mesh, family, seed=9, **kwargs), folder, **asked)


def pair(
    sources: Sources, mesh: Mesh, target: Mesh, family: str, more: int = 0, **kwargs: Any
) -> list[dict[str, Any]]:
    """One model on both meshes."""
    folder = source(sources, mesh, family, more=more, **kwargs)
    return resume(sources, target, family, folder, more=more, **kwargs)


def show(value: object) -> str:
    return "pp{}tp{}dp{}z{}".format(*value) if isinstance(value, tuple) else str(value)
