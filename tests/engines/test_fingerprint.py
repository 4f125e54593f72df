"""The fingerprint of a training state: one on every mesh, in every format and engine; changed by
the smallest fault, which it names."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from isal.isal_zlib import crc32

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.reshard.linear_crc import linear, of_runs, shifted, standard
from tests.engines.model import Setup
from tests.ranks import RankPool

JOBS = "tests.engines.direct_jobs:"
SOURCE = Setup(1, "bf16")


# ------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    "shape", [(7,), (1,), (6, 5), (3, 1, 4), (200,), (101, 2), (2, 3, 40)], ids=str
)
def test_runs_of_a_tensor_add_up_to_its_crc(shape: tuple[int, ...]) -> None:
    """Runs at constant strides, each of 12 bytes in rows of 20, against zlib's CRC of all bytes
    with zeros between."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (int(np.prod(shape)), 12), dtype=np.uint8)
    whole = np.zeros((*shape, 20), dtype=np.uint8)
    whole[..., 3:15] = rows.reshape(*shape, 12)
    strides = whole.strides[:-1]
    total = shifted(of_runs(rows, shape, strides), 5)
    assert standard(total, whole.nbytes) == crc32(whole.tobytes())


def test_parts_in_any_order_add_up() -> None:
    dice = random.Random(3)
    whole = dice.randbytes(100_003)
    cuts = [0, *sorted(dice.sample(range(1, len(whole)), 50)), len(whole)]
    runs = list(itertools.pairwise(cuts))
    dice.shuffle(runs)
    total = 0
    for low, high in runs:
        total ^= shifted(linear(whole[low:high]), len(whole) - high)
    assert standard(total, len(whole)) == crc32(whole)
    (low, high), *_ = runs
    total ^= shifted(linear(whole[low:high]), len(whole) - high)  # a run that is missing
    assert standard(total, len(whole)) != crc32(whole)


# ------------------------------------------------ one state, one fingerprint


@pytest.mark.ranks
@pytest.mark.parametrize(
    "target",
    [Setup(0, "bf16"), Setup(2, "bf16"), Setup(3, "bf16"), Setup(1, "bf16", groups=3)],
    ids=lambda one: f"stage {one.zero}, {one.groups} groups",
)
def test_engine_files_and_an_engine_that_loaded_them_have_one(
    ranks: RankPool, tmp_path: Path, target: Setup
) -> None:
    for (engine, files, loaded), before in ranks.run(
        2, JOBS + "fingerprints", SOURCE, str(tmp_path), target
    ):
        assert engine.digest == files.digest
        assert engine.table == loaded.table
        assert engine.differences(loaded) == []
        assert before > 10, "the engine was equal before the load"


@pytest.mark.ranks
def test_conversions_and_meshes_keep_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, JOBS + "fingerprints", SOURCE, str(tmp_path / "a"), SOURCE)
    want = ucp.fingerprint(tmp_path / "a")
    assert len(want.table) == 11 and len(want.digest) == 64
    ucp.convert(tmp_path / "a", tmp_path / "native", target=ucp.Mesh(dp=3, zero=3))
    ucp.convert(tmp_path / "a", tmp_path / "universal", to="universal")
    ucp.convert(tmp_path / "a", tmp_path / "torch_dist", to="torch_dist")
    for name in ("native", "universal", "torch_dist"):
        assert ucp.fingerprint(tmp_path / name).differences(want) == [], name


# ------------------------------------------------ faults


def flip(tensor: torch.Tensor) -> None:
    tensor.view(torch.int32)[tensor.numel() // 2] ^= 1


def swap(tensor: torch.Tensor) -> None:
    tensor[0], tensor[1] = tensor[1].clone(), tensor[0].clone()


def shards(tree: Any, state: str) -> list[torch.Tensor]:
    held = tree["optimizer_state_dict"]
    if state == "fp32":
        return held["single_partition_of_fp32_groups"]
    return [one[state] for one in held["base_optimizer_state"]["state"].values()]


FAULTS: dict[str, tuple[str, Any]] = {
    "a flipped bit of a master": ("fp32", flip),
    "a flipped bit of a moment": ("exp_avg_sq", flip),
    "two swapped elements": ("exp_avg", swap),
    "a shard that is lost": ("exp_avg", torch.Tensor.zero_),
}


@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", [Setup(1, "bf16"), Setup(3, "bf16")], ids=["same", "stage 3"])
def test_a_fault_in_a_file_is_named_by_a_load_onto_any_mesh(
    ranks: RankPool, tmp_path: Path, fault: str, target: Setup
) -> None:
    """The file is written anew, with checksums of its own, and the manifest says it is that
    file."""
    ranks.run(2, JOBS + "fingerprints", SOURCE, str(tmp_path), SOURCE)
    tag = tmp_path / "global_step2"
    path = tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    tree = torch.load(path, weights_only=False)
    state, change = FAULTS[fault]
    change(shards(tree, state)[0])
    torch.save(tree, path)
    manifest = json.loads((tag / FILE_NAME).read_text())
    from megatron_ucp.formats.durable import entry_of

    entry = entry_of(path)
    manifest["files"] = [
        [entry.name, entry.size_bytes, entry.sha256] if name == path.name else [name, size, sha]
        for name, size, sha in manifest["files"]
    ]
    (tag / FILE_NAME).write_text(json.dumps(manifest))
    for said in ranks.run(2, JOBS + "refused_load", target, str(tmp_path)):
        assert said.startswith("ForeignFileError"), said
        assert f"({state})" in said and "CRC-32 of float32" in said
    with pytest.raises(ucp.ForeignFileError, match="is not what was saved"):
        ucp.fingerprint(tmp_path)


@pytest.mark.ranks
def test_steps_and_hyper_parameters_are_part_of_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, JOBS + "fingerprints", SOURCE, str(tmp_path), SOURCE)
    want = ucp.fingerprint(tmp_path)
    for key, value in (("lr", 0.5), ("step", 7.0)):
        settings = {name: dict(one) for name, one in want.settings.items()}
        assert key in settings["up.weight"]
        settings["up.weight"][key] = value
        other = type(want)(want.table, settings)
        assert other.digest != want.digest
        assert other.differences(want) == ["up.weight (steps or hyper-parameters)"]


def test_what_has_none_is_refused() -> None:
    with pytest.raises(ucp.UsageError, match="no fingerprint"):
        ucp.fingerprint(3)
