"""Weights of a trainer go into another engine, or into plain tensors, after each step: bit by bit,
against a gather that knows nothing of the package's layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines import refit_jobs
from tests.engines.autotp_jobs import Auto
from tests.engines.cross_jobs import Zero
from tests.engines.lora_jobs import Adapted
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.tensor_jobs import Mega, Staged
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
BOUND_S = 60.0  # within which a rank knows that another one died
IDLE: dict[str, Any] = {"seed": 9, "extra": {"evaluate": True}}
BUCKETS: dict[str, Any] = {"overlap": True, "gather": True, "bucket": 2000}
MOE: dict[str, Any] = {"family": "mixtral", "layers": 2}
CONSTANT: dict[str, Any] = {"style": "constant"}

# name -> ranks, the engine that trains, the one that is filled, whether that has no optimizer
PAIRS: dict[str, tuple[int, Any, Any, bool]] = {
    "z1 to z0": (4, Setup(1, "bf16"), Setup(0, "bf16", **IDLE), True),
    "z3 to z3": (4, Setup(3, "bf16"), Setup(3, "bf16", **IDLE), True),
    "z0 to z3": (2, Setup(0, "bf16"), Setup(3, "bf16", **IDLE), True),
    "z2 in fp16": (2, Setup(2, "fp16"), Setup(0, "fp16", **IDLE), True),
    "masters, as the target is wider": (2, Setup(3, "bf16"), Setup(0, **IDLE), True),
    "rounded, as it is narrower": (2, Setup(1), Setup(0, "bf16", **IDLE), True),
    "masters of z1 to z3": (4, Setup(1, "bf16"), Setup(3, "bf16", seed=9), False),
    "masters of z3 to z0": (2, Setup(3), Setup(0, seed=9), False),
    "Muon": (2, Setup(1, optimizer="muon"), Setup(2, optimizer="muon", seed=9), False),
    "tp1 to tp2": (4, Mega("llama", 1, 1, "bf16"), Mega("llama", 2, 0, "bf16", seed=9), True),
    "tp4 to tp2": (4, Mega("llama", 4, 3), Mega("llama", 2, 0, seed=9), True),
    "another padding": (
        4,
        Mega("gpt", 2, 1, "bf16", tied=True, true_vocab=45, vocab=46),
        Mega("gpt", 4, 0, "bf16", tied=True, true_vocab=45, vocab=48, seed=9),
        True,
    ),
    "masters, tp2 to tp1": (4, Mega("gpt", 2, 3, "bf16"), Mega("gpt", 1, 1, "bf16", seed=9), False),
    "a tied pipeline to none": (
        4,
        Staged("gpt", 1, 1, tied=True, pp=2),
        Staged("gpt", 1, 0, tied=True, seed=9),
        True,
    ),
    "masters of experts": (4, Moe(2, 1), Moe(4, 2, seed=9), False),
    "AutoTP, tp4 to tp2": (4, Auto("gpt2", 4, 1), Auto("gpt2", 2, 3, seed=9), False),
    "AutoTP, uneven": (4, Auto("llama", 2, 3), Auto("llama", 4, 1, seed=9), False),
    "adapters": (2, Adapted("llama", 2), Adapted("llama", 3, seed=9), False),
    "Megatron to DeepSpeed": (
        4,
        Mcore(tp=2, dtype="bf16", **BUCKETS, **CONSTANT),
        Zero(zero=0, tp=4, dtype="bf16", seed=9),
        True,
    ),
    "Megatron's experts to DeepSpeed": (
        4,
        Mcore(ep=2, tp=2, **MOE, **CONSTANT),
        Zero(zero=0, ep=4, **MOE, seed=9),
        False,
    ),
    "Megatron, a pipeline": (
        4,
        Mcore(pp=2, vpp=2, dtype="bf16", **BUCKETS),
        Mcore(tp=2, dtype="bf16", seed=9),
        False,
    ),
    "DeepSpeed to Megatron": (
        4,
        Zero(zero=3, tp=2),
        Mcore(pp=2, **CONSTANT, seed=9),
        False,
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.cases(12)
def test_pair(ranks: RankPool, name: str) -> None:
    world, source, target, idle = PAIRS[name]
    job, padded = refit_jobs.pair, "padding" in name
    for found in ranks.run(world, job, source, target, idle, padded, timeout_s=200):
        assert found["wrong"] == [], found["wrong"]
        assert len(found["before"]) > 5, "it was equal before"
        assert found["planted"], "a planted value was not seen"
        assert found["planned"] == [True, False, False]
        assert found["compared"][:2] == [None, None]
        *_, compared = found["compared"]
        all_of_it = source.dtype == target.dtype and idle and not padded
        assert 0 <= compared <= found["filled"]
        assert not all_of_it or compared == found["filled"]


def test_many_calls(ranks: RankPool) -> None:
    """A trainer steps between them: each is equal, memory stays, and what ranks ask of each other
    beside values are two numbers."""
    source, target = Mega("llama", 2, 1, "bf16"), Mega("llama", 4, 0, "bf16", seed=9)
    for found in ranks.run(4, refit_jobs.many, source, target, 200, timeout_s=300):
        assert found["wrong"] == []
        assert found["planned"] == 1 and found["compared"] == 4
        assert found["grown"] < 2**22
        asked = found["asked"]
        assert asked.pop("bytes") <= 4 * 2 * 8 * 2, "four numbers, up and down a tree of four"
        assert asked.pop("messages") <= 2 * 4, "a number goes up the tree and down"
        assert asked == {}


def test_what_the_next_call_sees(ranks: RankPool) -> None:
    plans = {"first": True, "nothing": False, "nothing again": False}
    for found in ranks.run(2, refit_jobs.changes, Setup(0), Setup(0, seed=9)):
        for name, (planned, wrong) in found.items():
            assert wrong == [], name
            assert planned == plans.get(name, True), name


def test_weights_that_a_rank_gets_in_the_call(ranks: RankPool) -> None:
    """Nobody sends weights before it has them."""
    setups = Setup(3, "bf16"), Setup(0, "bf16", seed=9)
    assert ranks.run(2, refit_jobs.late, *setups) == [True, True]


def test_messages_that_the_program_waits_for_are_not_ours(tmp_path: Path) -> None:
    """In gloo itself, where what comes first is taken by who waits first."""
    setups = Setup(3, "bf16"), Setup(0, "bf16", seed=9)
    pool, job = RankPool(2, gloo=True), refit_jobs.between_messages
    try:
        for found in pool.run(2, job, *setups, str(tmp_path), timeout_s=60):
            assert found == {"wrong": [], "others'": []}
    finally:
        pool.close()


@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_that_fails(ranks: RankPool, failing: int) -> None:
    job, source = refit_jobs.failing, Mega("llama", 2, 1, "bf16")
    for found in ranks.run(4, job, source, Mega("llama", 4, 0, "bf16", seed=9), failing):
        assert found["before"].startswith("DamagedFileError: only here")
        assert found["before, then"] == found["while it moves, then"] == []
        assert found["while it moves"].startswith("DamagedFileError: only here")
        assert found["changed"].startswith("ForeignFileError: what a refit moved is not")
        assert "parameter: " in found["changed"]
        assert found["changed, then"] == "it refuses" and found["whole again"] == []


REFUSED = {
    "one engine": "UsageError: source and target of a refit have parameters in common",
    "nobody trains": "UsageError: no rank has a source",
    "nobody is filled": "UsageError: no rank has a target",
    "no engine": "UsageError: this is no engine",
    "no such tensor": "ModelMismatchError: the model has no tensor of a name",
    "another shape": "ModelMismatchError: a tensor has another shape than in the Hugging Face",
    "no tensor": "UsageError: a target of a refit is no tensor that can be filled",
    "a dtype of no weights": "ModelMismatchError: weights can't be rounded to the dtype",
    "one memory": "UsageError: two targets of a refit lie in one memory",
    "no number": "UsageError: checksums says whether, or how often",
    "no word": "UsageError: ",
    "ranks differ": "UsageError: the ranks were given different options",
    "another model": "ModelMismatchError: ",
    "ranks differ in a call": "UsageError: the ranks ask for different things",
}


def test_what_is_refused(ranks: RankPool) -> None:
    source, target = Mega("llama", 2, 1, "bf16"), Mega("llama", 1, 0, "bf16", seed=9)
    for found in ranks.run(2, refit_jobs.refusals, source, target):
        assert found.pop("then") == []
        assert found.keys() == REFUSED.keys()
        for name, (said, *changed) in found.items():
            assert said.startswith(REFUSED[name]), said
            assert changed == []


def test_a_rank_that_dies(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.PEERS_REPORT_S", BOUND_S)  # they write files before they end
    pool, dead = RankPool(4, gloo=True), 2
    setups = Setup(1, "bf16"), Setup(0, "bf16", **IDLE)
    try:
        with pytest.raises(RanksFailed):
            pool.run(4, refit_jobs.dies, *setups, dead, str(tmp_path), timeout_s=60)
    finally:
        pool.close()
    for rank in {0, 1, 2, 3} - {dead}:
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told["said"].startswith("RankError: the refit did not finish"), told["said"]
        assert told["seconds"] < BOUND_S


TENSORS: dict[str, tuple[Any, str]] = {
    "DeepSpeed, weights": (Mega("llama", 2, 1, "bf16"), "bfloat16"),
    "DeepSpeed, masters": (Mega("llama", 2, 3, "bf16", tied=True), "float32"),
    "AutoTP": (Auto("llama", 2, 1), "float32"),
    "Megatron's experts": (Mcore(ep=2, **MOE, dtype="bf16"), "bfloat16"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_hugging_face(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """What an inference server takes, on two of four ranks."""
    source, dtype = TENSORS[name]
    job, takers = refit_jobs.tensors, [1, 2]
    every = ranks.run(4, job, source, str(tmp_path / "hf"), dtype, takers, timeout_s=200)
    counts = [found["count"] for found in every]
    assert counts[0] == counts[3] == 0 and 0 < counts[2] < counts[1]
    for found in every:
        assert found["wrong"] == []
        assert len(found["same as before"]) < max(1, found["count"])
        assert found["compared"][0] == found["compared"][1] > 0


APART: dict[str, tuple[list[int], list[int], tuple[int, int]]] = {
    "disjoint": ([0, 1], [2, 3], (1, 0)),
    "one of them": ([0, 1, 2, 3], [1], (1, 0)),
    "one for all": ([1, 2], [0, 1, 2, 3], (1, 0)),
}


@pytest.mark.parametrize("name", APART)
def test_ranks_that_are_apart(ranks: RankPool, name: str) -> None:
    every = ranks.run(4, refit_jobs.apart, *APART[name], timeout_s=120)
    assert any(found["before"] for found in every)
    for found in every:
        assert found["wrong"] == []
        assert found["compared"] > 0


def test_masters_that_the_weights_of_the_target_cannot_hold(ranks: RankPool) -> None:
    setups = Setup(1, "bf16"), Setup(1, "fp16", seed=9)
    for found in ranks.run(2, refit_jobs.too_large, *setups):
        said, then = found
        assert said.startswith("InexactError: values are too large for float16")
        assert then == "it refuses"
