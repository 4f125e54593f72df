"""Folders of Hugging Face models whose weights are in fp8, with a scale for each block."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError, ModelMismatchError, UnsupportedError
from megatron_ucp.reshard.convert import Converted
from tests.reshard import twins
from tests.reshard.test_export_edges import first

BLOCK = (6, 10)  # divide no weight of the models here
SAID = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
Tensors = dict[str, torch.Tensor]


def quantised(source: Path, block: tuple[int, int] = BLOCK) -> Tensors:
    """Rewrites a folder: every matrix of a layer in fp8, as transformers writes them. Returns what
    all tensors are then, by a formula of its own: one scale for each element."""
    held, values = load_file(source / "model.safetensors"), Tensors()
    stored = Tensors()
    for name, tensor in held.items():
        if tensor.dim() != 2 or not re.search(r"\.\w+_proj(_with_mqa)?\.weight", name):
            stored[name] = values[name] = tensor.to(torch.bfloat16)
            continue
        rows, columns = tensor.shape
        counts = [-(-n // b) for n, b in zip(tensor.shape, block, strict=True)]
        seed = torch.Generator().manual_seed(len(stored))
        scales = torch.rand(counts, generator=seed) / 64 + 2**-8
        each = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        stored[name] = (tensor.float() / each).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        values[name] = stored[name].float() * each
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    says(source, {**SAID, "weight_block_size": [*block]})
    return values


def says(folder: Path, quantisation: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    config |= {} if quantisation is None else {"quantization_config": quantisation}
    path.write_text(json.dumps(config))


def exported(folder: Path, out: Path) -> tuple[Tensors, Converted]:
    """The masters of an import for two ranks that cut tensors, and what the import said."""
    mesh = ucp.Mesh(tp=2, zero=1)
    done = ucp.import_hf(folder, out / "step0", mesh=mesh, padded_vocab=46)
    path = ucp.export_hf(out / "step0", out / "hf", dtype="float32").path
    return load_file(Path(path) / "model.safetensors"), done


@pytest.fixture(params=["llama", "deepseek_v3"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(ucp.export_hf(first(twins.model(request.param), tmp_path), tmp_path / "hf").path)


def unequal(found: Tensors, wanted: Tensors) -> dict[str, int]:
    assert found.keys() == wanted.keys()
    counts = {name: int((found[name] != wanted[name].float()).sum()) for name in wanted}
    return {name: count for name, count in counts.items() if count}


def test_masters_are_weights_times_scales(folder: Path, tmp_path: Path) -> None:
    wanted = quantised(folder)
    found, done = exported(folder, tmp_path / "one")
    assert unequal(found, wanted) == {}
    products = sum(tensor.dtype == torch.float32 for tensor in wanted.values())
    assert any(f"{products} weights in fp8 are read as fp32" in note for note in done.notes)


def test_transformers_reads_the_same(folder: Path, tmp_path: Path) -> None:
    """Its own products in fp32, where it keeps a tensor under the folder's name."""
    quantised(folder, (2, 2))  # transformers takes no blocks that end outside of a weight
    found, _ = exported(folder, tmp_path / "one")
    how = FineGrainedFP8Config(weight_block_size=(2, 2), dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=torch.float32
    )
    theirs = {name: tensor for name, tensor in model.state_dict().items() if name in found}
    products = [name for name in theirs if ".self_attn." in name and name.endswith("weight")]
    assert len(products) >= 2 * 4
    assert unequal({name: found[name] for name in theirs}, theirs) == {}


def test_another_scale_changes_its_own_block(folder: Path, tmp_path: Path) -> None:
    """So the test above would see a scale that is not used, or another one's."""
    wanted, name = quantised(folder), "model.layers.1.self_attn.o_proj.weight"
    stored = load_file(folder / "model.safetensors")
    stored[f"{name}_scale_inv"][1, 0] *= 2
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    found, _ = exported(folder, tmp_path / "one")
    assert unequal(found, wanted) == {name: BLOCK[0] * BLOCK[1]}


def _lacking(folder: Path, stored: Tensors, name: str) -> None:
    del stored[f"{name}_scale_inv"]


def _cut(folder: Path, stored: Tensors, name: str) -> None:
    stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"][:1].clone()


def _half(folder: Path, stored: Tensors, name: str) -> None:
    stored[f"{name}_scale_inv"] = stored[f"{name}_scale_inv"].half()


def _no_number(folder: Path, stored: Tensors, name: str) -> None:
    stored[f"{name}_scale_inv"][1, 0] = float("nan")


def _alone(folder: Path, stored: Tensors, name: str) -> None:
    stored[name] = stored[name].to(torch.bfloat16)


def _unsaid(folder: Path, stored: Tensors, name: str) -> None:
    says(folder, None)


def _four_bits(folder: Path, stored: Tensors, name: str) -> None:
    says(folder, {"quant_method": "gptq", "bits": 4})


def _one_scale(folder: Path, stored: Tensors, name: str) -> None:
    says(folder, {**SAID, "weight_block_size": None})


FAULTS: dict[str, tuple[Callable[[Path, Tensors, str], None], type[ucp.UcpError], str]] = {
    "no scales": (_lacking, ModelMismatchError, "does not have its scales"),
    "too few scales": (_cut, ModelMismatchError, "does not have its scales"),
    "scales in fp16": (_half, ModelMismatchError, "of float16"),
    "a scale that is no number": (_no_number, DamagedFileError, "are no numbers"),
    "scales of a weight in bf16": (_alone, ModelMismatchError, "_scale_inv: not known"),
    "no word about blocks": (_unsaid, UnsupportedError, "does not say how it is scaled"),
    "four bits": (_four_bits, UnsupportedError, "quantised in a way that is not known"),
    "one scale for all": (_one_scale, UnsupportedError, "weight_block_size"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_known_is_refused(tmp_path: Path, fault: str) -> None:
    change, error, said = FAULTS[fault]
    folder = Path(ucp.export_hf(first(twins.model("llama"), tmp_path), tmp_path / "hf").path)
    quantised(folder)
    stored = load_file(folder / "model.safetensors")
    change(folder, stored, "model.layers.0.mlp.up_proj.weight")
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    out = tmp_path / "native" / "step0"
    with pytest.raises(error) as raised:
        ucp.import_hf(folder, out, mesh=ucp.Mesh(dp=2, zero=1))
    assert said in str(raised.value)
    assert not out.exists()


def test_a_file_of_scales_alone_is_one_of_the_checkpoint(tmp_path: Path) -> None:
    """So that `verify --deep` reads it too; weights find their scales in another file."""
    folder = Path(ucp.export_hf(first(twins.model("llama"), tmp_path), tmp_path / "hf").path)
    wanted = quantised(folder)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    listed: dict[str, str] = {}
    for number, is_scale in enumerate((True, False), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        held = {k: v for k, v in stored.items() if k.endswith("_scale_inv") == is_scale}
        save_file(held, folder / file, {"format": "pt"})
        listed |= dict.fromkeys(held, file)
    index = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found, _ = exported(folder, tmp_path / "one")
    assert unequal(found, wanted) == {}
    assert "2 files" in str(ucp.verify(folder, deep=True))
