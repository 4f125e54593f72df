"""Folders that Megatron-DeepSpeed's own program wrote, unpatched: through every command, and into
engines of other meshes.

What each must hold its own ranks said (`tests/formats/golden/make_megatron_deepspeed`). The engines
here have its names and shapes; the program itself is in `tests/stock`.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import FILE_NAME, RECORDED
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.families.megatron_deepspeed import is_of_program
from megatron_ucp.formats.deepspeed.megatron_deepspeed import nested
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state
from tests.engines import fork_jobs
from tests.engines.fork_jobs import Fork
from tests.formats.golden.megatron_deepspeed_folders import FOLDER, FOLDERS
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
GPT = Fork(1, "split", said=True, hidden=16, ffn=64, vocab=128, positions=16, optimizer="Adam")
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_tp2pp2_z1": {},
    "gpt_pp2_z1_bf16": {},
    "llama_tp2_z1": {"swiglu": True, "tied": False, "biases": False, "rms": True, "ffn": 0},
    "gpt_nopipe_z3_dp2": {"hidden": 32, "ffn": 128},
    "rope_nopipe_tp2_z2": {"positions": 0},
}
QKV = "self_attention.query_key_value"


def oracle(name: str) -> dict[tuple[str, str], torch.Tensor]:
    with numpy.load(FOLDER / f"{name}.npz") as arrays:
        found = {tuple(key.split("|")): torch.from_numpy(arrays[key]) for key in arrays.files}
    assert len(found) > 30
    return found  # type: ignore[return-value]


@pytest.fixture(params=FOLDERS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER / request.param, tmp_path / request.param))


def differing(path: Path, want: dict[tuple[str, str], torch.Tensor]) -> list[tuple[str, str]]:
    with open_checkpoint(path) as found:
        assert {one.name for one in found.manifest.params if one.elems} == {
            name for name, _ in want
        }
        return [
            (name, state)
            for (name, state), one in want.items()
            if not torch.equal(read_state(found, name, state), one.reshape(-1))
        ]


def said(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    return out + err


def test_every_state_is_read(golden: Path) -> None:
    want = oracle(golden.name)
    assert differing(golden, want) == []
    key = next(key for key in want if want[key].numel())
    want[key] = want[key] + 1
    assert differing(golden, want) == [key], "a planted value"


def test_every_command_takes_it(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word about families or rules."""
    made, out = FOLDERS[golden.name], golden.parent / "out"
    assert f"tp={made.mesh.tp},pp={made.mesh.pp}" in said(capsys, "inspect", golden)
    assert "global_step3" in said(capsys, "ls", golden)
    assert "no damage found" in said(capsys, "verify", golden, "--deep")
    assert "dp=2" in said(capsys, "plan", golden, "--mesh", "tp=4,dp=2,zero=1")
    mesh = "--mesh", "tp=4,dp=2,zero=1", "--allow", "per_rank"
    said(capsys, "convert", golden, out / "global_step3", *mesh)
    said(capsys, "diff", golden, out / "global_step3")
    said(capsys, "convert", golden, golden.parent / "universal", "--to", "universal")
    said(capsys, "diff", golden, golden.parent / "universal")
    want = oracle(golden.name)
    assert differing(out / "global_step3", want) == differing(golden.parent / "universal", want)
    assert differing(out / "global_step3", want) == []
    damaged = max(golden.glob("global_step3/*optim*"), key=lambda file: file.stat().st_size)
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(b"\xff" * 8)
    said(capsys, "verify", golden, "--deep", code=1)


def older(golden: Path, out: Path, **changes: Any) -> Path:
    """As code of before #441 would have saved it: nothing in its arguments says the order."""
    shutil.copytree(golden, out)
    for file in out.rglob("*model_states.pt"):
        tree = torch.load(file, weights_only=False)
        if args := tree.get("args"):
            for name in [name for name in vars(args) if "fpdt" in name]:
                delattr(args, name)
            vars(args).update(changes)
            torch.save(tree, file)
    return out


def test_an_order_that_nobody_says_is_not_guessed(tmp_path: Path) -> None:
    """At tp=1 parameters are whole, and the rows of query_key_value in one order or the other."""
    folder = older(FOLDER / "gpt_nopipe_z3_dp2", tmp_path / "old")
    with pytest.raises(UsageError, match="does not say its family"):
        ucp.export_hf(folder, tmp_path / "hf")
    with pytest.raises(ucp.UcpError, match="declared"):
        ucp.convert(folder, tmp_path / "two", target=Mesh(tp=2, dp=1, zero=1), allow={"per_rank"})
    assert sorted(one.name for one in tmp_path.iterdir()) == ["old"]
    ucp.export_hf(folder, tmp_path / "hf", rules="megatron_deepspeed_interleaved")
    ucp.export_hf(FOLDER / folder.name.replace("old", "gpt_nopipe_z3_dp2"), tmp_path / "new")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "new"))
    apart = {name for name in one if not torch.equal(one[name], other[name])}
    assert {name.split(".", 3)[-1] for name in apart} == {"attn.c_attn.weight", "attn.c_attn.bias"}


def test_what_is_whole_at_tp_1_is_cut_in_a_conversion(tmp_path: Path) -> None:
    """Of a folder whose manifest an earlier version wrote, which knew no layouts there."""
    first = tmp_path / "one" / "step"
    ucp.convert(FOLDER / "gpt_nopipe_z3_dp2", first, target=Mesh(tp=1, dp=1, zero=1))
    file = first / FILE_NAME
    found = from_json(file.read_text(), str(file))
    params = tuple(replace(spec, layout=Replicate()) for spec in found.params)
    run = {key: value for key, value in found.run.items() if key != RECORDED}
    file.write_text(to_json(replace(found, params=params, family="", run=run)))
    ucp.convert(first, tmp_path / "two", target=Mesh(tp=2, dp=1, zero=1), allow={"per_rank"})
    module = torch.load(tmp_path / "two/mp_rank_00_model_states.pt", weights_only=False)["module"]
    layer = module["language_model"]["encoder"]
    assert layer["layers.0.mlp.dense_h_to_4h.weight"].shape == (64, 32)
    assert differing(tmp_path / "two", oracle("gpt_nopipe_z3_dp2")) == []


def test_ranks_of_a_conversion_do_not_draw_the_same_unasked(tmp_path: Path) -> None:
    """The program seeds anew only where its degrees are others than the files'."""
    folder = FOLDER / "rope_nopipe_tp2_z2"
    for mesh in (Mesh(tp=4, dp=1, zero=1), Mesh(tp=2, dp=1, zero=1)):
        with pytest.raises(ucp.UcpError, match="differ from rank to rank"):
            ucp.convert(folder, tmp_path / "out", target=mesh)
    ucp.convert(folder, tmp_path / "one", target=Mesh(tp=1, dp=1, zero=1))


def test_flags_of_other_tokenizers_and_of_nobody(tmp_path: Path) -> None:
    """A vocabulary that only the NullTokenizer reads; numbers that no model has; values that are
    none."""
    said = {"tokenizer_type": "GPT2BPETokenizer", "ds_sequence_parallel_fpdt": False}
    folder = older(FOLDER / "gpt_nopipe_z3_dp2", tmp_path / "other", vocab_size=100, **said)
    ucp.export_hf(folder, tmp_path / "hf")
    words = load_file(tmp_path / "hf/model.safetensors")["transformer.wte.weight"]
    assert words.shape[0] == 128, "what the files say of it"
    for number, layers in enumerate((10**12, torch.tensor(2))):
        said = {"num_layers": layers, "ds_sequence_parallel_fpdt": False}
        odd = older(FOLDER / "gpt_nopipe_z3_dp2", tmp_path / f"odd{number}", **said)
        assert "step" in str(ucp.inspect(odd)) and ucp.verify(odd).findings == ()
        ucp.convert(odd, tmp_path / f"out{number}", target=Mesh(tp=1, dp=1, zero=1))


def test_a_model_with_a_decoder_of_its_own_is_none_of_the_programs() -> None:
    """As megatron-core's LLaVA has."""
    names = ["language_model.embedding.word_embeddings.weight", "language_model.decoder.a.weight"]
    assert not is_of_program(names) and nested(dict.fromkeys(names)) == dict.fromkeys(names)
    ours = [names[0], "language_model.encoder.final_layernorm.weight"]
    assert is_of_program(ours) and list(nested(dict.fromkeys(ours))) == ["language_model"]


def test_a_model_with_other_parameters_is_read_as_before(tmp_path: Path) -> None:
    """Of BERT, say, whose arguments decide an order too."""
    folder = Path(shutil.copytree(FOLDER / "gpt_nopipe_z3_dp2", tmp_path / "bert"))
    name, other = "language_model.encoder.final_layernorm.bias", "lm_head.bias"
    for file in folder.rglob("*model_states.pt"):
        tree = torch.load(file, weights_only=False)
        for shapes in tree["param_shapes"]:
            items = [(other if key == name else key, value) for key, value in shapes.items()]
            shapes.clear()
            shapes.update(items)
        torch.save(tree, file)
    with open_checkpoint(folder) as found:
        assert other in found.manifest.by_name and name not in found.manifest.by_name


TARGETS = [
    (4, {"tp": 4, "zero": 1}),
    (2, {"tp": 1, "pp": 2, "zero": 1}),
    (2, {"tp": 1, "zero": 3}),
    (1, {"tp": 1, "zero": 0}),
]


@pytest.mark.parametrize("name", FOLDERS)
def test_engines_of_other_meshes_take_it(ranks: RankPool, name: str) -> None:
    want = oracle(name)
    for world, mesh in TARGETS:
        setup = Fork(**{**vars(GPT), **SHAPES[name], **mesh})
        found = ranks.run(
            world,
            fork_jobs.resume,
            setup,
            str(FOLDER / name),
            "megatron_deepspeed_split" + ("_swiglu" if setup.swiglu else ""),
            tag=None,
            schedule=False,  # the program's is its own class
            hyper="config",  # the engine has one group, the program two
            timeout_s=120,
        )[0]
        assert found["error"] == "" and found["iteration"] == 3
        state = {key: one for key, one in found["state"].items() if key[1] != "weights"}
        state = {key: one for key, one in state.items() if one.numel()}
        assert state.keys() == want.keys() and len(state) > 30
        assert [key for key in want if not torch.equal(state[key], want[key])] == []


def test_an_engine_of_the_other_order_is_refused(ranks: RankPool) -> None:
    setup = Fork(**{**vars(GPT), "order": "interleaved", "tp": 2})
    job = fork_jobs.resume, setup, str(FOLDER / "gpt_tp2pp2_z1"), "megatron_deepspeed_interleaved"
    found = ranks.run(2, *job, tag=None, hyper="config", timeout_s=120)
    assert all("another order" in one["error"] for one in found) and found[0]["unchanged"]


# ------------------------------------------------ Hugging Face


@pytest.mark.parametrize("name", ["gpt_tp2pp2_z1", "gpt_pp2_z1_bf16", "gpt_nopipe_z3_dp2"])
def test_a_gpt_is_exported_under_released_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """c_attn has the queries of all heads, their keys, their values: as the program has them since
    December 2024, but transposed."""
    said(capsys, "export-hf", FOLDER / name, tmp_path / "hf", "--dtype", "float32")
    have, want = load_file(tmp_path / "hf/model.safetensors"), oracle(name)
    layer, number = "language_model.encoder.layers.1.", "transformer.h.1."
    for theirs, ours in {
        f"{number}attn.c_attn.weight": f"{layer}{QKV}.weight",
        f"{number}attn.c_proj.weight": f"{layer}self_attention.dense.weight",
        f"{number}mlp.c_fc.weight": f"{layer}mlp.dense_h_to_4h.weight",
        f"{number}mlp.c_proj.weight": f"{layer}mlp.dense_4h_to_h.weight",
    }.items():
        assert torch.equal(have[theirs], want[ours, "fp32"].T)
    for theirs, ours in {
        f"{number}ln_2.bias": f"{layer}post_attention_layernorm.bias",
        f"{number}attn.c_attn.bias": f"{layer}{QKV}.bias",
        "transformer.ln_f.weight": "language_model.encoder.final_layernorm.weight",
        "transformer.wpe.weight": "language_model.embedding.position_embeddings.weight",
        "transformer.wte.weight": "language_model.embedding.word_embeddings.weight",
    }.items():
        assert torch.equal(have[theirs], want[ours, "fp32"])
    assert len(have) == 28
    config = json.loads((tmp_path / "hf/config.json").read_text())
    names = ("n_head", "vocab_size", "activation_function")
    assert [config[name] for name in names] == [4, 128, "gelu"]


def test_what_no_class_of_transformers_computes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say its family"):
        ucp.export_hf(FOLDER / "llama_tp2_z1", tmp_path / "hf")  # learned positions in a LLaMA
    with pytest.raises(UsageError, match="cosines of the rotary"):
        ucp.export_hf(FOLDER / "rope_nopipe_tp2_z2", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("order", ["split", "interleaved"])
def test_a_llama_is_imported_and_exported_again(tmp_path: Path, order: str) -> None:
    """In both orders of the rows; 2 key-value groups of 4 heads where they are by head, which the
    code with thirds can't train."""
    import transformers

    torch.manual_seed(1)
    groups = 2 if order == "interleaved" else 4
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=groups,
        num_hidden_layers=2,
        intermediate_size=32,
        vocab_size=30,
        max_position_embeddings=16,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    family = f"megatron_deepspeed_{order}_llama"
    mesh = Mesh(tp=2, pp=2, dp=1, zero=1)
    ucp.import_hf(
        tmp_path / "hf", tmp_path / "run/step0", mesh=mesh, family=family, padded_vocab=32
    )
    with open_checkpoint(tmp_path / "run/step0") as found:
        rows = read_state(found, f"language_model.encoder.layers.1.{QKV}.weight", "fp32")
        assert found.extras.client_state["checkpoint_version"] == 3.0
    given = load_file(tmp_path / "hf/model.safetensors")
    q, k, v = (given[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    by_group = torch.cat(
        [torch.cat(one) for one in zip(*(x.chunk(groups) for x in (q, k, v)), strict=True)]
    )
    want = torch.cat([q, k, v]) if order == "split" else by_group
    assert torch.equal(rows.view(-1, 16), want)
    ucp.export_hf(tmp_path / "run/step0", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == given.keys() and all(torch.equal(again[n], given[n]) for n in given)


def test_megatron_lm_has_other_names(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="other names") as refused:
        ucp.convert(FOLDER / "gpt_tp2pp2_z1", tmp_path / "iter_0000003", to="torch_dist")
    assert "export-hf" in str(refused.value) and not [*tmp_path.iterdir()]


def test_tensor_parallelism_must_divide_the_heads(tmp_path: Path) -> None:
    """Shapes alone do not show them: the saved arguments do."""
    with pytest.raises(ucp.UcpError, match="attention heads"):
        ucp.convert(FOLDER / "gpt_tp2pp2_z1", tmp_path / "x", target=Mesh(tp=8, dp=1, zero=1))
