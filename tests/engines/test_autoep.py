"""DeepSpeed's AutoEP: saved and resumed at another expert-parallel size and ZeRO stage."""

import pytest

from tests.engines.autoep_jobs import Auto
from tests.engines.sources import Sources
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.autoep_jobs"
PAIRS = [
    (Auto(2, 1), Auto(4, 2)),
    (Auto(4, 2), Auto(1, 1)),
    (Auto(2, 3), Auto(1, 3)),
    (Auto(1, 3), Auto(2, 0)),
    (Auto(2, 0), Auto(2, 3)),
    (Auto(2, 1, "bf16"), Auto(4, 3, "bf16")),
    (Auto(4, 3, "bf16"), Auto(2, 0, "bf16")),
    (Auto(2, 0, "bf16"), Auto(1, 1, "bf16")),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_a_mixture_resumes_on_another_mesh(
    ranks: RankPool, sources: Sources, source: Auto, target: Auto
) -> None:
    folder = sources.get(4, source, f"{JOBS}:save", more=3)
    (found, *_) = ranks.run(4, f"{JOBS}:resume", target, folder, more=3, timeout_s=200)
    assert found["differences"] == {"filled": [], "trained": []}
    assert found["before"]["filled"] and found["before"]["trained"]
    assert found["loss"] < (1e-5 if source.dtype == "fp32" else 1e-2)
