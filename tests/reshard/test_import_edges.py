"""Imports that can't be: named errors, all at once, and nothing is left of them; and folders that
others wrote in other ways."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.errors import (
    DamagedFileError,
    InexactError,
    LayoutError,
    ModelMismatchError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from megatron_ucp.formats.deepspeed.target import Target
from tests.reshard import twins
from tests.reshard.test_export_edges import first


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(ucp.export_hf(first(twins.model("llama"), tmp_path), tmp_path / "hf").path)


def not_imported(error: type[ucp.UcpError], source: Path, **options: Any) -> str:
    out = source.parent / "native" / "global_step0"
    with pytest.raises(error) as raised:
        ucp.import_hf(source, out, target=options.pop("mesh", ucp.Mesh(dp=2, zero=1)), **options)
    assert not out.exists()
    return str(raised.value)


def test_imports_that_can_not_be(folder: Path) -> None:
    """A vocabulary that tp does not divide, another family, another model, missing tensors."""
    said = not_imported(LayoutError, folder, mesh=ucp.Mesh(tp=2, zero=1))
    assert "--padded-vocab-size 46" in said
    assert "at least 45" in not_imported(UsageError, folder, padded_vocab=44)
    said = not_imported(UnsupportedError, folder, family="gpt")
    assert "gpt2" in said and "use a model of the family that config.json says" in said
    assert "no such family" in not_imported(UsageError, folder, family="lama")
    assert "no such checkpoint folder" in not_imported(NotFoundError, folder / "nowhere")
    config = json.loads((folder / "config.json").read_text())
    for change, error, said in (
        ({"model_type": "falcon"}, UnsupportedError, "falcon"),
        ({"num_hidden_layers": 3}, ModelMismatchError, "layers.2.self_attn.q_proj.weight: missing"),
        ({"num_key_value_heads": 4}, ModelMismatchError, "k_proj.weight: [8, 16] instead of [16"),
        ({"hidden_act": "gelu", "mlp_bias": True}, UnsupportedError, "hidden_act gelu; mlp_bias"),
        ({"num_attention_heads": "x"}, DamagedFileError, "config.json does not say"),
        ({"hidden_size": -16}, DamagedFileError, "hidden -16"),
        ({"num_hidden_layers": 10**9}, DamagedFileError, "more than any model has"),
        ({"vocab_size": 50}, ModelMismatchError, "lm_head.weight: [45, 16] instead of [50, 16]"),
        ({"vocab_size": 40}, ModelMismatchError, "tokens.weight: [45, 16] instead of [40, 16]"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        assert said in not_imported(error, folder)
    (folder / "config.json").write_text(json.dumps(config))
    held = load_file(folder / "model.safetensors")
    short = {**held, "lm_head.weight": held["lm_head.weight"][:44].clone()}
    save_file(short, folder / "model.safetensors")
    assert "lm_head.weight: [44, 16] instead" in not_imported(ModelMismatchError, folder)
    (folder / "config.json").unlink()
    assert "config.json" in not_imported(NotFoundError, folder)


def test_the_head_of_a_tied_model_may_lie_beside_its_embedding(tmp_path: Path) -> None:
    """In a file of its own too. One bit more is another model."""
    source = Path(ucp.export_hf(first(twins.model("gpt"), tmp_path), tmp_path / "hf").path)
    held, native = load_file(source / "model.safetensors"), tmp_path / "native" / "global_step0"
    head = held["transformer.wte.weight"].clone()
    parts = {"a.safetensors": {"lm_head.weight": head}, "b.safetensors": held}
    index = {name: file for file, tensors in parts.items() for name in tensors}
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file, tensors in parts.items():
        save_file(tensors, source / file)
    ucp.import_hf(source, native, target=ucp.Mesh(dp=2, zero=1))
    assert twins.same(twins.read(Path(ucp.export_hf(native, tmp_path / "back").path)), held) == []
    head.view(torch.uint8)[-1, -1] ^= 1
    save_file(parts["a.safetensors"], source / "a.safetensors")
    shutil.rmtree(native)
    with pytest.raises(ModelMismatchError, match=r"two in the folder\n(.*\n)*.*lm_head.weight"):
        ucp.import_hf(source, native, target=ucp.Mesh(dp=2, zero=1))
    assert not native.exists()


def test_values_that_the_training_dtype_can_not_hold(folder: Path) -> None:
    """All of them are listed, of a conversion too; what is infinite in the source is kept."""
    path, fp16 = folder / "model.safetensors", Target(ucp.Mesh(tp=1, dp=2, zero=1), "float16")
    held = load_file(path)
    held["model.norm.weight"][3] = 7e4
    held["model.layers.1.mlp.up_proj.weight"][2, 3] = -1e5
    save_file({name: one.float() for name, one in held.items()}, path)
    listed = "decoder.final_layernorm.weight: 1; decoder.layers.1.mlp.linear_fc1.weight: 1"
    assert listed in not_imported(InexactError, folder, mesh=fp16)
    ucp.import_hf(folder, folder.parent / "bf16" / "tag", target=ucp.Mesh(zero=1), latest=True)
    with pytest.raises(InexactError, match=listed):
        ucp.convert(folder.parent / "bf16", folder.parent / "fp16" / "tag", target=fp16)
    assert [*(folder.parent / "fp16").iterdir()] == []
    held["model.norm.weight"][3] = held["model.layers.1.mlp.up_proj.weight"][2, 3] = float("inf")
    save_file({name: one.float() for name, one in held.items()}, path)
    ucp.import_hf(folder, folder.parent / "inf" / "tag", target=fp16, latest=True)
    ucp.convert(
        folder.parent / "inf", folder.parent / "fp16" / "b", target=ucp.Mesh(zero=1), latest=True
    )
    assert ucp.diff(folder.parent / "inf", folder.parent / "fp16") == []


def test_a_folder_in_fp64_is_rounded_where_that_is_allowed(folder: Path) -> None:
    path, out = folder / "model.safetensors", folder.parent / "native" / "tag"
    held = {name: one.double() + 1e-9 for name, one in load_file(path).items()}
    save_file(held, path)
    assert 'allow={"narrow"}' in not_imported(InexactError, folder)
    assert (
        main(
            [
                "import-hf",
                str(folder),
                str(out),
                "--mesh",
                "zero=1",
                "--allow",
                "narrow",
                "--latest",
            ]
        )
        == 0
    )
    ucp.export_hf(out.parent, folder.parent / "again", dtype="float32")
    wanted = {name: one.float() for name, one in held.items()}
    assert twins.same(twins.read(folder.parent / "again"), wanted) == []
    assert "narrow" in not_imported(UsageError, folder, allow={"mean"})


def test_weights_that_are_no_safetensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pickles beside safetensors are not looked at; alone they are named, with a way out."""
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    ucp.import_hf(folder, folder.parent / "b" / "tag", target=ucp.Mesh(zero=1), latest=True)
    assert ucp.diff(folder.parent / "b", folder) == []
    (folder / "model.safetensors").unlink()
    said = not_imported(NotFoundError, folder)
    assert "found: pytorch_model.bin" in said and "save_pretrained" in said
    assert main(["inspect", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "found: pytorch_model.bin" in said and "save_pretrained" in said


def test_a_folder_of_the_hub(folder: Path, tmp_path: Path) -> None:
    """Links to files of other names, as the hub's cache has them."""
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(f"../blobs/{number}")
    ucp.import_hf(folder, tmp_path / "native" / "tag", target=ucp.Mesh(dp=2, zero=3), latest=True)
    assert ucp.diff(tmp_path / "native", folder) == []


def test_a_padded_vocabulary_gets_zeros(folder: Path) -> None:
    found = ucp.import_hf(
        folder, folder.parent / "native" / "tag", target=ucp.Mesh(tp=2, zero=1), padded_vocab=48
    )
    assert any("3 rows of zeros" in note for note in found.notes)
    from megatron_ucp.formats.registry import open_checkpoint
    from megatron_ucp.reshard.check import read_state

    with open_checkpoint(found.path) as native:
        words = read_state(native, "embedding.word_embeddings.weight", "fp32").view(48, 16)
    assert words[45:].count_nonzero() == 0 and words[:45].count_nonzero() == 45 * 16


def test_names_of_earlier_files(tmp_path: Path) -> None:
    """GPT-2's own files lack the first word of their names, and hold masks."""
    source = first(twins.model("gpt"), tmp_path)
    ucp.export_hf(source, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    held = {name.removeprefix("transformer."): one for name, one in load_file(path).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    save_file({**held, **masks}, path)
    assert ucp.diff(source, tmp_path / "hf") == []
    ucp.import_hf(
        tmp_path / "hf", tmp_path / "native" / "tag", target=ucp.Mesh(zero=1), latest=True
    )
    ucp.export_hf(tmp_path / "native", tmp_path / "again")
    wanted = {f"transformer.{name}": one for name, one in held.items()}
    assert twins.same(twins.read(tmp_path / "again"), wanted) == []
    save_file({**held, "h.0.attn.surprise": torch.ones(2)}, path)
    assert "h.0.attn.surprise: not known" in not_imported(ModelMismatchError, tmp_path / "hf")


def test_one_changed_tensor_is_a_difference(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    held = load_file(other / "model.safetensors")
    held["model.layers.0.self_attn.k_proj.weight"][3, 2] += 1
    save_file(held, other / "model.safetensors")
    assert main(["diff", str(tmp_path / "source" / "step7"), str(other)]) == 1
    said = capsys.readouterr().out
    assert "decoder.layers.0.self_attention.linear_qkv.weight: value, 1 of 512 elements" in said
    assert main(["diff", str(folder), str(other)]) == 1
    assert "model.layers.0.self_attn.k_proj.weight: value, 1 of 128" in capsys.readouterr().out
