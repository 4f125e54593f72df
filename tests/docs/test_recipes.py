"""Recipes of the pages that need several ranks, run word for word."""

from pathlib import Path

import pytest

from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
JOBS = "tests.docs.recipe_jobs"


def test_the_next_world_as_resize_md_builds_it(ranks: RankPool, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert ranks.run(4, f"{JOBS}:in_between", store, False, timeout_s=100) == [[], [], [], []]


@pytest.mark.slow
def test_groups_that_torch_takes_down_are_not_enough(tmp_path: Path) -> None:
    pool = RankPool(4)
    try:
        with pytest.raises(RanksFailed):
            pool.run(4, f"{JOBS}:in_between", str(tmp_path / "store"), True, timeout_s=60)
    finally:
        pool.close()
