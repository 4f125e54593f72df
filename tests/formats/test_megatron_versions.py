"""What stock Megatron-LM of 0.18 and 0.19 wrote, by every command: the enum in their arguments, the
common tree in the `.distcp` files, layers for multi-token prediction, latent attention, a hybrid
model."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import errors
from megatron_ucp.core.names import Keeper
from megatron_ucp.formats.byte_files import Record
from megatron_ucp.formats.folder import LocalFile, LocalFolder
from megatron_ucp.formats.megatron.index import Index, read_index
from megatron_ucp.formats.megatron.torch_dist import COMMON_KEY
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state
from tests.formats.megatron_files import (
    GOLDEN,
    GOLDEN_LATER,
    LATER,
    TAG,
    by_torch,
    changed_arguments,
    changed_index,
    copied,
    split,
    swapped_chunks,
)

IN_A_FILE = ("v018_dpr_pp2dp2_bf16",)  # the common tree lies in common.pt
EXPORTED = {"v018_dpr_pp2dp2_bf16": 39, "v019_dpr_tp2dp2": 39, "v019_full_moe_ep2": 79}


def weights_of(case: str) -> dict[str, torch.Tensor]:
    found = {k: v for k, v in by_torch(GOLDEN_LATER / case / TAG).items() if "optimizer" not in k}
    return {name: values for name, _, values in split(found)}


def unequal(folder: Path, weights: dict[str, torch.Tensor]) -> list[str]:
    """Parameters whose masters, rounded, are not these weights; all of them must be there."""
    out: list[str] = []
    with open_checkpoint(folder) as checkpoint:
        assert {spec.name for spec in checkpoint.manifest.params} == {*weights}
        for name, weight in weights.items():
            master = read_state(checkpoint, name, "fp32").to(weight.dtype)
            if not torch.equal(master.view(torch.uint8), weight.reshape(-1).view(torch.uint8)):
                out.append(name)
    return out


@pytest.mark.parametrize("case", LATER)
def test_every_master_is_the_stored_weight(case: str) -> None:
    weights = weights_of(case)
    assert len(weights) > 20 and unequal(GOLDEN_LATER / case, weights) == []
    one, other = (
        name
        for name in weights
        if name.endswith("linear_proj.weight")
        and "mtp" not in name
        and name.startswith(("decoder.layers.0.", "decoder.layers.2."))
    )
    weights[one], weights[other] = weights[other], weights[one]
    assert unequal(GOLDEN_LATER / case, weights) == [one, other], (
        "the comparison sees two that changed"
    )


@pytest.mark.parametrize("case", LATER)
def test_what_is_no_tensor_is_read_where_it_lies(case: str) -> None:
    with open_checkpoint(GOLDEN_LATER / case) as checkpoint:
        extras, names = checkpoint.extras, checkpoint.file_names
        assert str(checkpoint.manifest.written_on) == LATER[case]
    assert (
        ("common.pt" in names)
        == (case in IN_A_FILE)
        == (GOLDEN_LATER / case / TAG / "common.pt").is_file()
    )
    assert extras.counters == {"global_steps": 3, "global_samples": 12, "skipped_steps": 0}
    assert extras.scheduler is not None and extras.scheduler["num_steps"] == 12
    scope = extras.client_state["args"]["inference_cuda_graph_scope"]
    assert type(scope) in (int, str), "the value of an enum, which every run of these versions has"


@pytest.mark.parametrize("case", LATER)
def test_each_command_takes_it(case: str, tmp_path: Path) -> None:
    source = GOLDEN_LATER / case
    assert "step         3" in str(ucp.inspect(source))
    assert ucp.verify(source, deep=True) and ucp.plan(source, "dp=3,zero=3")
    before = by_torch(source / TAG)
    mesh = ucp.Mesh(dp=2, ep=2 if "moe" in case else 1, zero=0 if "moe" in case else 1)
    targets = {
        "torch_dist": ucp.Target(mesh=mesh),
        "universal": None,
        "native": ucp.Target(mesh=ucp.Mesh(dp=3, zero=3)),
    }
    for to, target in targets.items():
        if to == "native" and "moe" in case:
            continue  # experts of megatron-core at ZeRO-3 are no model of DeepSpeed's
        ucp.convert(source, tmp_path / to / TAG, to=to, target=target)
        found = ucp.diff(source, tmp_path / to / TAG)
        assert found == [], (to, found)
    assert by_torch(source / TAG) is before and not unequal(source, weights_of(case))


@pytest.mark.parametrize("case", EXPORTED)
def test_it_becomes_a_hugging_face_model(case: str, tmp_path: Path) -> None:
    found = ucp.export_hf(GOLDEN_LATER / case, tmp_path / "hf", dtype="float32", verify=True)
    assert found.tensors == EXPORTED[case]


@pytest.mark.parametrize("case", [case for case in LATER if case not in EXPORTED])
def test_no_other_model_is_exported_in_its_place(case: str, tmp_path: Path) -> None:
    with pytest.raises(errors.UcpError):
        ucp.export_hf(GOLDEN_LATER / case, tmp_path / "hf", dtype="float32")
    assert not (tmp_path / "hf").exists()


# ------------------------------------------------ damage


def records(tag: Path, index: Index) -> Iterator[tuple[str, Record]]:
    """Of every object all records, of every tensor those of the first chunk."""
    firsts = {tensor.chunks[0].place for tensor in index.tensors.values()}
    places = firsts | {*index.objects.values()}
    for name in index.file_names:
        file = index.opened(LocalFile(tag / name), name)
        own = [place for place in places if place.file == name]
        for record, _ in file.all_records():
            if any(0 <= record.offset_bytes - one.offset_bytes < one.size_bytes for one in own):
                yield name, record


@pytest.mark.parametrize("case", ["td_dpr_pp2vpp2", "v019_dpr_hybrid_tp2"])
def test_a_flipped_byte_of_any_record_is_found(case: str, tmp_path: Path) -> None:
    """In files of 0.16.1, and in those of 0.19 that have the common tree in them."""
    tag = copied(case, tmp_path / "saved")
    index = read_index(LocalFolder(tag))
    every = [(name, record) for name, record in records(tag, index) if record.size_bytes]
    common = [one for one in every if one[1].name.startswith(COMMON_KEY)]
    flipped = 0
    for name, record in [*every[::9], *common]:
        at = record.offset_bytes + record.size_bytes // 2
        with open(tag / name, "r+b") as file:
            file.seek(at)
            (old,) = file.read(1)
            file.seek(at)
            file.write(bytes([old ^ 0x10]))
            file.flush()
            with contextlib.suppress(errors.UcpError):
                assert not ucp.verify(tag, deep=True), f"{name}: {record.name}"
            file.seek(at)
            file.write(bytes([old]))
        flipped += 1
    assert flipped > 30 and ucp.verify(tag, deep=True)
    assert bool(common) == (COMMON_KEY in index.objects) == ("v019" in case)


def test_states_of_two_layers_that_are_swapped_are_found(tmp_path: Path) -> None:
    """Latent attention's two matrices of a layer have places that sizes alone don't show."""
    tag = copied("v019_dpr_mla_tp2", tmp_path / "saved")
    key = "decoder.layers.self_attention.linear_kv_up_proj.weight"
    swapped_chunks(tag, (key, (1, 0, 0)), (key, (2, 0, 0)))
    with (
        open_checkpoint(tag) as checkpoint,
        pytest.raises(errors.StateMismatchError, match="masters"),
    ):
        for name in checkpoint.file_names:
            checkpoint.check(name)


def test_a_file_in_front_counts_and_none_at_all_is_named(tmp_path: Path) -> None:
    """As in megatron-core: `common.pt` where there is one."""
    tag = copied("v019_dpr_tp2dp2", tmp_path / "saved")
    shutil.copy(GOLDEN / "td_dpr_dp2_bf16" / TAG / "common.pt", tag)
    with open_checkpoint(GOLDEN / "td_dpr_dp2_bf16") as one, pytest.raises(errors.UcpError):
        assert one.manifest.written_on.dp == 2  # another mesh: the buckets are not that run's
        open_checkpoint(tag).__enter__()
    old = copied("td_full_tp2dp2", tmp_path / "old")
    (old / "common.pt").unlink()
    with pytest.raises(errors.NotFoundError, match=r"common\.pt"):
        open_checkpoint(old).__enter__()


# ------------------------------------------------ precision-aware optimizers


@pytest.mark.parametrize("case", ["td_full_moe_ep2", "td_dpr_dp2_bf16"])
def test_files_of_a_precision_aware_optimizer_are_read(case: str, tmp_path: Path) -> None:
    """Megatron-LM writes its masters and moments in fp32, whatever it keeps them in."""
    tag = copied(case, tmp_path / "saved")
    changed_arguments(tag, use_precision_aware_optimizer=True, exp_avg_dtype="torch.bfloat16")
    assert ucp.verify(tag, deep=True) and ucp.diff(tag, GOLDEN / case) == []


def test_what_they_do_not_hold_is_named(tmp_path: Path) -> None:
    tag = copied("plain_bf16_tp2", tmp_path / "saved")
    changed_arguments(tag, use_precision_aware_optimizer=True)

    def without_masters(metadata: Any) -> None:
        masters = "optimizer.state.fp32_param."
        for key in [key for key in metadata.state_dict_metadata if key.startswith(masters)]:
            del metadata.state_dict_metadata[key]
        for index in [one for one in metadata.storage_data if one.fqn.startswith(masters)]:
            del metadata.storage_data[index]

    changed_index(tag, without_masters)
    with pytest.raises(errors.DamagedFileError, match="lost its fp32 masters"):
        open_checkpoint(tag).__enter__()

    def in_blocks(metadata: Any) -> None:
        for key, entry in metadata.state_dict_metadata.items():
            if key.startswith("optimizer.state.exp_avg."):
                entry.properties.dtype = torch.uint8

    whole = copied("td_full_tp2dp2", tmp_path / "blocks")
    changed_index(whole, in_blocks)
    with pytest.raises(errors.UnsupportedError, match="scaled by blocks"):
        open_checkpoint(whole).__enter__()


def test_a_run_of_muon_is_whole_and_gives_its_weights(tmp_path: Path) -> None:
    """Two optimizers in a chain, each with states of its own parameters: a momentum of matrices,
    two moments of the rest. No engine here steps whole matrices: its states stay where they are."""
    folder, said = GOLDEN_LATER / "v019_muon_tp2", "the states of the optimizer muon"
    weights = weights_of("v019_muon_tp2")
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.manifest.keeper == Keeper.WEIGHTS and said in checkpoint.notes[-1]
        assert {spec.name for spec in checkpoint.manifest.params} == {*weights}
        for name, weight in weights.items():
            value = read_state(checkpoint, name, "value")
            assert value.dtype == torch.bfloat16 and torch.equal(value, weight.reshape(-1)), name
    assert ucp.verify(folder, deep=True).ok
    assert ucp.export_hf(folder, tmp_path / "hf").complete
    with pytest.raises(errors.StateMismatchError, match="optimizer"):
        ucp.convert(folder, tmp_path / "dp2" / "global_step3", target=ucp.Target.of("dp=2"))
