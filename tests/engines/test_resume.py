"""What lies beside the tensors: nothing of it comes back changed, or goes where it does not belong,
without a word."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.core.manifest import FILE_NAME
from tests.engines import kinds, resume_jobs
from tests.engines.model import Setup
from tests.engines.sources import Sources, without_manifest
from tests.engines.test_features import BF16_OPTIMIZER
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
TWO = ("gradient_accumulation_steps", 2)


# ------------------------------------------------ client state


@pytest.mark.parametrize("zero", [1, 3])
def test_what_can_be_built_again_comes_back_as_it_was(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    assert ranks.run(2, resume_jobs.client_state, Setup(zero, "bf16"), str(tmp_path)) == [[], []]


def test_what_can_not_is_refused_before_a_file_is_written(ranks: RankPool, tmp_path: Path) -> None:
    for rank in ranks.run(2, resume_jobs.refused_client_states, Setup(1, "bf16"), str(tmp_path)):
        for name, (error, message, left) in rank.items():
            usage = name in ("reserved", "no dict")
            assert error == ("UsageError" if usage else "SaveError"), (name, message)
            assert left == [], name
        assert "client_state['at']: datetime.datetime with a zone" in rank["zone"][1]
        assert "client_state['ema']['w']: torch.nn.parameter.Parameter" in rank["parameter"][1]
        assert "client_state['a'][0]: tests.engines.resume_jobs.Kind" in rank["member"][1]
        assert "global_steps" in rank["reserved"][1]


# ------------------------------------------------ between two steps

MIDDLES = {
    "fp32 at stage 0": Setup(0, "fp32", config=(TWO,)),
    "bf16 at stage 0": Setup(0, "bf16", config=(TWO,)),
    "stage 1": Setup(1, "bf16", config=(TWO,)),
    "stage 2": Setup(2, "bf16", config=(TWO,)),
    "stage 3": Setup(3, "bf16", config=(TWO,)),
    "BF16_Optimizer": Setup(1, "bf16", config=(TWO, *BF16_OPTIMIZER)),
    "offloaded": Setup(
        2,
        "bf16",
        "CPUAdam",
        config=(TWO,),
        zero_config=(("offload_optimizer", {"device": "cpu"}),),
    ),
}


@pytest.mark.parametrize("middle", MIDDLES)
def test_a_load_in_the_middle_of_an_accumulation_drops_it(
    ranks: RankPool, tmp_path: Path, middle: str
) -> None:
    for rank in ranks.run(2, resume_jobs.load_in_the_middle, MIDDLES[middle], str(tmp_path)):
        assert rank["differences"] == [] and rank["fresh"] == []
        assert "(1 micro-batches" in rank["half"][0]


def test_what_is_not_dropped_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    setup = MIDDLES["fp32 at stage 0"]
    for rank in ranks.run(2, resume_jobs.load_in_the_middle, setup, str(tmp_path), plant=True):
        assert rank["differences"]


def test_a_save_in_the_middle_of_an_accumulation_says_so(ranks: RankPool, tmp_path: Path) -> None:
    setup = MIDDLES["stage 1"]
    for rank in ranks.run(2, resume_jobs.save_in_the_middle, setup, str(tmp_path)):
        assert rank["whole"] == ()
        assert "1 micro-batches since the last step are not in it" in rank["half"][0]
        assert any("after 1 micro-batches of a step" in note for note in rank["load"])
    said = json.loads((tmp_path / "half" / FILE_NAME).read_text())["run"]
    assert said["mid_accumulation"] == 1
    assert "mid_accumulation" not in json.loads((tmp_path / "whole" / FILE_NAME).read_text())["run"]


# ------------------------------------------------ schedulers


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_scheduler_of_another_class_is_refused(
    broken: Any, ranks: Any, with_manifest: bool
) -> None:
    folder = broken() if with_manifest else without_manifest(broken())
    other = Setup(3, "bf16", extra={"schedule": "StepLR"})
    for rank in ranks.run(2, kinds.attempt, other, str(folder), "trained"):
        assert rank["error"] == "StateMismatchError" and rank["unchanged"]
        assert "StepLR" in rank["message"] and 'allow={"scheduler"}' in rank["message"]
        assert ("LambdaLR" if with_manifest else "lr_lambdas") in rank["message"]
    for rank in ranks.run(2, kinds.attempt, other, str(folder), "trained", allow=["scheduler"]):
        assert not rank["error"] and any("another scheduler" in note for note in rank["notes"])
    keep = {"load_lr_scheduler_states": False}
    for rank in ranks.run(2, kinds.attempt, other, str(folder), "trained", **keep):
        assert not rank["error"]
    for rank in ranks.run(2, kinds.attempt, Setup(3, "bf16"), str(folder), "trained"):
        assert not rank["error"] and not [n for n in rank["notes"] if "scheduler" in n]


def test_the_class_tells_schedulers_apart_that_keep_the_same(broken: Any, ranks: Any) -> None:
    other = Setup(1, "bf16", extra={"schedule": "Renamed"})
    folder = broken()
    for rank in ranks.run(2, kinds.attempt, other, str(folder), "trained"):
        assert rank["error"] == "StateMismatchError" and "Renamed" in rank["message"]


# ------------------------------------------------ without an optimizer


def evaluating(zero: int, dtype: str, **zero_config: Any) -> Setup:
    extra = {"evaluate": True}
    return Setup(zero, dtype, seed=9, extra=extra, zero_config=tuple(zero_config.items()))


@pytest.mark.parametrize(
    ("target", "of"),
    [
        (evaluating(0, "bf16"), "weights"),
        (evaluating(0, "fp32"), "masters"),
        (evaluating(3, "bf16"), "weights"),
        (evaluating(3, "bf16", stage3_param_persistence_threshold=10**5), "weights"),
        (evaluating(3, "fp32"), "masters"),
    ],
)
def test_a_training_checkpoint_is_evaluated(sources: Sources, target: Setup, of: str) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    for rank in sources.ranks.run(2, resume_jobs.evaluate, target, folder, of=of):
        assert rank["wrong"] == [] and rank["count"] >= 8 and rank["finite"]
        assert (rank["steps"], rank["note"]) == (3, "mine")


def test_a_wrong_weight_is_seen(sources: Sources) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    for rank in sources.ranks.run(
        2, resume_jobs.evaluate, evaluating(3, "bf16"), folder, plant=True
    ):
        assert rank["wrong"]


@pytest.mark.parametrize("origin", [Setup(1, "bf16"), Setup(3, "fp32")])
def test_weights_that_fp16_can_not_hold(ranks: RankPool, tmp_path: Path, origin: Setup) -> None:
    """What is infinite itself is kept; bf16 holds them all."""
    targets = [evaluating(0, "fp16"), evaluating(3, "fp16"), evaluating(0, "bf16")]
    for rank in ranks.run(2, resume_jobs.evaluate_large, origin, targets, str(tmp_path)):
        for found in rank[:2]:
            assert found["error"].startswith("InexactError: values are too large for float16")
            assert found["found"].endswith(": 1") and ";" not in found["found"]
        assert rank[2] == {"error": "", "found": ""}


def test_it_is_saved_where_deepspeed_can(ranks: RankPool, tmp_path: Path) -> None:
    """At ZeRO-3 such an engine has no writer; a wrapper around no optimizer has no state."""
    for setup in (evaluating(3, "bf16"), evaluating(0, "bf16")):
        for rank in ranks.run(2, resume_jobs.save_idle, setup, str(tmp_path)):
            assert rank["error"] == "SaveError" and rank["left"] == []
            assert "no optimizer" in rank["message"] and "save_16bit_model" in rank["message"]
    for rank in ranks.run(2, resume_jobs.save_idle, evaluating(0, "fp32"), str(tmp_path)):
        assert rank["error"] == "" and "global_step0" in rank["left"], rank["message"]


# ------------------------------------------------ failures half-way


def test_latest_that_can_not_follow(ranks: RankPool, tmp_path: Path) -> None:
    for rank in ranks.run(2, resume_jobs.stuck_latest, Setup(1, "bf16"), str(tmp_path)):
        assert rank["error"] == "SaveError" and rank["latest"] == "first"
        assert "the tag is there and whole" in rank["message"] and "names first" in rank["message"]
        assert 'tag="second"' in rank["message"] and "as they were" not in rank["message"]
        assert rank["second"] == [] and rank["then"] == "third"


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("where", ["save", "load"])
def test_a_rank_that_fails_alone_while_the_engine_is_described(
    ranks: RankPool, tmp_path: Path, where: str, raw: bool
) -> None:
    setup = Setup(3, "bf16", zero_config=(("stage3_param_persistence_threshold", 10**5),))
    found = ranks.run(2, resume_jobs.fails_alone, setup, str(tmp_path), where, raw)
    errors = [rank["error"] for rank in found]
    assert errors == (["RankError", "ValueError"] if raw else ["LayoutError"] * 2)
    assert [(rank["unchanged"], rank["folder"]) for rank in found] == [(True, True)] * 2


def test_a_rank_that_fails_alone_before_the_first_write(sources: Sources) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    for rank in sources.ranks.run(2, resume_jobs.prepare_fails_alone, Setup(3, "bf16"), folder):
        assert rank == {"error": "LayoutError", "step": "EngineUnusableError"}
