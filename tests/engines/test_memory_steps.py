"""Steps that machines keep in memory: what is left of a run goes on in another world, bit for bit,
against a gather that knows nothing of the package's layouts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import memory_jobs
from tests.engines.memory_jobs import World
from tests.engines.model import Setup
from tests.engines.stack_jobs import Mcore
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.memory_jobs"
ONE = ("a",) * 4
TWO = ("a", "a", "b", "b")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """The folder of a run's saves, whose memory goes with the test."""
    yield str(tmp_path / "run")
    memory_jobs.clear(str(tmp_path / "run"))


PAIRS: dict[str, tuple[World, World]] = {
    "z1 to z3 on three ranks": (World(Setup(1), ONE), World(Setup(3, seed=9), ONE[:3])),
    "Megatron, dp to stages": (World(Mcore(), ONE), World(Mcore(pp=2, seed=9), ONE[:2])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_goes_on_from_memory(ranks: RankPool, tmp_path: Path, folder: str, name: str) -> None:
    first, second = PAIRS[name]
    found = ranks.run(
        4, f"{JOBS}:recalled", first, second, folder, str(tmp_path / "store"), timeout_s=200
    )
    for rank in found[: second.ranks]:
        assert rank["differences"] == []
        assert rank["planted"]
        assert rank["step"] == 4, rank
    print(found[0])
