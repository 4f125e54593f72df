"""DeepSpeed's own mixtures of experts, saved and resumed at another expert-parallel size."""

import shutil
from pathlib import Path

import pytest

from tests.engines.moe_jobs import Moe
from tests.engines.sources import Sources, without_manifest
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.moe_jobs"


@pytest.mark.parametrize("zero", [1, 0, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_a_mixture_resumes_at_another_expert_parallel_size(
    ranks: RankPool, sources: Sources, ep: int, zero: int
) -> None:
    folder = sources.get(4, Moe(2, zero), f"{JOBS}:save", more=3)
    world = 4 if ep > 1 else 2
    (found, *_) = ranks.run(world, f"{JOBS}:resume", Moe(ep, zero), folder, more=3, timeout_s=200)
    assert found["differences"] == {"filled": [], "trained": []}
    assert found["before"]["filled"] and found["before"]["trained"]
    assert found["loss"] < 1e-5


@pytest.mark.parametrize("zero", [0, 1])
def test_files_of_stock_deepspeed(
    ranks: RankPool, sources: Sources, tmp_path: Path, zero: int
) -> None:
    """L7, S8: without a manifest, as stock wrote them."""
    folder = tmp_path / "stock"
    shutil.copytree(sources.get(4, Moe(2, zero), f"{JOBS}:save", more=3), folder)
    without_manifest(folder)
    for ep in (1, 4):
        (found, *_) = ranks.run(4, f"{JOBS}:resume", Moe(ep, zero), str(folder), timeout_s=200)
        assert found["differences"] == {"filled": [], "trained": []}
