"""megatron-core's own stack trains on CPUs, on every mesh as on one rank."""

import pytest

from tests.engines import megatron_jobs
from tests.engines.megatron_jobs import Mcore
from tests.ranks import RankPool

MOE = Mcore("mixtral", layers=2)
ONE: dict[str, list[float]] = {}
# setup -> ranks; the first four and a quarter of the rest run by default
MESHES = {
    "dp2": (2, Mcore()),
    "tp2-sp-ep2": (4, Mcore("mixtral", layers=2, tp=2, ep=2)),
    "pp2-vpp2-tp2-tied": (4, Mcore(tp=2, pp=2, vpp=2, tied=True)),
    "dp4-buckets": (4, Mcore(overlap=True, gather=True, bucket=2000)),
    "dp2-plain": (2, Mcore(distributed=False)),
    "pp2-dp2": (4, Mcore(pp=2)),
    "pp2-vpp2-dp2": (4, Mcore(pp=2, vpp=2)),
    "gpt-tp2-pp2": (4, Mcore("gpt", tp=2, pp=2, tied=True)),
    "layout": (4, Mcore(pp=2, vpp=2, layout="Ett|t|t|L")),
    "uneven": (2, Mcore(pp=2, first=3)),
    "ep2": (2, Mcore("mixtral", layers=2, ep=2)),
    "ep2-dp4": (4, Mcore("mixtral", layers=2, ep=2)),
    "ep2-pp2": (4, Mcore("mixtral", layers=2, ep=2, pp=2)),
    "etp1-tp2": (4, Mcore("mixtral", layers=2, tp=2, ep=2, etp=1)),
}


def of_one_rank(ranks: RankPool, setup: Mcore) -> list[float]:
    """The losses of the same model on one rank, without a distributed optimizer."""
    alone = Mcore(setup.family, layers=setup.layers, tied=setup.tied, distributed=False)
    key = repr(alone)
    if key not in ONE:
        ONE[key] = ranks.run(1, megatron_jobs.losses, alone)[0]
    return ONE[key]


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_rank(ranks: RankPool, mesh: str) -> None:
    world, setup = MESHES[mesh]
    want = of_one_rank(ranks, setup)
    found = ranks.run(world, megatron_jobs.losses, setup)
    assert all(one == found[0] for one in found)
    assert max(abs(a - b) for a, b in zip(want, found[0], strict=True)) <= 1e-5
    assert abs(want[0] - want[-1]) > 1e-3  # it learns


def test_in_bf16(ranks: RankPool) -> None:
    """The distributed optimizer rounds as the plain one does; without clipping to the bit."""
    plain, shared = (
        ranks.run(
            2,
            megatron_jobs.losses,
            Mcore(dtype="bf16", distributed=distributed, clip=0.0),
        )[0]
        for distributed in (False, True)
    )
    assert plain == shared


def test_in_fp16(ranks: RankPool) -> None:
    """The loss is scaled, and the gradients are what they would be: without, epsilon would weigh
    256 times as much."""
    whole, half = (
        ranks.run(2, megatron_jobs.losses, Mcore(dtype=dtype, clip=0.0))[0]
        for dtype in ("fp32", "fp16")
    )
    assert max(abs(a - b) for a, b in zip(whole, half, strict=True)) <= 2e-2
