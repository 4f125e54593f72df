"""A differential test: our load and stock DeepSpeed's load of the same files, on the same mesh,
leave the same engine beside its tensors."""

from pathlib import Path

import pytest

from tests.engines import differential_jobs
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
JOB = differential_jobs.side_by_side
EXAMPLES = 30


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_both_loads_leave_the_same_engine(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    (count,) = ranks.run(1, JOB, zero, str(tmp_path), EXAMPLES, timeout_s=300)
    assert count >= EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_many_cases_leave_the_same_engine(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    (count,) = ranks.run(1, JOB, zero, str(tmp_path), 300, timeout_s=1200)
    assert count >= 300


def test_the_comparison_sees_a_changed_value(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="groups: "):
        ranks.run(1, JOB, 1, str(tmp_path), 2, plant=True)
