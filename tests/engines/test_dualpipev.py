"""DeepSpeed's DualPipeV: its engines are refused by name, and so are its files of stage 0."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import folded_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


def wrong(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    """Names of parameters with another first moment."""
    assert len(want["moments"]) == 8 and {*have["moments"]} == {*want["moments"]}
    return [n for n, value in want["moments"].items() if not torch.equal(value, have["moments"][n])]


def test_it_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    """Of stage 0 its files say no more than how many parameters a rank has: refused as those of
    any pipeline are."""
    want, _ = ranks.run(2, folded_jobs.save, 0, str(tmp_path))
    for message in want["said"]:
        assert message.startswith("UnsupportedError") and "two separate runs of layers" in message
    for rank in ranks.run(2, folded_jobs.load, 0, str(tmp_path)):
        assert rank["error"].startswith("UnsupportedError")
        assert "nothing says whose they are" in rank["error"]


def test_its_files_of_zero_1_name_their_parameters(ranks: RankPool, tmp_path: Path) -> None:
    want, _ = ranks.run(2, folded_jobs.save, 1, str(tmp_path))
    for rank in ranks.run(2, folded_jobs.load, 1, str(tmp_path)):
        assert not rank["error"] and wrong(want, rank) == []
