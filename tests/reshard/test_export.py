"""Exports to Hugging Face, of checkpoints on paper: every tensor put together by plain torch, and
the same bytes from every mesh."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

import megatron_ucp as ucp
from megatron_ucp.formats.deepspeed.target import Target
from tests.reshard import paper, twins

# (tp, pp, ep, etp, dp, ZeRO)
MESHES = {
    "gpt": [
        (1, 1, 1, 1, 1, 0),
        (1, 1, 1, 1, 2, 1),
        (1, 1, 1, 1, 4, 3),
        (2, 1, 1, 2, 2, 1),
        (4, 1, 1, 4, 1, 1),
        (4, 1, 1, 4, 3, 3),
        (1, 2, 1, 1, 2, 1),
        (2, 3, 1, 2, 1, 0),
        (2, 1, 1, 2, 5, 2),
        (1, 4, 1, 1, 1, 1),
    ],
    "mixtral": [
        (1, 1, 1, 1, 1, 0),
        (1, 1, 1, 1, 4, 1),
        (1, 1, 1, 1, 2, 3),
        (1, 1, 2, 1, 2, 1),
        (1, 1, 4, 1, 4, 2),
        (2, 1, 2, 1, 1, 1),
        (2, 1, 2, 2, 2, 1),
        (2, 1, 1, 2, 2, 3),
        (4, 1, 4, 1, 1, 0),
        (2, 1, 4, 1, 2, 1),
    ],
}
MESHES |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), MESHES["gpt"])
MESHES["qwen3_moe"] = MESHES["mixtral"]
MESHES["deepseek_v3"] = [  # which has no pipeline of DeepSpeed's
    (1, 1, 1, 1, 1, 0),
    (1, 1, 1, 1, 4, 1),
    (1, 1, 1, 1, 2, 3),
    (1, 1, 2, 1, 2, 1),
    (1, 1, 4, 1, 4, 2),
    (2, 1, 2, 1, 1, 1),
    (2, 1, 2, 2, 2, 1),
    (2, 1, 1, 2, 2, 3),
    (4, 1, 4, 1, 1, 0),
    (4, 1, 2, 2, 1, 1),
]
MESHES["gpt_oss"] = MESHES["deepseek_v3"]


def first(model: paper.Model, tmp_path: Path) -> Path:
    return paper.write(model, tmp_path / "source" / "step7")


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("family", twins.SIZES)
def test_every_tensor_is_what_the_reference_formulas_say(
    tmp_path: Path, family: str, dtype: str
) -> None:
    model = twins.model(family)
    done = ucp.export_hf(first(model, tmp_path), tmp_path / "out", dtype=dtype, verify=True)
    wanted = twins.in_dtype(twins.expected(model), getattr(torch, dtype))
    assert twins.same(twins.read(tmp_path / "out"), wanted) == []
    assert (done.tensors, done.files, done.verified) == (len(wanted), 1, True)
    # the library's own bytes, header and all
    data = save({n: t.contiguous() for n, t in wanted.items()}, metadata={"format": "pt"})
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == data
    assert done.written_bytes == sum(t.nbytes for t in wanted.values())


def test_norms_of_latents_that_are_a_part_of_a_matrix(tmp_path: Path) -> None:
    """As Transformer Engine's layers have them: the same folder, told or untold, and comparable."""
    whole = twins.model("deepseek_v3")
    fused = twins.model("deepseek_v3", replace(twins.DEEPSEEK, fused=True))
    names = [name for name in fused.shapes if name not in whole.shapes]
    assert len(names) == 6 and all(name.endswith("layer_norm_weight") for name in names)
    ucp.export_hf(first(fused, tmp_path), tmp_path / "out")
    wanted = twins.in_dtype(twins.expected(fused), torch.bfloat16)
    assert twins.same(twins.read(tmp_path / "out"), wanted) == []
    assert ucp.diff(tmp_path / "source" / "step7", tmp_path / "out") == []
    untold = paper.write(replace(fused, family="", run={}), tmp_path / "untold" / "step7")
    ucp.export_hf(untold, tmp_path / "again", config=tmp_path / "out")
    assert twins.same(twins.read(tmp_path / "again"), wanted) == []


@pytest.mark.parametrize("family", twins.SIZES)
def test_one_digest_from_ten_meshes(tmp_path: Path, family: str) -> None:
    source = first(twins.model(family), tmp_path)
    found: dict[str, dict[str, str]] = {}
    for number, (tp, pp, ep, etp, dp, zero) in enumerate(MESHES[family]):
        mesh = ucp.Mesh(tp=tp, pp=pp, ep=ep, etp=etp, dp=dp, zero=zero)
        stages = {1: None, 2: (2, 3), 3: (1, 2, 2), 4: (1, 1, 1, 2)}[pp]
        native = tmp_path / f"native{number}" / "tag"
        ucp.convert(source, native, target=Target(mesh, stages=stages))
        ucp.export_hf(native, tmp_path / f"out{number}", max_shard_size=3000)
        found[str(mesh)] = digests(tmp_path / f"out{number}")
    assert len(found) == 10 and len({json.dumps(one) for one in found.values()}) == 1
    one = next(iter(found.values()))
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} < {*one}
    assert len(one) > 6


@pytest.mark.parametrize("family", twins.SIZES)
def test_an_export_compares_equal_and_one_bit_does_not(tmp_path: Path, family: str) -> None:
    source = first(twins.model(family), tmp_path)
    ucp.export_hf(source, tmp_path / "out")
    assert ucp.diff(source, tmp_path / "out") == ucp.diff(tmp_path / "out", source) == []
    path = tmp_path / "out" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    (difference,) = ucp.diff(source, tmp_path / "out")
    assert difference.what.startswith("value, 1 of ")


@pytest.mark.parametrize(
    "family",
    twins.SIZES,
)
def test_import_and_export_again_is_the_identity(tmp_path: Path, family: str) -> None:
    """Names, dtypes, shapes and bytes, by way of several meshes."""
    ucp.export_hf(first(twins.model(family), tmp_path), tmp_path / "hf")
    for number in (1, 4, 7):
        tp, pp, ep, etp, dp, zero = MESHES[family][number]
        mesh = ucp.Mesh(tp=tp, pp=pp, ep=ep, etp=etp, dp=dp, zero=zero)
        target = Target(mesh, stages="uniform" if pp > 1 else None)
        native = tmp_path / f"native{number}" / "global_step0"
        vocab = 48 if tp > 1 else None
        ucp.import_hf(tmp_path / "hf", native, target=target, padded_vocab=vocab)
        assert ucp.verify(native, deep=True).findings == ()
        assert ucp.diff(native, tmp_path / "hf") == []
        ucp.export_hf(native, tmp_path / f"out{number}")
        assert digests(tmp_path / f"out{number}") == digests(tmp_path / "hf")
