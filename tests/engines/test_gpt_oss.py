"""Models like gpt-oss: from megatron-core's own stack to Hugging Face and back, to the bit, and
with the logits of transformers in fp32."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatron_ucp as ucp
from megatron_ucp.errors import ModelMismatchError, UnsupportedError
from tests.engines import family_jobs
from tests.engines.any_models import AnyModel
from tests.engines.family_jobs import GPT_OSS
from tests.engines.hf_twin import transformers
from tests.engines.test_deepseek import EQUAL, TOKENS, changed, comes_out_again, difference
from tests.ranks import RankPool
from tests.reshard import twins

pytestmark = pytest.mark.ranks
STACKS = "model.layers.1.mlp.experts."
Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def change(folder: Path, out: Path, fault: Change) -> Path:
    """A copy of a folder with other tensors, or another config."""
    config = json.loads((folder / "config.json").read_text())
    changed(folder, out, lambda held: fault(held, config))
    (out / "config.json").write_text(json.dumps(config))
    return out


def swap_experts(held: dict[str, torch.Tensor], _: Any) -> None:
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        held[STACKS + name] = held[STACKS + name][[1, 0, 2, 3]]


def gate_above_up(held: dict[str, torch.Tensor], _: Any) -> None:
    rows = held[f"{STACKS}gate_up_proj"]
    held[f"{STACKS}gate_up_proj"] = torch.cat([rows[..., ::2], rows[..., 1::2]], -1)


def not_transposed(held: dict[str, torch.Tensor], _: Any) -> None:
    down = held[f"{STACKS}down_proj"]
    held[f"{STACKS}down_proj"] = down.transpose(1, 2).reshape(down.shape)


def no_sinks(held: dict[str, torch.Tensor], _: Any) -> None:
    held["model.layers.1.self_attn.sinks"] *= 0


def no_windows(_: Any, config: dict[str, Any]) -> None:
    config["layer_types"] = ["full_attention"] * 4


FAULTS: dict[str, Change] = {
    "swapped experts": swap_experts,
    "gate above up": gate_above_up,
    "not transposed": not_transposed,
    "no sinks": no_sinks,
    "no windows": no_windows,
    "another limit": lambda _, config: config.update(swiglu_limit=7.0),
}


@pytest.fixture(scope="module")
def computed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each kind its folders, and what both sides compute; of a fault what transformers does."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    found: dict[str, Any] = {}
    requests: dict[str, Path] = {}
    for kind in GPT_OSS:
        # where one rank has all experts megatron-core's add their biases in place, which torch
        # refuses
        ours, _ = ranks.run(
            2, family_jobs.save, AnyModel(kind=kind, ep=2), str(folder / kind), TOKENS
        )
        ucp.export_hf(folder / kind, folder / f"{kind} hf", verify=True)
        requests[kind] = folder / f"{kind} hf"
        found[kind] = {"native": folder / kind, "hf": requests[kind], "ours": ours}
    for name, fault in FAULTS.items():
        requests[name] = change(requests["gpt-oss"], folder / name, fault)
    asked = [
        {"folder": str(out), "tokens": TOKENS, "dtype": "float32", "save": f"{out} again"}
        for out in requests.values()
    ]
    for name, said in zip(requests, transformers(asked), strict=True):
        found.setdefault(name, {})["theirs"] = said["logits"]
    return found


@pytest.mark.parametrize("kind", GPT_OSS)
def test_transformers_computes_the_same(computed: dict[str, Any], kind: str) -> None:
    ours, theirs = computed[kind]["ours"], computed[kind]["theirs"]
    assert float(ours.abs().max()) > 1 and difference(ours, theirs) < EQUAL


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(computed: dict[str, Any], fault: str) -> None:
    assert difference(computed["gpt-oss"]["ours"], computed[fault]["theirs"]) > 10 * EQUAL


@pytest.mark.parametrize("kind", GPT_OSS)
def test_the_folder_is_the_one_that_transformers_writes(
    computed: dict[str, Any], kind: str
) -> None:
    folder = computed[kind]["hf"]
    assert twins.same(twins.read(folder), twins.read(Path(f"{folder} again"))) == []
    assert ucp.diff(computed[kind]["native"], f"{folder} again") == []


# kind; tp, pp, ep of what is loaded
LOADS = [
    ("gpt-oss", (2, 1, 2)),
    ("gpt-oss", (1, 2, 2)),
    ("gpt-oss", (1, 1, 4)),
    ("yarn, other windows", (2, 2, 2)),
]


@pytest.mark.parametrize(("kind", "mesh"), LOADS)
def test_in_on_another_mesh_and_out_again(
    ranks: RankPool, computed: dict[str, Any], tmp_path: Path, kind: str, mesh: Any
) -> None:
    tp, pp, ep = mesh
    setup = AnyModel(kind=kind, tp=tp, pp=pp, ep=ep, etp=1, seed=3)
    comes_out_again(ranks, setup, computed[kind]["hf"], tmp_path)


def test_what_is_loaded_computes_the_same(
    ranks: RankPool, computed: dict[str, Any], tmp_path: Path
) -> None:
    for kind in GPT_OSS:
        args = AnyModel(kind=kind, ep=2, seed=3), str(computed[kind]["hf"])
        found, _ = ranks.run(2, family_jobs.load, *args, str(tmp_path / kind), TOKENS)
        assert torch.equal(found, computed[kind]["ours"])


def test_from_the_files_of_stock_megatron(computed: dict[str, Any], tmp_path: Path) -> None:
    """They say no family: the config does."""
    hf = computed["gpt-oss"]["hf"]
    ucp.export_hf(computed["gpt-oss"]["native"] / "stock", tmp_path / "out", config=hf)
    assert twins.same(twins.read(tmp_path / "out"), twins.read(hf)) == []


def test_a_stack_of_another_number_of_experts_is_refused(
    computed: dict[str, Any], tmp_path: Path
) -> None:
    def fewer(held: dict[str, torch.Tensor], _: Any) -> None:
        held[f"{STACKS}gate_up_proj"] = held[f"{STACKS}gate_up_proj"][:3]

    folder = change(computed["gpt-oss"]["hf"], tmp_path / "a", fewer)
    with pytest.raises(ModelMismatchError, match=r"gate_up_proj\[0\]: \[3, 16, 16\] instead of"):
        ucp.import_hf(folder, tmp_path / "n", mesh="dp=1")
    assert len(load_file(folder / "model.safetensors")) > 10


def test_mxfp4_is_refused_with_what_to_do(computed: dict[str, Any], tmp_path: Path) -> None:
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    folder = change(
        computed["gpt-oss"]["hf"],
        tmp_path / "a",
        lambda _, config: config.update(quantization_config=said),
    )
    with pytest.raises(UnsupportedError, match=r"mxfp4[^$]*Mxfp4Config\(dequantize=True\)"):
        ucp.import_hf(folder, tmp_path / "n", mesh="dp=1")


@pytest.mark.parametrize("scales", [True, False])
def test_experts_of_one_tensor_in_fp8_are_refused(
    computed: dict[str, Any], tmp_path: Path, scales: bool
) -> None:
    """Nobody says which scale is whose: without them other weights would be read."""

    def in_fp8(held: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        name = f"{STACKS}down_proj"
        held[name] = held[name].to(torch.float8_e4m3fn)
        if scales:
            held[f"{name}_scale_inv"] = torch.full((4, 1, 1), 2.0)
        how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config["quantization_config"] = how

    folder = change(computed["gpt-oss"]["hf"], tmp_path / "a", in_fp8)
    with pytest.raises(UnsupportedError, match="experts in one tensor are in fp8"):
        ucp.import_hf(folder, tmp_path / "n", mesh="dp=1")
    assert not (tmp_path / "n").exists()
