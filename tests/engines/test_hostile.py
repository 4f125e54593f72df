"""Every hostile checkpoint through `engine.load_checkpoint` on the mesh that wrote it: a named
error on every rank, nothing run, and an engine that is bit for bit as it was."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines import hostile_jobs
from tests.engines.model import Setup
from tests.engines.sources import PLAIN, Sources
from tests.formats.hostile import ROWS, make

pytestmark = pytest.mark.ranks
MEMORY_BYTES, TIME_S = 2 * 2**30, 10.0
LOADED = [name for name, row in ROWS.items() if "load" in row.sees]


@pytest.fixture(scope="module")
def results(
    sources: Sources, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """What every rank found, from one job, and the mark that nothing may make."""
    root, good = tmp_path_factory.mktemp("hostile"), Path(sources.get(2, PLAIN))
    mark = root / "mark"
    folders = [
        str(make(name, good, root / str(number), f"touch {mark}"))
        for number, name in enumerate(LOADED)
    ]
    try:
        return sources.ranks.run(
            2,
            hostile_jobs.load_all,
            Setup(1, "bf16", seed=9),
            folders,
            str(good),
            MEMORY_BYTES,
            timeout_s=300,
        ), mark
    finally:
        for folder in folders:
            shutil.rmtree(folder)


@pytest.mark.cases()  # of one job
@pytest.mark.parametrize("number", range(len(LOADED)), ids=LOADED)
def test_a_hostile_checkpoint_is_refused(
    results: tuple[list[dict[str, Any]], Path], number: int
) -> None:
    ranks, mark = results
    row = ROWS[LOADED[number]]
    for rank in ranks:
        found = rank["found"][number]
        assert found["named"], f"{found['error']}: {found['message']}"
        assert row.says in found["message"] and "what to do:" in found["message"], found["message"]
        assert "MemoryError" not in found["message"], found["message"]
        assert found["unchanged"] and found["seconds"] < TIME_S, found
    assert not mark.exists()


def test_the_engine_loads_a_good_one_afterwards(results: tuple[list[dict[str, Any]], Path]) -> None:
    """Negative control: the same call fills the engine, and the comparison sees it."""
    for rank in results[0]:
        assert rank["changed by a good load"] and rank["steps after"]
