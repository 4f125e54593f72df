"""Each save says what the engine is at that moment, whatever the program changed since the last
one."""

from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import change_jobs
from tests.engines.model import Setup
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("way", ["stock", "direct", "background"])
@pytest.mark.parametrize("zero", [1, 2])
def test_what_was_changed_is_saved(ranks: RankPool, tmp_path: Path, zero: int, way: str) -> None:
    setup = Setup(zero)
    states = ranks.run(2, change_jobs.changed, setup, str(tmp_path), way, timeout_s=200)[0]
    assert states.keys() == change_jobs.CHANGES.keys()
    for name, state in states.items():
        saved = ucp.fp32_state_dict(tmp_path, tag=name)
        assert saved.keys() == state.keys(), name
        for key, value in state.items():
            want = value.float() if value.is_floating_point() else value
            assert torch.equal(saved[key], want), (name, key)
        assert ucp.verify(tmp_path / name, deep=True), name
    rates = {group.settings["lr"] for group in ucp.describe(tmp_path / "a rate").groups}
    assert rates == {0.125}
    turned = [states[name]["square"] for name in ("nothing", "a buffer turned in place")]
    assert torch.equal(turned[0], turned[1].t()) and not torch.equal(*turned)


def test_elements_that_share_memory_are_no_save(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(2, change_jobs.gaps, Setup(1), str(tmp_path)):
        assert said.keys() == change_jobs.GAPS.keys()
        assert all("is not contiguous" in text for text in said.values()), said
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["whole"]
