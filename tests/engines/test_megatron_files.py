"""DeepSpeed engines go on from folders that stock Megatron-LM wrote, straight from its files: every
state is what torch's reader gives, and the next losses are those of the run that wrote them."""

import re
from typing import Any

import pytest
import torch

from tests.engines import megatron_file_jobs
from tests.formats.megatron_files import GOLDEN, NAMED, TAG, by_torch, split, stored_weights

pytestmark = pytest.mark.ranks
JOB = megatron_file_jobs.go_on
# folder, ranks, tp, ZeRO stage, dtype, how far losses may be: another mesh adds in another order
CASES = [
    ("td_full_tp2dp2", 2, 1, 1, "fp32", 1e-5),
    ("td_dpr_pp2vpp2", 2, 2, 2, "fp32", 1e-5),
    ("legacy_tp2pp2", 2, 1, 3, "fp32", 1e-5),
    ("td_dpr_dp2_bf16", 1, 1, 0, "bf16", 5e-3),
]


def stock_losses(case: str) -> list[float]:
    """Of the three iterations after the save; none are known for the legacy folder."""
    file = GOLDEN / case / "next_losses.txt"
    text = file.read_text() if file.exists() else ""
    return [float(value) for value in re.findall(r"loss ([\d.]+)", text)]


@pytest.mark.parametrize(("case", "ranks_count", "tp", "zero", "dtype", "allowed"), CASES)
def test_goes_on_from_megatrons_files(
    case: str, ranks_count: int, tp: int, zero: int, dtype: str, allowed: float, ranks: Any
) -> None:
    found = ranks.run(ranks_count, JOB, tp, zero, dtype, str(GOLDEN / case), timeout_s=120)[0]
    assert found["counters"] == (3 + 3, 12 + 3 * 4) and found["source"] == TAG
    state = found["state"]["full"]
    for name, weight in stored_weights(case).items():
        assert same(state[name, "fp32"].to(weight.dtype), weight), name
        assert not same(found["before"][name, "fp32"].to(weight.dtype), weight) or weight.dim() == 1
    for name, kind, values in split(by_torch(GOLDEN / case / TAG)) if case in NAMED else ():
        assert kind == "weight" or same(state[name, kind], values), (name, kind)
    losses = stock_losses(case)
    assert len(found["losses"]) == 3
    for have, want in zip(found["losses"], losses, strict=bool(losses)):
        assert abs(have - want) <= allowed, (found["losses"], losses)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1), other.reshape(-1))
