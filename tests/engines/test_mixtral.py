"""Mixtral under DeepSpeed: saved and resumed on other expert-parallel, expert-tensor-parallel,
tensor-parallel and pipeline sizes, bit for bit."""

import pytest

from megatron_ucp.engines.megatron.experts import Experts
from tests.engines.pipeline_jobs import Staged
from tests.engines.sources import Sources
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.pipeline_jobs"
EXPERTS = Experts(4, ffn=12, shared_ffn=8, bias=True, score="sigmoid")


def mixtral(
    ep: int, tp: int = 1, pp: int = 0, zero: int = 1, etp: int = 0, **more: object
) -> Staged:
    """A Mixtral of three layers, experts in each."""
    return Staged(
        "mixtral",
        tp,
        zero,
        layers=3,
        pp=pp,
        ep=ep,
        etp=etp,
        experts=EXPERTS,
        sequence_parallel=tp > 1,
        **more,
    )


def world_of(setup: Staged) -> int:
    """Ranks that a mesh needs at least."""
    return max(setup.tp, setup.ep * (setup.etp or setup.tp)) * max(setup.pp, 1)


PAIRS = [
    (mixtral(2, zero=1), mixtral(1, zero=1)),
    (mixtral(2, zero=1), mixtral(4, zero=2)),
    (mixtral(4, zero=2), mixtral(2, tp=2, zero=1)),
    (mixtral(2, tp=2, etp=1, zero=1), mixtral(4, zero=0)),
    (mixtral(1, zero=3), mixtral(2, zero=0)),
    (mixtral(2, zero=0), mixtral(1, zero=3)),
    (mixtral(2, pp=2, zero=1), mixtral(2, tp=2, zero=2)),
    (mixtral(2, tp=2, zero=1), mixtral(2, pp=2, zero=0)),
]


def named(pair: object) -> str:
    one, two = pair
    return "-".join(f"ep{s.ep}etp{s.etp or s.tp}tp{s.tp}pp{s.pp}z{s.zero}" for s in (one, two))


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_a_mixtral_resumes_on_another_mesh(ranks: RankPool, sources: Sources, pair: object) -> None:
    source, target = pair
    folder = sources.get(4, source, f"{JOBS}:save", more=0)
    (found, *_) = ranks.run(4, f"{JOBS}:resume", target, folder, timeout_s=200)
    assert found["differences"] == {"filled": [], "trained": []}
    assert found["before"]["filled"] and found["before"]["trained"]
