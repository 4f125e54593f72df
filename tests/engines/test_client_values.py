"""Plain values beside tensors come back in type and bits, in every place and by every way, or are
refused by name before anything is written."""

from pathlib import Path

import pytest

from tests.engines import value_jobs
from tests.engines.value_jobs import to_megatron
from tests.engines.value_kinds import KINDS, LIVE_KINDS, exactly, table
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]


def test_every_kind_in_every_place_by_every_way(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, value_jobs.matrix, str(tmp_path), timeout_s=300)
    wanted = table(found[0])
    assert "NO" not in wanted
    page = (ROOT / "docs" / "reference" / "formats.md").read_text()
    assert wanted in page, f"put this there:\n{wanted}"
    for rank in found:
        (refused,) = rank.pop("stock, converted")["error"]
        assert "value_kinds" in refused and "closed list" in refused
        assert len(rank) == 10
        for way, places in rank.items():
            assert places == {key: [] for key in places}, way
    error = to_megatron(str(tmp_path), "attached")
    assert "a parameter group holds" in error and "value_kinds.Mode" in error
    assert not (tmp_path / "megatron").exists()
    for rank in ranks.run(2, value_jobs.stock_of_converted, str(tmp_path)):
        assert rank == {key: [] for key in rank}


@pytest.mark.parametrize("kind", [*KINDS, *LIVE_KINDS])
def test_the_comparison_sees_another_value(kind: str) -> None:
    one, other = {**KINDS, **LIVE_KINDS}[kind]()
    assert exactly(one, one)
    assert kind == "function of a module" or not exactly(one, other)
