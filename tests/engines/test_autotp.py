"""DeepSpeed's AutoTP: models of transformers resume at any tensor-parallel size, bit by bit, and
without a family; their files are read by everything that reads files."""

from typing import Any

import pytest

from tests.engines.autotp_jobs import PLANTS, Auto
from tests.engines.sources import Sources
from tests.engines.test_pairs import check

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.autotp_jobs"
# Ranks of the job, and the mesh: copies are ranks / tp. At tp=4 the last rank of "llama" has no
# attention, which DeepSpeed does not train at ZeRO-3.
Mesh = tuple[int, int, int]
SOURCES: dict[str, list[Mesh]] = {
    "llama": [(2, 2, 1), (1, 1, 3), (4, 4, 0)],
    "gpt2": [(2, 2, 3), (1, 1, 1)],
    "phi3": [(2, 2, 2)],
}
PAIRS: list[tuple[str, Mesh, Mesh]] = [
    ("llama", (2, 2, 1), (1, 1, 0)),
    ("llama", (2, 2, 1), (4, 2, 2)),
    ("llama", (2, 2, 1), (2, 2, 3)),
    ("llama", (2, 2, 1), (4, 4, 1)),
    ("llama", (1, 1, 3), (4, 2, 1)),
    ("llama", (1, 1, 3), (2, 2, 0)),
    ("llama", (4, 4, 0), (2, 1, 3)),
    ("llama", (4, 4, 0), (2, 2, 2)),
    ("gpt2", (2, 2, 3), (4, 4, 0)),
    ("gpt2", (2, 2, 3), (1, 1, 1)),
    ("gpt2", (2, 2, 3), (2, 2, 2)),
    ("gpt2", (1, 1, 1), (2, 2, 3)),
    ("gpt2", (1, 1, 1), (4, 4, 2)),
    ("phi3", (2, 2, 2), (4, 4, 3)),
    ("phi3", (2, 2, 2), (1, 1, 0)),
]


def saved(sources: Sources, kind: str, mesh: Mesh, **options: Any) -> str:
    ranks, tp, zero = mesh
    return sources.get(ranks, Auto(kind, tp, zero), f"{JOBS}:save", **options)


def show(value: object) -> str:
    return "{}t{}z{}".format(*value) if isinstance(value, tuple) else str(value)


def test_the_pairs_are_what_they_say() -> None:
    assert {mesh[1] for _, *meshes in PAIRS for mesh in meshes} == {1, 2, 4}
    assert {mesh[2] for _, *meshes in PAIRS for mesh in meshes} == {0, 1, 2, 3}
    assert all(source in SOURCES[kind] for kind, source, _ in PAIRS)


@pytest.mark.parametrize(("kind", "source", "target"), PAIRS, ids=show)
def test_pair(sources: Sources, kind: str, source: Mesh, target: Mesh) -> None:
    folder, (ranks, tp, zero) = saved(sources, kind, source), target
    setup = Auto(kind, tp, zero, seed=9)
    found = sources.ranks.run(ranks, f"{JOBS}:resume", setup, folder, more=20)
    check(found)
    assert found[0]["loss"] <= 1e-5


@pytest.mark.parametrize("fault", [fault for fault in PLANTS if fault])
def test_a_planted_fault_is_seen(sources: Sources, fault: str) -> None:
    """Negative control of every pair: what the comparison must not let pass."""
    folder = saved(sources, "llama", (2, 2, 1))
    setup = Auto("llama", 2, 0, seed=9)
    found = sources.ranks.run(2, f"{JOBS}:resume", setup, folder, plant=fault, tags=("filled",))
    assert found[0]["differences"]["filled"]
