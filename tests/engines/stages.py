"""What the tests of pipelines share: sources by mesh, and resumes on other meshes."""

from typing import Any

from tests.engines import pipeline_jobs
from tests.engines.pipeline_jobs import Staged
from tests.engines.sources import Sources

# stages (0: an engine without a pipeline), tensor-parallel size, data-parallel size, ZeRO
Mesh = tuple[int, int, int, int]


def ranks_of(mesh: Mesh) -> int:
    return max(mesh[0], 1) * mesh[1] * mesh[2]


def setup(mesh: Mesh, family: str, **kwargs: Any) -> Staged:
    return Staged(family, mesh[1], mesh[3], pp=mesh[0], **kwargs)


def source(
    sources: Sources, mesh: Mesh, family: str, attach: bool = True, more: int = 0, **kwargs: Any
) -> str:
    return sources.get(
        ranks_of(mesh), setup(mesh, family, **kwargs), pipeline_jobs.save, attach=attach, more=more
    )


def resume(
    sources: Sources,
    mesh: Mesh,
    family: str,
    folder: str,
    more: int = 0,
    plant: str = "",
    **kwargs: Any,
) -> list[dict]:
    return sources.ranks.run(
        ranks_of(mesh),
        pipeline_jobs.resume,
        setup(mesh, family, seed=9, **kwargs),
        folder,
        more,
        plant,
        timeout_s=180,
    )


def check(found: list[dict]) -> None:
    for rank in found:
        assert rank["differences"] and all(d == [] for d in rank["differences"].values()), rank[
            "differences"
        ]
        assert all(len(d) > 20 for d in rank["before"].values()), (
            "the engine was equal before the load"
        )


def show(value: object) -> str:
    return "pp{}tp{}dp{}z{}".format(*value) if isinstance(value, tuple) else str(value)
