"""Recipes of the pages that need several ranks, run word for word."""

from pathlib import Path

import pytest

import megatron_ucp as ucp
from tests.docs import console, recipe_jobs
from tests.docs.journeys import called, differ, listed
from tests.docs.pages import ROOT, blocks_of
from tests.engines.store_jobs import in_store
from tests.object_server import ObjectServer
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks


def test_the_next_world_as_resize_md_builds_it(ranks: RankPool, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert ranks.run(4, recipe_jobs.in_between, store, False, timeout_s=100) == [[], [], [], []]


def test_the_blocks_of_refit_md(ranks: RankPool) -> None:
    for found in ranks.run(2, recipe_jobs.refits, timeout_s=100):
        assert found == {f"block {number}": [] for number in range(3)}


def test_the_blocks_of_stores_md(
    ranks: RankPool, object_server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a server of the tests' own in the place of a bucket."""
    environment = object_server.environment()
    assert ranks.run(2, in_store, environment, recipe_jobs.in_a_bucket, timeout_s=100) == [[], []]
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of((ROOT / "docs" / "stores.md").read_text())
    ours = [one for one in blocks if one.commands and "test_the_blocks_of" in one.comment]
    assert [len(one.commands) for one in ours] == [4, 1]
    assert [fault for block in ours for fault in console.faults(block)] == []
    for url in ("s3://bucket/converted/global_step80", "s3://bucket/runs/llama/global_step2"):
        assert ucp.verify(url, deep=True).findings == ()
    assert "bucket/models/llama/model.safetensors" in object_server.ask("objects")


@pytest.mark.slow
def test_groups_that_torch_takes_down_are_not_enough(tmp_path: Path) -> None:
    pool = RankPool(4)
    try:
        with pytest.raises(RanksFailed):
            pool.run(4, recipe_jobs.in_between, str(tmp_path / "store"), True, timeout_s=60)
    finally:
        pool.close()


def test_real_runs_take_the_journeys_of_the_architecture(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, recipe_jobs.journeys, str(tmp_path), timeout_s=100)[0]
    megatron = tuple(one for one in listed("A save") if "/megatron/" in one)
    faults = {heading: differ(heading, found[heading], megatron) for heading in found}
    assert not [fault for fault in faults.values() if fault], faults
    # negative control
    assert differ("A load", found["A load"][::-1]) and differ("A load", found["A save"])


def test_a_conversion_takes_the_journey_of_the_architecture(tmp_path: Path) -> None:
    source = ROOT / "tests" / "formats" / "golden" / "megatron" / "td_full_tp2dp2"
    out = tmp_path / "tag"
    assert not differ("A conversion", called(lambda: ucp.convert(source, out, mesh="dp=2,zero=1")))
