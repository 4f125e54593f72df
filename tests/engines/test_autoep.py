"""DeepSpeed's AutoEP: saved and resumed at another expert-parallel size and ZeRO stage."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import megatron_ucp as ucp
from tests.engines import moe_jobs
from tests.engines.autoep_jobs import Auto
from tests.engines.sources import Sources, check, without_manifest
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
# of six experts ZeRO-3's partitions of the stacked tensors end inside of one
PAIRS = [
    (Auto(2, 1), Auto(4, 2)),
    (Auto(4, 2), Auto(1, 1)),
    (Auto(2, 3, experts=6), Auto(1, 3, experts=6)),
    (Auto(1, 3, experts=6, sub_group=60), Auto(2, 0, experts=6)),
    (Auto(2, 0), Auto(4, 3)),
    (Auto(2, 1, "bf16", experts=6), Auto(1, 3, "bf16", experts=6)),
    (Auto(4, 3, "bf16"), Auto(2, 0, "bf16")),
    (Auto(2, 0, "bf16"), Auto(1, 1, "bf16")),
]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_a_mixture_resumes_on_another_mesh(
    ranks: RankPool, sources: Sources, source: Auto, target: Auto
) -> None:
    folder = sources.get(4, source, more=3)
    check(sources.resume(4, target, folder, more=3), 1e-5 if source.dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("target", [Auto(4, 2), Auto(1, 0)], ids=str)
def test_frozen_experts_stay(ranks: RankPool, sources: Sources, target: Auto) -> None:
    folder = sources.get(4, Auto(2, 1, frozen=True), more=3)
    setup = replace(target, frozen=True)
    check(sources.resume(4, setup, folder, more=3), 1e-5)


def test_a_save_without_frozen_weights(ranks: RankPool, sources: Sources, tmp_path: Path) -> None:
    """DeepSpeed's files of experts have the frozen ones all the same."""
    setup = Auto(2, 2, frozen=True)
    ranks.run(4, moe_jobs.save_without_frozen, setup, str(tmp_path))
    assert ucp.verify(tmp_path, deep=True).findings == ()
    target = replace(setup, ep=1, seed=5)
    (found, *_) = sources.resume(2, target, str(tmp_path), tags=("trained",))
    assert found["differences"] == {"trained": []}


FAULTS = [
    "two experts swapped",
    "gate and up of one expert",
    "a row of the router",
    "an expert's moment",
]


@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_seen(ranks: RankPool, sources: Sources, plant: str) -> None:
    folder = sources.get(4, Auto(2, 1), more=3)
    (found, *_) = sources.resume(2, Auto(1, 0), folder, plant=plant, tags=("filled",))
    assert found["differences"]["filled"]


@pytest.mark.parametrize(
    ("source", "target"),
    [(Auto(4, 2), Auto(2, 3)), (Auto(2, 1, "bf16"), Auto(1, 1, "bf16"))],
    ids=str,
)
def test_files_of_stock_deepspeed(
    ranks: RankPool, sources: Sources, tmp_path: Path, source: Auto, target: Auto
) -> None:
    """Without a manifest, as stock wrote them."""
    folder = tmp_path / "stock"
    shutil.copytree(sources.get(4, source, more=3), folder)
    without_manifest(folder)
    check(sources.resume(4, target, str(folder)))


def test_stock_files_of_zero_3(ranks: RankPool, sources: Sources, tmp_path: Path) -> None:
    """The experts lie in the shards alone; of each sub-group as many ranks share it as the file
    says."""
    folder = tmp_path / "stock"
    source = sources.get(4, Auto(2, 3, experts=6), more=0)
    shutil.copytree(source, folder)
    without_manifest(folder)
    for target in (Auto(1, 1, experts=6), Auto(2, 3, experts=6)):
        check(sources.resume(4, target, str(folder)))
