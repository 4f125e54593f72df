"""Who waits long for other ranks says for whom, once; and nobody who does not."""

import pytest

from tests.engines import wait_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("which", [0, 2])
def test_one_rank_says_which_one_is_late(which: int) -> None:
    pool = RankPool(3, gloo=True)
    try:
        found = pool.run(3, wait_jobs.late, which, 4.0)
    finally:
        pool.close()
    (said,) = [one for rank in found for one in rank]
    assert f"1 of 3 ranks have not come to it: rank {which}" in said
    assert "late of tests.engines.wait_jobs, line" in said
    assert not found[which]


def test_a_short_wait_is_not_told() -> None:
    pool = RankPool(3, gloo=True)
    try:
        assert pool.run(3, wait_jobs.late, 1, 0.0) == [[], [], []]
    finally:
        pool.close()
