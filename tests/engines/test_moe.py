"""DeepSpeed's own mixtures of experts, saved and resumed at another expert-parallel size."""

import pytest

from tests.engines.moe_jobs import Moe
from tests.engines.sources import Sources
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
