"""megatron-core's stack with TEGroupedMLP, which is what Megatron-LM builds for a mixture where
there is a GPU, and with norms within the matrices behind them: the same model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines import grouped_experts, megatron_jobs
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check

pytestmark = pytest.mark.ranks
MOE: dict[str, Any] = {"family": "mixtral", "layers": 2}
GPU: dict[str, Any] = {"fused": True, "grouped": True, **MOE}
PLAIN: dict[str, tuple[int, Mcore]] = {
    "cut": (4, Mcore(ep=2, tp=2, **MOE)),
    "not cut": (4, Mcore(ep=2, tp=2, etp=1, **MOE)),
}
GROUPED: dict[str, tuple[int, Mcore]] = {
    "cut": (2, Mcore(tp=2, **GPU)),
    "not cut": (4, Mcore(ep=4, **GPU)),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_the_layers_of_the_tests_compute_the_same(sources: Sources, kind: str) -> None:
    """Weights are drawn by canonical names, so that a wrong name is another model."""
    for ranks, setup in (PLAIN[kind], GROUPED[kind]):
        (found, *_) = sources.ranks.run(ranks, megatron_jobs.losses, setup)
        (want, *_) = sources.ranks.run(1, megatron_jobs.losses, Mcore(**MOE))
        assert found == pytest.approx(want, rel=0, abs=1e-5)


@pytest.mark.parametrize("kind", PLAIN)
def test_one_export_of_both(sources: Sources, tmp_path: Path, kind: str) -> None:
    """The same model and the same folder, byte for byte; another seed is another one."""
    (ranks, one), (world, other) = PLAIN[kind], GROUPED[kind]
    job = grouped_experts.export
    sources.ranks.run(ranks, job, one, str(tmp_path / "one"))
    sources.ranks.run(world, job, other, str(tmp_path / "other"))
    sources.ranks.run(world, job, replace(other, seed=2), str(tmp_path / "third"))
    one_model, same, another = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other", "third")
    )
    assert one_model == same != another


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("onto", [PLAIN, GROUPED], ids=["onto its own", "onto grouped"])
@pytest.mark.cases(2)
def test_pair(sources: Sources, kind: str, onto: dict[str, tuple[int, Mcore]]) -> None:
    """Between the two, through ucp.save."""
    (ranks, source), (world, target) = (GROUPED if onto is PLAIN else PLAIN)[kind], onto[kind]
    folder = sources.get(ranks, source, more=3, kind="ours")
    check(sources.resume(world, target, folder, more=3), 1e-5)


def test_on_the_same_mesh_not_a_bit_differs(sources: Sources) -> None:
    ranks, setup = GROUPED["not cut"]
    folder = sources.get(ranks, setup, more=3, kind="ours")
    found = sources.resume(ranks, setup, folder, tags=("trained",), three=True)
    check(found, None)
    assert all(rank["after"] == [] for rank in found)
