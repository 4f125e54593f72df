"""Each refusal of a load ends in an advice that leads to a load."""

from pathlib import Path

import pytest

from tests.engines import advice_jobs
from tests.engines.advice_jobs import REFUSED
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


def test_the_advice_of_each_refusal_leads_to_a_load(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, advice_jobs.walks, str(tmp_path), timeout_s=100)
    assert found.keys() == REFUSED.keys()
    for name, (said, is_the_run) in found.items():
        assert len(said) >= 2 and said[-1] == "", (name, said)
        assert is_the_run, name
