"""Doors: an engine that is marked unusable gives nothing out by any of them; a fingerprint says of
settings, copies and padding what a load depends on, or another check does; a generator that was
restored is what the next draw sees."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.engines import live
from tests.engines import door_jobs
from tests.engines.door_jobs import SETTINGS
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup
from tests.engines.tensor_jobs import Mega
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    "setup", [Setup(3, "bf16"), Setup(1), Setup(0), Mcore(tp=2)], ids=lambda one: repr(one)[:24]
)
def test_an_unusable_engine_gives_nothing_out(ranks: RankPool, tmp_path: Path, setup: Any) -> None:
    for found in ranks.run(2, door_jobs.unusable, setup, str(tmp_path)):
        for door, said in found["said"].items():
            assert said.startswith("EngineUnusableError"), (door, said)
        assert found["left"] == [], "something was written"
        assert found["same"] and found["hooks"] == 0
        for door, said in found["then"].items():
            assert not said.startswith("EngineUnusableError"), door
        assert found["then"]["fingerprint"] == "" and found["then"]["hold"] == ""


@pytest.mark.parametrize("fill", ["refit", "load", "module"])
def test_what_fills_a_part_opens_that_part_alone(
    ranks: RankPool, tmp_path: Path, fill: str
) -> None:
    """Weights that are filled may be written and computed with; moments that are nobody's may not
    be stepped with, whatever filled the weights."""
    for found in ranks.run(2, door_jobs.broken_in_part, Setup(1, "bf16"), str(tmp_path), fill):
        assert found["whole"] == ["", ""] and found["same"]
        for said in found["broken"]:
            assert said.startswith("EngineUnusableError") and "states of the optimizer" in said


# Methods whose names say that they train, compute, write or give out what an engine has, and that
# do not: they fill it, or take parts of a dictionary that somebody gives them.
HARMLESS = {
    *("load_checkpoint", "_load_checkpoint", "_load_zero_checkpoint", "load_universal_checkpoint"),
    *("load_module_state_dict", "load_moe_state_dict", "_get_non_moe_state_dict"),
}


def test_every_method_that_gives_values_out_has_a_door() -> None:
    """A new one of DeepSpeed's is asked: is it closed, or named here with those that are
    harmless?"""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    wanted = re.compile("forward|step|train_batch|eval_batch|_?(save|load)_.*|.*state_dict")
    theirs = {
        name
        for one in {*DeepSpeedEngine.__mro__, *PipelineEngine.__mro__}
        for name, value in vars(one).items()
        if one.__module__.startswith("deepspeed") and callable(value) and wanted.fullmatch(name)
    }
    assert len(theirs) > 15
    assert theirs - {*live._OF_ALL, *live._OF_WEIGHTS} == HARMLESS


def test_a_bit_of_a_padded_row_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    saved = Mega("gpt", 2, 1, true_vocab=21, vocab=24, seed=3)
    same = Mega("gpt", 2, 1, true_vocab=21, vocab=24, seed=5)
    other = Mega("gpt", 1, 1, true_vocab=21, vocab=24, seed=5)
    for found in ranks.run(2, door_jobs.padded_bit, saved, str(tmp_path), [same, other]):
        for said in found:
            assert said.startswith("DamagedFileError"), said


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_that_differed_are_refused_on_every_mesh(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    param = "decoder.final_layernorm.weight"
    saved = Mega("llama", 2, zero)
    found, other = ranks.run(2, door_jobs.copies_that_differ, saved, str(tmp_path), param)
    for rank in (found, other):
        assert any("copies of one parameter differ" in note for note in rank["saved"])
        for name in ("same", "other"):
            assert rank[name].startswith("ForeignFileError") and param in rank[name], rank[name]
            assert 'allow={"replicas"}' in rank[name]
            said = " ".join(rank[f"{name}, allowed"])
            assert "copies differed between ranks" in said and param in said
            assert rank[f"{name}, equal"]
    assert found["convert"].startswith("ForeignFileError")
    assert any(param in note for note in found["convert, allowed"])
    assert any(param in note for note in found["export"])


BROKEN = ("load", "load, held", "load_checkpoint", "save", "hold", "fingerprint", "export")


@pytest.mark.parametrize("door", BROKEN)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(1),
        pytest.param(Mega("llama", 2, 1), marks=pytest.mark.slow),
        pytest.param(Mcore(), marks=pytest.mark.slow),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_collective_that_breaks_is_a_rank_error(
    ranks: RankPool, tmp_path: Path, setup: Any, door: str
) -> None:
    if isinstance(setup, Mcore) and door == "load_checkpoint":
        setup = Setup(3)  # a stack has none
    if isinstance(setup, Setup) and door == "export":
        setup = Mega("gpt", 1, 1, groups=4)  # a model without a config has no export
    for said in ranks.run(2, door_jobs.broken_collectives, setup, str(tmp_path), door):
        *broken, last = said
        assert last == "" and len(broken) >= 2
        for text in broken:
            assert text.startswith("RankError"), text


def test_every_setting_is_in_the_fingerprint(ranks: RankPool) -> None:
    (found,) = ranks.run(1, door_jobs.settings_in_fingerprint)
    for name in SETTINGS:
        changes, differences = found[name]
        if name == "fused":  # how torch computes a step: no value depends on it
            assert not changes and not differences
        else:
            assert changes and differences, name
    assert found["the rule"][0] and "stepped as=AdamW" in found["the rule"][1][0]


def test_a_kept_fingerprint_that_is_not_its_digest_is_refused(tmp_path: Path) -> None:
    table = {"a": {"value": "float32 00000000"}}
    digest = ucp_digest(table)
    path = tmp_path / "kept.json"
    for said, is_right in ((digest, True), ("0" * 64, False)):
        kept = {"digest": said, "table": table, "settings": {}}
        path.write_text(json.dumps({"fingerprint": kept}))
        if is_right:
            assert ucp.fingerprint(path).digest == digest
        else:
            with pytest.raises(ucp.UsageError, match="is not what its digest was made of"):
                ucp.fingerprint(path)


def ucp_digest(table: Any) -> str:
    """As `megatron-ucp inspect --fingerprint` prints it."""
    from megatron_ucp.reshard.fingerprint import Fingerprint

    return Fingerprint(table, {}).digest


@pytest.mark.parametrize(("workers", "stop"), [(0, 3), (0, 4), (2, 3)])
def test_losses_with_dropout_are_the_runs(
    ranks: RankPool, tmp_path: Path, workers: int, stop: int
) -> None:
    """In the middle of an epoch of two steps, and at its end."""
    job = door_jobs.noisy_losses
    for whole, again in ranks.run(2, job, str(tmp_path), workers, stop, timeout_s=100):
        assert whole == again and len({*whole}) == 5
