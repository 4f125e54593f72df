"""Optimizers that a user brings: registered ones are carried over bit for bit, others are refused
by name when the engine is attached."""

from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from tests.engines import optimizer_jobs
from tests.engines.model import Setup
from tests.engines.sources import Sources, check
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


def lion(zero: int, dtype: str = "bf16", **kwargs: Any) -> Setup:
    return Setup(zero, dtype, "Lion", **kwargs)


@pytest.mark.parametrize(
    ("source_ranks", "source", "target_ranks", "target"),
    [(2, lion(2), 4, lion(3, seed=9)), (4, lion(3), 2, lion(0, seed=9))],
)
def test_a_registered_optimizer_is_carried_over_bit_for_bit(
    sources: Sources, source_ranks: int, source: Setup, target_ranks: int, target: Setup
) -> None:
    folder = sources.get(source_ranks, source, optimizer_jobs.save_lion)
    check(sources.ranks.run(target_ranks, optimizer_jobs.resume_lion, target, folder))


def test_a_planted_fault_in_a_state_of_its_own_is_seen(sources: Sources) -> None:
    folder = sources.get(2, lion(2), optimizer_jobs.save_lion)
    found = sources.ranks.run(
        4, optimizer_jobs.resume_lion, lion(3, seed=9), folder, plant="one trend"
    )
    assert any("trend" in line for rank in found for line in rank["differences"]["trained"])


@pytest.mark.parametrize(
    ("setup", "options", "words"),
    [
        (lion(1), {}, ["tests.engines.optimizers.Lion", "register_optimizer", "native=True"]),
        (lion(0, "fp32"), {}, ["tests.engines.optimizers.Lion", "register_optimizer"]),
        (
            Setup(1, "bf16", "Adam8bit"),
            {"steps": 1},
            ["Adam8bit", "8-bit block-wise states", "native=True"],
        ),
        (Setup(1, "bf16"), {"cut": 2}, ["Muon", "ZeRO stage 0", "native=True"]),
        (
            Setup(3, "bf16", extra={"left_out": "up.bias"}),
            {},
            ["up.bias", "ZeRO-3", "native=True", "register_optimizer"],
        ),
    ],
)
def test_what_no_save_can_hold_is_refused_when_the_engine_is_attached(
    ranks: RankPool, setup: Setup, options: dict[str, Any], words: list[str]
) -> None:
    for rank in ranks.run(2, optimizer_jobs.attaching, setup, **options):
        assert rank["error"] == "UnsupportedError", rank
        assert all(word in rank["message"] for word in words), rank["message"]
        assert rank["unchanged"] and not rank["attached"]


def test_a_parameter_in_no_group_below_zero_3_is_in_the_files(ranks: RankPool) -> None:
    setup = Setup(1, "bf16", extra={"left_out": "up.bias"})
    assert [rank["error"] for rank in ranks.run(2, optimizer_jobs.attaching, setup)] == ["", ""]


def test_a_subclass_is_taken_as_the_class_that_is_known_with_a_note(ranks: RankPool) -> None:
    first, _ = ranks.run(2, optimizer_jobs.attaching, Setup(1, "bf16", "OwnAdamW"))
    assert first["attached"] and not first["error"]
    assert "tests.engines.optimizers.OwnAdamW is taken as torch.AdamW" in first["said"]
    plain, _ = ranks.run(2, optimizer_jobs.attaching, Setup(1, "bf16"))
    assert plain["attached"] and "is taken as" not in plain["said"]


@pytest.mark.parametrize("zero", [0, 1])
def test_no_save_is_lost_to_states_that_show_later(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    for rank in ranks.run(
        2, optimizer_jobs.save_chatty, Setup(zero, "bf16", "ChattyAdamW"), str(tmp_path)
    ):
        (note,) = rank["notes"]
        assert "history, spread" in note and "native=True" in note
        assert rank["load"].startswith("UnsupportedError") and "history" in rank["load"]
        assert rank["native"]


def matrices(zero: int, **kwargs: Any) -> Setup:
    return Setup(zero, "fp32", "Muon", net="Matrices", groups=1, **kwargs)


def test_muon_of_torch_at_stage_0(sources: Sources) -> None:
    folder = sources.get(2, matrices(0), more=0, filled=False)
    found = sources.resume(4, matrices(0, seed=9), folder, tags=("trained",))
    check(found)
    assert any(("norm" in line or "momentum" in line) for line in found[0]["before"]["trained"])


OTHERS = {
    "bitsandbytes.optim.AdamW": (),
    "bitsandbytes.optim.PagedAdamW32bit": (),  # which falls back to plain memory on a CPU
    "bitsandbytes.optim.Lion32bit": (),
    "schedulefree.AdamWScheduleFree": (("warmup_steps", 2),),
    "schedulefree.SGDScheduleFree": (),
    "lion_pytorch.Lion": (),
}


@pytest.mark.parametrize(("source", "target"), [(2, 3), (3, 0), (0, 1)])
@pytest.mark.parametrize("optimizer", OTHERS)
def test_optimizers_of_other_packages(
    sources: Sources, optimizer: str, source: int, target: int
) -> None:
    pytest.importorskip(optimizer.partition(".")[0], reason="tests/setup_env.sh installs it")
    one = Setup(source, "fp32", optimizer, options=OTHERS[optimizer])
    folder = sources.get(2, one, filled=False, more=3)
    other = Setup(target, "fp32", optimizer, options=OTHERS[optimizer], seed=9)
    found = sources.resume(4 if target == 3 else 1, other, folder, tags=("trained",), more=3)
    check(found)
    # ZeRO-3 steps the optimizer once for each sub-group, and schedule-free's counts stand in the
    # groups: there it trains differently from the first step on
    if not optimizer.startswith("schedulefree") or 3 not in (source, target):
        assert found[0]["loss"] <= 1e-5


def test_the_8_bit_form_is_refused_by_what_it_keeps(ranks: RankPool) -> None:
    pytest.importorskip("bitsandbytes", reason="tests/setup_env.sh installs it")
    small = (("optim_bits", 8), ("min_8bit_size", 1))
    setup = Setup(1, "fp32", "bitsandbytes.optim.AdamW", options=small)
    for rank in ranks.run(2, optimizer_jobs.attaching, setup, steps=1):
        assert rank["error"] == "UnsupportedError" and "8-bit block-wise" in rank["message"]


def test_steps_that_depend_on_the_partition_are_refused(ranks: RankPool) -> None:
    pytest.importorskip("optimi", reason="tests/setup_env.sh installs it")
    for rank in ranks.run(
        2, optimizer_jobs.attaching, Setup(1, "fp32", "optimi.StableAdamW", options=(("lr", 1e-3),))
    ):
        assert rank["error"] == "UnsupportedError" and "root mean square" in rank["message"]
        assert rank["unchanged"] and not rank["attached"]
    with pytest.raises(UnsupportedError, match="root mean square"):
        ucp.register_optimizer("optimi.StableAdamW", element=("exp_avg", "exp_avg_sq"))
