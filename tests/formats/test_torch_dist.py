"""Megatron's distributed checkpoints, as stock Megatron-LM wrote them, are read bit for bit: what
each must hold comes from torch's own reader."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.core.layout import Chunks, Shard, ShardNC
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.families import families, find_family, megatron_deepspeed
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.megatron.distcp import ArchivePlace, Chunk, StoredTensor
from megatron_ucp.formats.megatron.index import _of_tensors
from megatron_ucp.formats.megatron.names import key_of, layout_of, read_key, second_matrix
from megatron_ucp.formats.megatron.params import stored_params
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state
from tests.formats.megatron_files import GOLDEN, NAMED, TAG, by_torch, split
from tests.places import Place

Found = dict[tuple[str, str], torch.Tensor]


def expected(case: str) -> Found:
    return {
        (name, state): values.reshape(-1)
        for name, state, values in split(by_torch(GOLDEN / case / TAG))
        if state != "weight"
    }


def differences(checkpoint: Checkpoint, want: Found) -> list[tuple[str, str]]:
    """The (parameter, state) pairs that are not what torch's reader gives; all must be there."""
    manifest = checkpoint.manifest
    found = {(s.name, state) for s in manifest.params for state in manifest.states_of(s.name)}
    assert found == set(want)
    out: list[tuple[str, str]] = []
    for name, state in sorted(found):
        have = read_state(checkpoint, name, state)
        assert have.dtype == want[name, state].dtype and have.numel() == want[name, state].numel()
        if not torch.equal(have.view(torch.uint8), want[name, state].view(torch.uint8)):
            out.append((name, state))
    return out


@pytest.mark.parametrize("case", NAMED)
def test_every_state_is_read_as_torch_reads_it(case: str, place: Place) -> None:
    with open_checkpoint(place(GOLDEN / case)) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)
        assert differences(checkpoint, expected(case)) == []


def test_the_comparison_finds_two_layers_that_are_swapped(place: Place) -> None:
    want = expected("td_full_tp2dp2")
    one, other = (f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (1, 2))
    want[one, "exp_avg"], want[other, "exp_avg"] = want[other, "exp_avg"], want[one, "exp_avg"]
    with open_checkpoint(place(GOLDEN / "td_full_tp2dp2")) as checkpoint:
        assert differences(checkpoint, want) == [(one, "exp_avg"), (other, "exp_avg")]


def test_parameters_shapes_groups_and_steps(place: Place) -> None:
    with open_checkpoint(place(GOLDEN / "td_full_moe_ep2" / TAG)) as checkpoint:
        manifest = checkpoint.manifest
    assert (manifest.keeper, str(manifest.mesh)) == ("torch_dist", "tp=1,pp=1,dp=1,zero=0")
    assert manifest.run["saved_on"] == "tp=1,pp=1,ep=2,dp=2,zero=0"
    assert str(manifest.written_on) == "tp=1,pp=1,ep=2,dp=2,zero=0"
    expert = "decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight"
    spec = manifest.by_name[expert]
    assert (spec.shape, spec.expert, spec.dtype) == ((128, 32), (2, 4), "float32")
    assert isinstance(spec.layout, Chunks) and len(spec.layout.held) == 2, "gate and up"
    decay = {
        name: (
            manifest.group_of(name)["weight_decay"],
            manifest.groups[manifest.group_number(name) or 0].marks["megatron"],
        )
        for name in manifest.by_name
    }
    assert decay[expert][0] == 0.1 and decay[expert][1]["is_expert_parallel"] is True
    assert decay["decoder.layers.0.input_layernorm.weight"][0] == 0.0
    assert decay["decoder.layers.0.mlp.router.weight"][0] == 0.1
    assert decay["output_layer.weight"][1] == {
        **{"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False},
        **{"max_lr": 0.003, "min_lr": 0.0001, "default_config": True},
    }
    assert all(manifest.scalars_of(name) == {"step": 3.0} for name in manifest.by_name)
    assert {group.optimizer for group in manifest.groups} == {"torch.AdamW"}


def test_counters_scheduler_and_arguments(place: Place) -> None:
    with open_checkpoint(place(GOLDEN / "td_full_tp2dp2")) as checkpoint:
        extras = checkpoint.extras
    assert extras.counters == {"global_steps": 3, "global_samples": 12, "skipped_steps": 0}
    assert extras.scheduler is not None
    assert (extras.scheduler["num_steps"], extras.scheduler["lr_decay_style"]) == (12, "cosine")
    args = extras.client_state["args"]
    assert len(args) == 658 and args["iteration"] == 0, "the one that counts is beside them"
    assert args["model_type"] == 1 and args["params_dtype"] == "torch.float32", "plain values"
    assert extras.clip_grad == 1.0
    assert "decoder.layers.3.mlp.linear_fc2._extra_state" in extras.stateless


def test_a_tag_is_found_as_megatron_names_it(tmp_path: Path) -> None:
    with open_checkpoint(GOLDEN / "td_full_tp2dp2", tag=TAG) as checkpoint:
        assert str(checkpoint.folder) == str(GOLDEN / "td_full_tp2dp2" / TAG)


OF_PROGRAM = {family.name for family in megatron_deepspeed.FAMILIES}  # never in this format


@pytest.mark.parametrize("family", sorted({*families()} - OF_PROGRAM))
def test_megatrons_own_cuts_are_those_of_the_families(family: str) -> None:
    """The table of names in formats/megatron and the families' tables say the same."""
    sizes = find_family(family).sizes(**SIZES[family])
    table = find_family(family).table(sizes)
    for name, row in table.items():
        behind = table.get(second_matrix(name))
        # modules of two kinds have the down projections of latent attention whole, or cut
        known = None if "_down_proj" in name else row.layout
        assert layout_of(name, row.shape, behind and behind.shape[-1]) == known, name


def test_the_first_matrix_of_an_mlp_is_gated_where_it_has_twice_the_rows() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert layout_of(name, (12, 8), 12) == Shard("tp", 0)
    assert layout_of(name, (24, 8), 12) == ShardNC("tp", 0, (12, 12))
    assert layout_of(name, (36, 8), 12) is None and layout_of(name, (24, 8), None) is None


_PLAIN = dict(layers=2, hidden=8, heads=4, groups=2, head_dim=2, ffn=12, vocab=16, true_vocab=16)
_LLAMA = {**_PLAIN, "gated": True, "biases": False, "norm_biases": False}
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {**_PLAIN, "positions": 8},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": {**_LLAMA, "qkv_biases": True},
    "qwen3": {**_LLAMA, "qk_norms": True},
    "mixtral": {**_LLAMA, "experts": 4, "shared_ffn": 12, "every": 2},
    "qwen3_moe": {**_LLAMA, "qk_norms": True, "experts": 4, "every": 2},
    "gpt_oss": {**_LLAMA, "biases": True, "qkv_biases": True, "experts": 4},
    "deepseek_v3": {
        **{**_LLAMA, "experts": 4, "shared_ffn": 12, "leading": 1, "predictions": 1},
        **{"query_rank": 6, "rank": 4, "plain": 2, "rotary": 2, "value": 2},
    },
}


def _kept(key: str, *shape: int) -> StoredTensor:
    start = (0,) * len(shape)
    return StoredTensor(key, "float32", shape, (Chunk(start, shape, ArchivePlace("file", 0, 1)),))


@pytest.mark.parametrize("missing", [1, 3])
def test_an_expert_with_a_key_of_its_own_that_is_missing(missing: int) -> None:
    """The last one is missed by its router."""
    prefix = "decoder.layers.0.mlp."
    keys = [_kept(f"{prefix}router.weight", 4, 8)]
    keys += [_kept(f"{prefix}experts.experts.{n}.linear_fc2.weight", 8, 8) for n in range(4)]
    tensors = dict(_of_tensors(keys, {}).tensors)
    found = stored_params(tensors, "file")
    assert [param.expert for param in found.values()] == [None, *((n, 4) for n in range(4))]
    del tensors[f"{prefix}experts.experts.{missing}.linear_fc2.weight"]
    with pytest.raises(DamagedFileError, match=rf"local_experts\.{missing}\n.*0 to 3"):
        stored_params(tensors, "file")


@pytest.mark.parametrize("stacked", [True, False])
def test_keys_and_names_are_inverse(stacked: bool) -> None:
    for family, sizes in SIZES.items():
        for name in find_family(family).table(find_family(family).sizes(**sizes)):
            at = key_of(name, stacked)
            assert read_key(at.key).canonical(at.index)[0] == name


def test_norms_before_a_layer_of_one_matrix_are_read_under_its_name() -> None:
    """As Megatron-LM stores them where a layer has a linear in the place of attention or MLP."""
    for module, norm in (("self_attention", "input"), ("mlp", "pre_mlp")):
        key, name = f"decoder.layers.1.{module}.layer_norm_weight", f"{norm}_layernorm.weight"
        assert read_key(key).canonical(()) == (f"decoder.layers.1.{name}", None)
        usual = key_of(f"decoder.layers.1.{name}", False).key
        assert usual != key and read_key(usual) == read_key(key), "the other key is written"
