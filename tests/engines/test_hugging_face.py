"""Hugging Face folders from checkpoints that real engines wrote, and into real engines on other
meshes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp.errors import ModelMismatchError
from megatron_ucp.formats.deepspeed.target import Target
from pretrain.mcore.experts import Experts
from tests.engines import hf_jobs
from tests.engines.hf_twin import transformers
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Staged
from tests.ranks import RanksFailed
from tests.reshard import twins

pytestmark = pytest.mark.ranks
EXPERTS = Experts(4, ffn=8)
EMBEDDING = {"gpt": "transformer.wte.weight"}


def setup(family: str, tp: int = 1, zero: int = 1, **more: Any) -> Staged:
    """GPT-2 has a key and a value for each head."""
    known: dict[str, Any] = {"groups": 4} if family == "gpt" else {}
    if family in ("mixtral", "qwen3_moe"):
        known |= {"experts": EXPERTS, "sequence_parallel": tp > 1}
    return Staged(family, tp, zero, layers=2, **{**known, **more})


def exported(sources: Sources, tmp_path: Path, world: int, origin: Staged, **options: Any) -> Path:
    folder = sources.get(world, origin, more=0)
    ucp.export_hf(folder, tmp_path / "hf", tag="filled", verify=True, **options)
    return Path(folder)


# (ranks, mesh of the save; ranks, mesh of the load)
PAIRS = [
    ("llama", 2, {"tp": 2, "zero": 1}, 4, {"tp": 1, "zero": 3}),
    ("llama", 4, {"tp": 2, "pp": 2, "zero": 1}, 4, {"tp": 1, "zero": 3}),
    ("qwen2", 4, {"tp": 1, "zero": 3}, 4, {"tp": 2, "pp": 2, "zero": 1}),
    ("qwen3", 4, {"tp": 2, "pp": 2, "zero": 1}, 2, {"tp": 2, "zero": 2}),
    ("gpt", 4, {"tp": 2, "pp": 2, "zero": 1}, 2, {"tp": 2, "zero": 2}),
    ("gpt", 1, {"tp": 1, "zero": 0}, 4, {"tp": 4, "zero": 1}),
    ("mixtral", 4, {"tp": 1, "ep": 2, "zero": 1}, 4, {"tp": 2, "ep": 2, "etp": 1, "zero": 1}),
    ("mixtral", 2, {"tp": 1, "zero": 3}, 4, {"tp": 1, "ep": 4, "zero": 2}),
    ("qwen3_moe", 4, {"tp": 2, "ep": 2, "zero": 1}, 2, {"tp": 1, "pp": 2, "zero": 1}),
]


@pytest.mark.parametrize(("family", "world", "origin", "there", "target"), PAIRS)
def test_out_and_in_on_another_mesh(
    sources: Sources,
    tmp_path: Path,
    family: str,
    world: int,
    origin: dict[str, int],
    there: int,
    target: dict[str, int],
) -> None:
    """Masters are the same bits, and the optimizer begins afresh, also one that had stepped."""
    oracle = exported(sources, tmp_path, world, setup(family, **origin))
    where = setup(family, **target, seed=9)
    found = sources.ranks.run(
        there, hf_jobs.load, where, str(tmp_path / "hf"), str(oracle), trained=1, timeout_s=180
    )
    for rank in found:
        assert not rank["error"], rank["error"]
        assert rank["masters"] == [] and rank["compared"] > 10
        assert rank["states"] == ["fp32"]
        assert any("begin afresh" in note for note in rank["notes"])
    weights = sum(value.nbytes for value in twins.read(tmp_path / "hf").values())
    if (where.tp, where.ep) == (1, 1):  # each byte is read once, and by one rank
        assert sum(rank["read_bytes"] for rank in found) == weights * (1 if where.zero else there)


@pytest.mark.parametrize("stages", [{"pp": 2}, {}])
def test_a_family_and_a_config_name_what_stages_hold(
    sources: Sources, tmp_path: Path, stages: dict[str, int]
) -> None:
    """A pipeline's own names say nothing of the model where there is no manifest."""
    folder = exported(sources, tmp_path, 4 if stages else 2, setup("llama", tp=2, **stages))
    shutil.copytree(folder / "filled", tmp_path / "bare")
    (tmp_path / "bare" / "ucp_manifest.json").unlink()
    known = {"family": "llama", "config": tmp_path / "hf"}
    ucp.export_hf(tmp_path / "bare", tmp_path / "out", verify=True, **known)
    assert twins.same(*map(twins.read, (tmp_path / "out", tmp_path / "hf"))) == []


# (family, mesh of the load on two ranks, its training dtype)
NARROW = [
    ("llama", {"tp": 2, "zero": 1}, "bf16"),
    ("gpt", {"tp": 1, "zero": 3}, "bf16"),
    ("llama", {"tp": 2, "zero": 0}, "bf16"),
    ("gpt", {"tp": 1, "zero": 2}, "fp16"),
    ("mixtral", {"tp": 1, "ep": 2, "zero": 1}, "bf16"),
]


@pytest.mark.parametrize(("family", "target", "dtype"), NARROW)
def test_masters_keep_what_the_training_dtype_can_not(
    sources: Sources, tmp_path: Path, family: str, target: dict[str, int], dtype: str
) -> None:
    oracle = exported(sources, tmp_path, 1, setup(family, zero=1))
    words = twins.read(tmp_path / "hf")[EMBEDDING.get(family, "model.embed_tokens.weight")]
    assert not torch.equal(words, words.bfloat16().float())
    where = setup(family, **target, seed=9, dtype=dtype)
    for rank in sources.ranks.run(
        2, hf_jobs.load, where, str(tmp_path / "hf"), str(oracle), trained=1, timeout_s=120
    ):
        assert not rank["error"] and rank["masters"] == [] and rank["compared"] > 10
        assert rank["states"] == ["fp32"]


@pytest.mark.parametrize("target", [{"tp": 2, "zero": 1}, {"tp": 1, "zero": 3}])
def test_masters_that_weights_can_not_hold(
    sources: Sources, tmp_path: Path, target: dict[str, int]
) -> None:
    """Named on every rank, before weights are infinite; what is infinite itself is kept."""
    oracle = exported(sources, tmp_path, 1, setup("llama", zero=1))
    path = tmp_path / "hf" / "model.safetensors"
    held = twins.read(tmp_path / "hf")
    name, job = "model.layers.1.mlp.up_proj.weight", hf_jobs.load
    where = setup("llama", **target, seed=9, dtype="fp16")
    for value, known in ((7e4, True), (float("inf"), False)):
        held[name][-1, -1] = held["model.norm.weight"][0] = value
        save_file(held, path)
        found = sources.ranks.run(2, job, where, str(tmp_path / "hf"), str(oracle), timeout_s=120)
        for rank in found:
            assert ("too large for float16" in rank["error"]) is known
            assert ("final_layernorm.weight: 1; " in rank["error"]) is known
            assert ("layers.1.mlp.linear_fc1.weight: 1" in rank["error"]) is known


def test_one_changed_bit_is_seen(sources: Sources, tmp_path: Path) -> None:
    """The comparison above would fail on it."""
    oracle = exported(sources, tmp_path, 2, setup("llama", tp=2))
    path = tmp_path / "hf" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    args = setup("llama", zero=1, seed=9), str(tmp_path / "hf"), str(oracle)
    (found,) = sources.ranks.run(1, hf_jobs.load, *args, timeout_s=120)
    assert not found["error"] and len(found["masters"]) == 1


# (family, ranks, mesh of the import, training dtype)
STOCK = [
    ("gpt", 2, {"tp": 2, "zero": 1}, "bf16"),
    ("gpt", 2, {"tp": 1, "zero": 3}, "bf16"),
    ("gpt", 2, {"tp": 1, "zero": 0}, "fp32"),
    ("mixtral", 2, {"tp": 1, "ep": 2, "zero": 1}, "bf16"),
    ("mixtral", 2, {"tp": 1, "zero": 3}, "fp32"),
]


@pytest.mark.parametrize(("family", "world", "target", "dtype"), STOCK)
def test_stock_deepspeed_loads_what_is_imported(
    sources: Sources, tmp_path: Path, family: str, world: int, target: dict[str, int], dtype: str
) -> None:
    """Without optimizer and scheduler, which no Hugging Face folder has."""
    found = _loaded_by_stock(sources, tmp_path, family, world, target, dtype)
    for rank in found:
        assert rank["before"] == rank["compared"] > 20 and rank["after"] == 0
        assert rank["same_groups"] and rank["steps"] == 0
        assert rank["stepped"] == rank["compared"]


def test_stock_deepspeed_forgets_masters_in_bf16_without_zero(
    sources: Sources, tmp_path: Path
) -> None:
    """It loads the weights alone then, and its next step is one from its own masters."""
    for rank in _loaded_by_stock(sources, tmp_path, "gpt", 2, {"tp": 1, "zero": 0}, "bf16"):
        assert rank["after"] == rank["compared"]


def _loaded_by_stock(
    sources: Sources, tmp_path: Path, family: str, world: int, target: dict[str, int], dtype: str
) -> list[dict[str, Any]]:
    oracle = exported(sources, tmp_path, 1, setup(family, zero=1), dtype="bfloat16")
    tp, ep = target["tp"], target.get("ep", 1)
    mesh = ucp.Mesh(tp=tp, ep=ep, dp=world // tp, zero=target["zero"])
    name = "bfloat16" if dtype == "bf16" else "float32"
    native = tmp_path / "native" / "tag"
    ucp.import_hf(tmp_path / "hf", native, target=Target(mesh, dtype=name), latest=True)
    where = setup(family, **target, seed=9, dtype=dtype)
    return sources.ranks.run(
        world, hf_jobs.stock_load, where, str(native), str(oracle), timeout_s=120
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "epsilon": ({"rms_norm_eps": 1e-6}, "norm_epsilon: 1e-06 in config.json, 1e-05 in the model"),
    "base": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rotary_base"),
    "heads": ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}, "heads: 2 in"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act gelu"),
    "kind": ({"model_type": "mistral"}, "the model of another family"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_config_that_is_not_the_engines(sources: Sources, tmp_path: Path, what: str) -> None:
    """Tensors of the same shapes, but another model: refused before anything is written."""
    change, said = WRONG[what]
    oracle = exported(sources, tmp_path, 2, setup("llama", tp=2))
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    args = setup("llama", zero=1, seed=9), str(tmp_path / "hf"), str(oracle)
    (found,) = sources.ranks.run(1, hf_jobs.load, *args, timeout_s=120)
    assert said in found["error"] and found["unchanged"]


# ------------------------------------------------ models of transformers under DeepSpeed

PLAIN = hf_jobs.plain_save


@pytest.mark.parametrize(("world", "zero"), [(2, 1), (4, 2), (4, 3)])
def test_what_zero_to_fp32_gets_out(
    sources: Sources, tmp_path: Path, world: int, zero: int
) -> None:
    """The same names, shapes and bits; what shares its memory is there once."""
    folder = Path(sources.get(world, zero, PLAIN))
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "config", verify=True)
    stock = torch.load(folder / "stock.pt", weights_only=False)
    assert stock.pop("lm_head.weight").shape == stock["model.embed_tokens.weight"].shape
    assert twins.same(twins.read(tmp_path / "out"), stock) == [] and len(stock) > 20


def test_the_weights_alone_where_nobody_gives_a_config(sources: Sources, tmp_path: Path) -> None:
    folder = Path(sources.get(2, 1, PLAIN))
    found = ucp.export_hf(folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "ucp_export.json"} and not found.loadable
    assert "no config.json was found" in found.notes[-1] and found.dtype == "bfloat16"


def test_a_config_of_another_model(sources: Sources, tmp_path: Path) -> None:
    """transformers would leave out the layers that the config does not count."""
    folder = Path(sources.get(2, 1, PLAIN))
    config = json.loads((folder / "config" / "config.json").read_text())
    layers, rows = config["num_hidden_layers"], config["vocab_size"]
    config |= {"num_hidden_layers": layers - 1, "vocab_size": rows + 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelMismatchError) as caught:
        ucp.export_hf(folder, tmp_path / "out", config=tmp_path)
    assert caught.value.expected == f"vocab_size {rows}; num_hidden_layers {layers}"
    assert caught.value.found == f"vocab_size {rows + 1}; num_hidden_layers {layers - 1}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("world", "zero", "there", "target"), [(2, 1, 4, 3), (4, 3, 2, 0)])
def test_in_again_by_the_names_of_the_model(
    sources: Sources, tmp_path: Path, world: int, zero: int, there: int, target: int
) -> None:
    """What was exported in fp32 fills the masters of an engine on another mesh. What earlier
    versions of transformers wrote besides weights is left out."""
    folder = Path(sources.get(world, zero, PLAIN))
    ucp.export_hf(folder, tmp_path / "out", dtype="float32")
    wanted = twins.read(tmp_path / "out")
    more = {"model.layers.0.attn.bias": torch.ones(1, 1, 4, 4)}
    more["model.rotary_emb.inv_freq"] = torch.ones(2)
    save_file({**wanted, **more}, tmp_path / "out" / "model.safetensors")
    for rank in sources.ranks.run(
        there, hf_jobs.plain_load, target, str(tmp_path / "out"), timeout_s=120
    ):
        masters = {name: full for (name, state), full in rank["full"].items() if state == "fp32"}
        assert {*masters} == {*wanted} - {"mark"} and len(masters) == 20
        shaped = {name: full.view(wanted[name].shape) for name, full in masters.items()}
        assert twins.same(shaped, {name: wanted[name] for name in masters}) == []
        assert any("begin afresh" in note for note in rank["notes"])


def test_a_tied_parameter_may_lie_there_twice(sources: Sources, tmp_path: Path) -> None:
    """Under both its names, for a model without a family; `diff` takes it so too. Two tensors are
    another model."""
    folder, path = Path(sources.get(2, 1, PLAIN)), tmp_path / "out" / "model.safetensors"
    ucp.export_hf(folder, tmp_path / "out", dtype="float32")
    held = load_file(path)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, path)
    assert ucp.diff(folder, tmp_path / "out") == []
    (rank,) = sources.ranks.run(1, hf_jobs.plain_load, 0, str(tmp_path / "out"), timeout_s=120)
    masters = {name: full for (name, state), full in rank["full"].items() if state == "fp32"}
    shaped = {name: full.view(held[name].shape) for name, full in masters.items()}
    assert twins.same(shaped, {name: held[name] for name in masters}) == []
    assert len(masters) == 20
    held["lm_head.weight"].view(torch.uint8)[0, 0] ^= 1
    save_file(held, path)
    with pytest.raises(RanksFailed, match="two in the folder"):
        sources.ranks.run(1, hf_jobs.plain_load, 0, str(tmp_path / "out"), timeout_s=120)


def test_what_is_no_weight_is_left_out(sources: Sources, tmp_path: Path) -> None:
    """And nothing else: a bias of the same name has another shape."""
    folder = Path(sources.get(2, 1, PLAIN))
    ucp.export_hf(folder, tmp_path / "out", dtype="float32")
    wanted, name = twins.read(tmp_path / "out"), "model.layers.0.attn.bias"
    for shape, found in (((1, 1, 4, 4), []), ((4,), [name])):
        more = {name: torch.ones(shape)}
        save_file({**wanted, **more}, tmp_path / "out" / "model.safetensors")
        assert [d.parameter for d in ucp.diff(folder, tmp_path / "out")] == found


def test_settings_that_no_shape_shows_are_named(sources: Sources, tmp_path: Path) -> None:
    """A folder of tensors of the same shapes, whose model computes something else."""
    folder = Path(sources.get(2, 1, PLAIN))
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "config")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for change, words in (
        ({}, []),
        ({"rms_norm_eps": 0.5, **rope}, ["rms_norm_eps 0.5 in", "rope_theta 500000.0 in"]),
    ):
        path.write_text(json.dumps({**config, **change}))
        found = otherwise(sources, tmp_path / "out")
        assert len(found) == bool(words) and all(word in found[0] for word in words)
    # so does a save of a model without a family
    assert otherwise(sources, folder) == []
    (said,) = otherwise(sources, folder, num_attention_heads=8)
    assert said.endswith(": num_attention_heads 4 in the checkpoint, 8 in the model")


def otherwise(sources: Sources, folder: Path, **settings: Any) -> list[str]:
    """What a load says of settings of which no shape knows."""
    (rank,) = sources.ranks.run(1, hf_jobs.plain_load, 0, str(folder), timeout_s=120, **settings)
    return [note for note in rank["notes"] if "computes something else" in note]


def test_transformers_computes_what_was_trained(sources: Sources, tmp_path: Path) -> None:
    """Of the fp32 masters, loaded by transformers in a process of its own."""
    folder = Path(sources.get(2, 1, PLAIN))
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "config")
    tokens = torch.arange(8).view(1, 8)
    stock = torch.load(folder / "stock.pt", weights_only=False)
    (tmp_path / "stock").mkdir()
    kept = {n: t.contiguous() for n, t in stock.items() if n not in ("lm_head.weight", "mark")}
    save_file(kept, tmp_path / "stock" / "model.safetensors", metadata={"format": "pt"})
    config = (tmp_path / "out" / "config.json").read_text()
    (tmp_path / "stock" / "config.json").write_text(config)
    asks = [{"folder": str(tmp_path / name), "tokens": tokens} for name in ("out", "stock")]
    ours, theirs = (found["logits"] for found in transformers(asks))
    assert torch.equal(ours, theirs) and float(ours.abs().max()) > 0.01


# ------------------------------------------------ from memory

LIVE = [
    ("llama", 2, {"tp": 2, "zero": 1}, 4, {"tp": 2, "zero": 3}),
    ("gpt", 4, {"tp": 2, "pp": 2, "zero": 1}, 4, {"tp": 2, "pp": 2, "zero": 1}),
    ("gpt", 4, {"tp": 2, "pp": 2, "zero": 1}, 1, {"tp": 1, "zero": 0}),
    ("mixtral", 4, {"tp": 1, "ep": 2, "zero": 1}, 4, {"tp": 1, "ep": 2, "zero": 1}),
]


@pytest.mark.parametrize(("family", "world", "origin", "there", "target"), LIVE)
def test_from_memory_as_from_files(
    sources: Sources,
    tmp_path: Path,
    family: str,
    world: int,
    origin: dict[str, int],
    there: int,
    target: dict[str, int],
) -> None:
    """The same bytes, of which each rank writes a share; refusals leave nothing."""
    folder = sources.get(world, setup(family, **origin), more=0)
    ucp.export_hf(folder, tmp_path / "files", tag="filled", max_shard_size=3000)
    out = tmp_path / "ranks" / "memory"
    found = sources.ranks.run(
        there,
        hf_jobs.live_export,
        setup(family, **target, seed=9),
        folder,
        "filled",
        str(out),
        timeout_s=180,
    )
    ours, theirs = (
        {path.name: path.read_bytes() for path in one.iterdir()}
        for one in (out, tmp_path / "files")
    )
    assert ours == theirs and len(ours) > 5
    weights = sum(value.nbytes for value in twins.read(out).values())
    assert sum(rank["written"] for rank in found) == weights
    assert all(rank["written"] > 0 for rank in found)
    for rank in found:
        *usage, full, overflow = rank["errors"]
        assert full.startswith("SaveError: ") and "memory_full.saving/model" in full
        assert "No space left on device" in full
        assert usage == ["UsageError"] * 3 and overflow.startswith("InexactError: larger values")
    assert found[0]["left"] == ["memory"]  # rank 0 takes away what is left


@pytest.mark.parametrize("target", [{"tp": 2, "zero": 1}, {"tp": 1, "zero": 3}])
def test_one_fate_of_an_export_from_memory(
    sources: Sources, tmp_path: Path, target: dict[str, int]
) -> None:
    """Whatever goes wrong on one rank, nobody waits for it, and nothing is left. The whole plan is
    proved before a byte is written, and what each rank wrote is on disk before the folder has its
    name."""
    out = tmp_path / "ranks" / "memory"
    out.parent.mkdir()
    args = setup("llama", **target), str(out)
    found = sources.ranks.run(2, hf_jobs.live_failures, *args, timeout_s=120)
    assert "RankError: another rank failed" in found[0]["unread"]
    assert found[1]["unread"] == "RuntimeError: unreadable"
    for rank in found:
        what, written = rank["hole"]
        assert "PlanError: an element of the target has no source" in what and written == []
    assert found[0]["left"] == []
    (named,) = found[0]["named"]
    assert any(rank["written"] for rank in found[1:])
    for rank in found:
        assert rank["good"] == "" and {*rank["written"]} <= {*rank["synced"]}
        assert all(rank["synced"][name] < named for name in rank["written"])
