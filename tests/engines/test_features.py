"""Optimizers, buffer layouts and settings of DeepSpeed: each carried over bit for bit, or refused
by name."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import jobs, kinds, optimizer_jobs
from tests.engines.model import Setup
from tests.engines.sources import Sources, check, without_manifest

pytestmark = pytest.mark.ranks

CPU = ("offload_optimizer", {"device": "cpu"})
MOMENTUM = (("momentum", 0.9),)
BF16_OPTIMIZER = (("data_types", {"grad_accum_dtype": "fp32"}),)
BF16_MASTERS = (("bf16", {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),)
NO_FP32_STATES = (("fp32_optimizer_states", False),)


def zero(
    stage: int, dtype: str = "bf16", optimizer: str = "AdamW", options: tuple = (), **more: Any
) -> Setup:
    own = {key: more.pop(key) for key in ("groups", "config") if key in more}
    settings = tuple(sorted(more.items()))
    return Setup(stage, dtype, optimizer, options, zero_config=settings, **own)


Case = tuple[int, Setup, int, Setup]  # source ranks, source, target ranks, target


def alike(ranks: int, stage: int, others: int, other: int, *how: Any, **more: Any) -> Case:
    """Two stages, which otherwise are the same."""
    return ranks, zero(stage, *how, **more), others, zero(other, *how, **more)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ROUND, ALIGN = {"round_robin_gradients": True}, {"parameter_alignment": True}
RMS = ("fp32", "RMSprop", (("momentum", 0.9), ("centered", True)))
IN_BF16 = {"options": NO_FP32_STATES, "config": BF16_MASTERS, **OFFLOAD}
OFFLOADED = {**OFFLOAD, "offload_param": {"device": "cpu"}}
TINY = {"net": "Tiny", "groups": 3}
CASES: dict[str, Case] = {
    "Adam": alike(2, 1, 4, 3, optimizer="Adam"),
    "AMSGrad": alike(2, 1, 2, 3, options=(("amsgrad", True),)),
    "SGD": alike(2, 3, 4, 1, "fp32", "SGD"),
    "SGD with momentum": alike(2, 2, 4, 3, "fp32", "SGD", MOMENTUM),
    "SGD with momentum, back": alike(4, 3, 1, 0, "fp32", "SGD", MOMENTUM),
    "Adagrad": alike(2, 3, 4, 1, "fp32", "Adagrad", groups=1),
    "RMSprop": alike(2, 0, 4, 1, *RMS),
    "NAdam": alike(2, 0, 4, 3, "fp32", "NAdam"),
    "Adamax": alike(2, 0, 4, 3, "fp32", "Adamax"),
    "CPUAdam": alike(2, 1, 4, 3, optimizer="CPUAdam", **OFFLOAD),
    "CPUAdam from AdamW": (2, zero(3), 2, zero(1, optimizer="CPUAdam", **OFFLOAD)),
    "CPULion": alike(2, 1, 4, 3, optimizer="CPULion", **OFFLOAD),
    "FusedAdam": alike(2, 1, 4, 3, optimizer="FusedAdam"),
    "FusedAdam at stage 0": alike(2, 0, 2, 1, optimizer="FusedAdam"),
    "FusedAdam into stage 0": alike(2, 3, 1, 0, optimizer="FusedAdam"),
    "AdamW from FusedAdam": (2, zero(1, optimizer="FusedAdam"), 2, zero(3)),
    "round robin source": (4, zero(1, **ROUND), 2, zero(3)),
    "round robin source, stage 2": (2, zero(2, **ROUND), 4, zero(1)),
    "round robin target": (4, zero(3), 4, zero(2, **ROUND)),
    "alignment gaps": (2, zero(1, **ALIGN), 4, zero(2)),
    "alignment gaps in the target": (2, zero(3), 2, zero(1, **ALIGN)),
    "alignment and round robin": (2, zero(2, **ALIGN, **ROUND), 4, zero(1, **ALIGN)),
    "sub-groups": (2, zero(3, sub_group_size=30), 4, zero(3, sub_group_size=60)),
    "sub-groups into one": (4, zero(3, sub_group_size=1), 2, zero(3)),
    "BF16_Optimizer": (2, zero(1, config=BF16_OPTIMIZER), 4, zero(3)),
    "into BF16_Optimizer": (2, zero(3), 4, zero(1, config=BF16_OPTIMIZER)),
    "offloaded optimizer": alike(2, 1, 4, 3, **OFFLOAD),
    "offloaded parameters": alike(2, 3, 4, 3, **OFFLOADED),
    "persistent parameters": alike(2, 3, 4, 3, stage3_param_persistence_threshold=10**5),
    "elastic checkpoint": (2, zero(1, elastic_checkpoint=True), 4, zero(3)),
    "elastic checkpoint, stage 2": alike(4, 2, 2, 1, elastic_checkpoint=True),
    "bf16 masters": alike(2, 1, 2, 2, optimizer="CPUAdam", **IN_BF16),
    "groups of one element": (4, Setup(1, "bf16", **TINY), 4, Setup(3, "bf16", **TINY)),
    "groups of one element, back": (4, Setup(3, "bf16", **TINY), 4, Setup(2, "bf16", **TINY)),
}
OTHER_OPTIMIZER = {"CPUAdam from AdamW", "AdamW from FusedAdam"}


@pytest.mark.parametrize("case", CASES)
def test_carried_over_bit_for_bit(sources: Sources, case: str) -> None:
    source_ranks, source, ranks, target = CASES[case]
    folder, known_keys = sources.get(source_ranks, source, more=0), case in OTHER_OPTIMIZER
    check(sources.resume(ranks, replace(target, seed=9), folder, known_keys=known_keys))


def test_bf16_masters_become_fp32_without_loss_and_not_the_other_way(sources: Sources) -> None:
    low = zero(1, optimizer="CPUAdam", **IN_BF16)
    folder = sources.get(2, low, more=0)
    found = sources.ranks.run(2, jobs.masters_are_equal, zero(3), folder)
    assert all(found)
    high = sources.get(2, Setup(1, "bf16"))
    for rank in sources.ranks.run(2, kinds.attempt, low, high):
        assert rank["error"] == "InexactError" and "rounded" in rank["message"]
        assert rank["unchanged"]


REFUSED = {
    "NVMe": "optimizer states offloaded to NVMe",
    "NVMe parameters": "parameters offloaded to NVMe",
    "partial offload": "partial offload",
    "SuperOffload": "SuperOffload",
    "ZenFlow": "ZenFlow",
    "hpZ": "hpZ",
    "ZeRO++ weights": "quantized weights",
    "Muon in memory": "second home of Muon's momentum",
    "DualPipeV": "two separate runs of layers",
    "ZeRO++ frozen weights": "quantized frozen weights",
    "node-local storage": "node-local storage",
    "offloaded states": "offload_states",
    "AutoEP folded with AutoTP": "AutoEP folded with AutoTP",
    "tensor parallelism": "tensor parallelism",
}


@pytest.mark.parametrize("feature", REFUSED)
def test_refused_by_name(sources: Sources, feature: str) -> None:
    """A real engine with the feature's own config object: most of these can't be built without a
    GPU or libaio."""
    for rank in sources.ranks.run(2, jobs.refusal, feature, sources.get(2, Setup(1, "bf16"))):
        for message, unchanged in rank:
            assert REFUSED[feature] in message and "what to do:" in message
            assert unchanged


@pytest.mark.parametrize(
    ("writer", "words"),
    [
        ({"checkpoint_serialization": False}, "legacy file format"),
        ({"writer": "decoupled"}, "decoupled"),
        ({"writer": "fast"}, "writer other than torch's"),
    ],
)
def test_writers_refused_by_name(sources: Sources, writer: dict, words: str) -> None:
    for message in sources.ranks.run(2, jobs.writer_refusal, writer):
        assert words in message and "what to do:" in message


def test_a_legacy_file_is_refused_by_name(sources: Sources, tmp_path: Any) -> None:
    setup = Setup(1, "bf16", config=(("checkpoint", {"checkpoint_serialization": False}),))
    sources.ranks.run(2, kinds.save, setup, str(tmp_path), attach=False, more=0)
    for rank in sources.ranks.run(2, kinds.attempt, Setup(1, "bf16"), str(tmp_path)):
        assert (
            rank["error"] == "DamagedFileError" and "zip" in rank["message"] and rank["unchanged"]
        )


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 3), (3, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_from_before_the_first_step(
    sources: Sources, source: int, target: int, dtype: str
) -> None:
    """No optimizer state is a state too. (In low precision stage 0 steps once while it is
    built.)"""
    folder = sources.get(2, Setup(source, dtype), steps=0, more=0, filled=False)
    found = sources.resume(2, Setup(target, dtype, seed=9), folder, tags=("trained",))
    for rank in found:
        assert rank["differences"] == {"trained": []} and len(rank["before"]["trained"]) >= 8


def test_a_run_with_hpz(sources: Sources) -> None:
    """A real one: the engine is refused; its files are ZeRO-3's, as a second copy of the weights is
    in none of them."""
    hpz = Setup(3, "bf16", zero_config=(("zero_hpz_partition_size", 2),))
    for rank in sources.ranks.run(4, optimizer_jobs.attaching, hpz):
        assert rank["error"] == "UnsupportedError" and "hpZ" in rank["message"]
        assert rank["unchanged"] and not rank["attached"]
    folder = sources.get(4, hpz, attach=False, more=0)
    target = Setup(1, "bf16", seed=9)
    check(sources.resume(2, target, folder))


def test_files_of_mics_are_refused_by_name(sources: Sources, tmp_path: Any) -> None:
    """DeepSpeed 0.19.8 has it no more; its files are ZeRO-3's but for the number of partitions."""
    setup = Setup(3, "bf16")
    folder = without_manifest(Path(shutil.copytree(sources.get(2, setup), tmp_path / "mics")))
    for path in (folder / "trained").glob("*.pt"):
        tree = torch.load(path, weights_only=False)
        tree["ds_config"]["zero_optimization"]["mics_shard_size"] = 1
        torch.save(tree, path)
    for rank in sources.ranks.run(2, kinds.attempt, setup, str(folder), "trained"):
        assert rank["error"] == "UnsupportedError" and "mics_shard_size 1" in rank["message"]
        assert rank["unchanged"]


def test_a_load_names_what_was_never_saved(sources: Sources, tmp_path: Any) -> None:
    """As SuperOffload's runs are saved: the cause is in the error, and in the report of a load that
    does without the states."""
    setup = Setup(1, "bf16")
    folder = without_manifest(Path(shutil.copytree(sources.get(2, setup), tmp_path / "lost")))
    for path in (folder / "trained").glob("*.pt"):
        tree = torch.load(path, weights_only=False)
        tree["ds_config"]["zero_optimization"]["offload_optimizer"] = {"super_offload": True}
        if "optim" in path.name:
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"].clear()
        torch.save(tree, path)
    run, job = sources.ranks.run, kinds.attempt
    for rank in run(2, job, setup, str(folder), tag="trained"):
        assert rank["error"] == "StateMismatchError" and "SuperOffload" in rank["message"]
        assert rank["unchanged"]
    weights = {"load_optimizer_states": False}
    for rank in run(2, job, setup, str(folder), tag="trained", **weights):
        assert rank["error"] is None and any("SuperOffload" in note for note in rank["notes"])
