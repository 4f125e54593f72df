"""Exports that can't be: named errors, all at once, and nothing is left of them; and the command
line."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import errors, families
from megatron_ucp.cli import main
from megatron_ucp.core.manifest import RECORDED
from megatron_ucp.reshard.files import FileSource
from tests.formats.megatron_files import GOLDEN_LATER
from tests.reshard import paper, twins
from tests.reshard.plain import SHAPES
from tests.scripts import run_command


def first(model: paper.Model, tmp_path: Path) -> Path:
    return paper.write(model, tmp_path / "source" / "step7")


def refused(error: type[ucp.UcpError], source: Path, out: Path, **options: Any) -> str:
    """What an export that fails says; nothing is left of it."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(error) as raised:
        ucp.export_hf(source, out, **options)
    assert sorted(out.parent.iterdir()) == before
    return str(raised.value)


def with_values(model: paper.Model, values: dict[str, float]) -> paper.Model:
    """The model with the second element of some parameters changed."""

    class Changed(paper.Model):
        def truth(self, name: str, state: str = "fp32") -> torch.Tensor:
            found = super().truth(name, state)
            if state == "fp32" and name in values:
                found = found.clone()
                found.reshape(-1)[1] = values[name]
            return found

    return Changed(**vars(model))


# ------------------------------------------------ values


def test_values_that_the_dtype_can_not_hold(tmp_path: Path) -> None:
    """All of them are listed; what is infinite or NaN in the source is kept."""
    large = {
        "decoder.layers.0.mlp.linear_fc1.weight": 7e4,
        "decoder.layers.1.mlp.linear_fc2.weight": -1e6,
        "decoder.final_layernorm.weight": float("inf"),
        "decoder.layers.1.input_layernorm.weight": float("nan"),
    }
    source = first(with_values(twins.model("llama"), large), tmp_path)
    said = refused(errors.InexactError, source, tmp_path / "out", dtype="float16")
    assert "too large for float16" in said and "65504" in said
    assert "layers.0.mlp.gate_proj.weight: 1" in said and "layers.1.mlp.down_proj.weight: 1" in said
    assert "norm" not in said
    ucp.export_hf(source, tmp_path / "out", dtype="bfloat16", verify=True)
    found = twins.read(tmp_path / "out")
    assert float(found["model.norm.weight"][1]) == float("inf")
    assert found["model.layers.1.input_layernorm.weight"][1].isnan()


def test_values_that_bfloat16_can_not_hold(tmp_path: Path) -> None:
    large = {"decoder.final_layernorm.weight": 3.4e38}
    source = first(with_values(twins.model("llama"), large), tmp_path)
    assert "model.norm.weight: 1" in refused(errors.InexactError, source, tmp_path / "out")


def lose_a_bit(monkeypatch: pytest.MonkeyPatch, of: int) -> None:
    """The disk writes something else the `of`th time."""
    pwrite, calls = os.pwrite, list[int]()

    def lossy(handle: int, data: Any, place: int) -> int:
        calls.append(1)
        changed = bytearray(data)
        changed[0] ^= len(calls) == of
        return pwrite(handle, changed, place)

    monkeypatch.setattr(os, "pwrite", lossy)


# ------------------------------------------------ models


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint whose manifest says something else of its model."""
    path = folder / "ucp_manifest.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    return folder


def test_a_checkpoint_that_does_not_say_its_model(tmp_path: Path) -> None:
    """An earlier save: the config of the model helps, that of another one does not."""
    source = first(replace(twins.model("llama"), run={}), tmp_path)
    assert "--config" in refused(errors.UsageError, source, tmp_path / "out")
    ucp.export_hf(first(twins.model("llama"), tmp_path / "b"), tmp_path / "whole")
    ucp.export_hf(source, tmp_path / "out", config=tmp_path / "whole")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    ucp.export_hf(first(twins.model("gpt"), tmp_path / "c"), tmp_path / "gpt")
    options = {"config": tmp_path / "gpt"}
    assert "gpt2" in refused(errors.ModelMismatchError, source, tmp_path / "other", **options)
    assert "config.json" in refused(errors.NotFoundError, source, tmp_path / "x", config=tmp_path)


def test_a_config_that_contradicts_what_the_checkpoint_says(tmp_path: Path) -> None:
    source = first(twins.model("llama"), tmp_path)
    ucp.export_hf(source, tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    options = {"config": tmp_path / "whole"}
    ucp.export_hf(source, tmp_path / "same", **options)
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-6}))
    said = refused(errors.ModelMismatchError, source, tmp_path / "out", **options)
    assert "norm_epsilon: 1e-06 in config.json, 1e-05 in the model" in said


def test_a_config_with_another_vocabulary(tmp_path: Path) -> None:
    """No row of a token is left out; rows of padding may stay. What reads the dtype under its
    earlier name finds that of the files."""
    source = first(twins.model("llama"), tmp_path)
    path = Path(ucp.export_hf(source, tmp_path / "whole").path) / "config.json"
    config = {**json.loads(path.read_text()), "torch_dtype": "float16"}
    options = {"config": tmp_path / "whole"}
    path.write_text(json.dumps({**config, "vocab_size": 44}))
    said = refused(errors.ModelMismatchError, source, tmp_path / "out", **options)
    assert "output_layer.weight: 45 rows of tokens, of which 44 stay" in said
    path.write_text(json.dumps({**config, "vocab_size": 48}))
    ucp.export_hf(source, tmp_path / "out", **options)
    found = twins.read(tmp_path / "out")
    wanted = twins.expected(twins.model("llama", replace(twins.LLAMA, true_vocab=48)))
    assert twins.same(found, {name: one.bfloat16() for name, one in wanted.items()}) == []
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["vocab_size"], written["dtype"], written["torch_dtype"]) == (
        48,
        "bfloat16",
        "bfloat16",
    )


@pytest.mark.parametrize("rows", [45, 46])
def test_verify_where_the_config_alone_knows_the_padding(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 are of tokens, 48 in the files."""
    known = first(twins.model("llama", replace(twins.LLAMA, true_vocab=rows)), tmp_path / "known")
    ucp.export_hf(known, tmp_path / "whole")
    source = first(twins.model("llama"), tmp_path)
    if rows == 45:
        (source / "ucp_manifest.json").unlink()
    options = {"config": tmp_path / "whole", "family": "llama", "verify": True}
    ucp.export_hf(source, tmp_path / "out", **options)
    found, wanted = (twins.read(tmp_path / which) for which in ("out", "whole"))
    assert twins.same(found, wanted) == [] and len(found["lm_head.weight"]) == rows
    lose_a_bit(monkeypatch, of=1)  # the largest ones go first
    said = refused(errors.SaveError, source, tmp_path / "damaged", **options)
    assert f"1 of {rows * 16} elements" in said and "1 differences" in said


def test_a_model_of_megatron_core_without_a_family(tmp_path: Path) -> None:
    source = first(twins.model("llama"), tmp_path)
    edited(source, lambda tree: tree.update(family=""))
    assert "--family" in refused(errors.UsageError, source, tmp_path / "out")
    ucp.export_hf(source, tmp_path / "out", family="llama", verify=True)


def test_a_manifest_that_says_nonsense_of_its_model(tmp_path: Path) -> None:
    source = first(twins.model("llama"), tmp_path)
    edited(source, lambda tree: tree["run"][RECORDED]["sizes"].update(surprise=1))
    assert "can't be read" in refused(errors.DamagedFileError, source, tmp_path / "out")
    edited(source, lambda tree: tree["run"][RECORDED]["sizes"].pop("surprise"))
    for part, key, value in (
        ("sizes", "layers", 10**12),  # nothing of that size is made
        ("sizes", "heads", 0),
        ("sizes", "hidden", "x"),
        ("architecture", "norm_epsilon", float("nan")),
    ):
        said = {key: value}
        other = first(twins.model("llama"), tmp_path / key)
        edited(other, lambda tree, part=part, said=said: tree["run"][RECORDED][part].update(said))
        assert str(value) in refused(errors.DamagedFileError, other, tmp_path / "out")
    edited(source, lambda tree: tree["run"][RECORDED]["sizes"].update(hidden=20, ffn=7))
    said = refused(errors.ModelMismatchError, source, tmp_path / "out")
    assert "instead of" in said and "and 7 more" in said


def test_what_the_twin_has_no_place_for(tmp_path: Path) -> None:
    """A buffer of the router, and a setting: refused, never dropped."""
    model = twins.model("mixtral")
    name = "decoder.layers.0.mlp.router.expert_bias"
    shapes, kinds = {**model.shapes, name: (4,)}, {**model.kinds, name: "buffer"}
    dtypes, numbers = {**model.dtypes, name: "float32"}, {**model.numbers, name: 99}
    other = replace(model, shapes=shapes, kinds=kinds, dtypes=dtypes, numbers=numbers)
    source = first(other, tmp_path)
    said = refused(errors.ModelMismatchError, source, tmp_path / "out")
    assert f"{name}: a buffer that mixtral lacks" in said
    odd = {"moe_router_score_function": "sigmoid", "rotary_percent": 0.5}
    source = first(twins.model("mixtral", odd=odd), tmp_path / "b")
    said = refused(errors.UnsupportedError, source, tmp_path / "out")
    assert "moe_router_score_function=sigmoid; rotary_percent=0.5" in said


# ------------------------------------------------ plain models


def test_a_family_that_forgot_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No parameter is left out in silence."""
    source, family = first(twins.model("llama"), tmp_path), families.find_family("llama")
    twin: Any = family.hugging_face
    norm = "model.layers.1.input_layernorm.weight"

    def forgetful(sizes: Any) -> Any:
        return {name: share for name, share in twin.tensors(sizes).items() if name != norm}

    other = replace(family, hugging_face=replace(twin, tensors=forgetful))
    monkeypatch.setitem(families._FAMILIES, "llama", other)
    said = refused(errors.UnsupportedError, source, tmp_path / "out")
    assert "has no tensor for a parameter" in said
    assert "decoder.layers.1.input_layernorm.weight" in said


def attached_without_a_family(tree: dict[str, Any]) -> None:
    """The manifest of a model of megatron-core that nobody named a family for: an architecture, and
    the sizes of no family."""
    tree["family"], tree["run"][RECORDED]["sizes"] = "", {}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_that_was_attached_without_a_family(tmp_path: Path, family: str) -> None:
    """Sizes are the config's; the architecture that was recorded must agree with it. Nothing of it
    is damage."""
    ucp.export_hf(first(twins.model(family), tmp_path / "b"), tmp_path / "whole")
    source = edited(first(twins.model(family), tmp_path), attached_without_a_family)
    for options in (
        {"config": tmp_path / "whole"},
        {"config": tmp_path / "whole", "family": family},
    ):
        ucp.export_hf(source, tmp_path / "out", verify=True, **options)
        assert twins.same(twins.read(tmp_path / "out"), twins.read(tmp_path / "whole")) == []
        shutil.rmtree(tmp_path / "out")
    said = refused(errors.UsageError, source, tmp_path / "out", family=family)
    assert "--config" in said and "__init__" not in said
    path = tmp_path / "whole" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.25}))
    said = refused(errors.ModelMismatchError, source, tmp_path / "out", config=tmp_path / "whole")
    assert "norm_epsilon: 0.25" in said


def test_the_sizes_of_another_family(tmp_path: Path) -> None:
    source = first(twins.model("llama"), tmp_path)
    said = refused(errors.ModelMismatchError, source, tmp_path / "out", family="mixtral")
    assert "those of llama, which differ in experts" in said and "damage" not in said


def test_a_plain_model(tmp_path: Path) -> None:
    """Names as they are, buffers in their own dtype, tokenizer files of the config's folder."""
    model = paper.plain_model(
        {**SHAPES, "calls": (), "mask": (3,)},
        "bfloat16",
        {"calls": "buffer", "mask": "buffer"},
        {"calls": "int64", "mask": "bool"},
    )
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model_type": "own", "torch_dtype": "x"}')
    (tmp_path / "config" / "tokenizer.json").write_text("{}")
    (tmp_path / "config" / "private.key").write_text("secret")
    source = first(model, tmp_path)
    ucp.export_hf(source, tmp_path / "out", config=tmp_path / "config", verify=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "ucp_export.json",
    ]
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said == {"model_type": "own", "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    wanted = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name in model.shapes
        for value in [model.truth(name)]
    }
    assert twins.same(twins.read(tmp_path / "out"), wanted) == []


# ------------------------------------------------ the output


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    source = first(twins.model("llama"), tmp_path)
    missing = {"tokenizer": tmp_path / "nowhere"}
    assert "no such folder" in refused(errors.NotFoundError, source, tmp_path / "out", **missing)
    (tmp_path / "nowhere").mkdir()
    assert "no file of one" in refused(errors.NotFoundError, source, tmp_path / "out", **missing)
    (tmp_path / "nowhere" / "tokenizer.json").write_text("{}")
    ucp.export_hf(source, tmp_path / "out", **missing)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_the_output_is_new_and_elsewhere(tmp_path: Path) -> None:
    source = first(twins.model("gpt"), tmp_path)
    (tmp_path / "there").mkdir()
    assert "the output exists" in refused(errors.UsageError, source, tmp_path / "there")
    assert "plain name" in refused(errors.UsageError, source, tmp_path / ".hidden")
    assert "inside of a checkpoint" in refused(errors.UsageError, source, source / "hf")
    assert "no such dtype" in refused(errors.UsageError, source, tmp_path / "x", dtype="int8")
    for size in ("big", "0", "-1", "nan", "1e3", "5GiB", "9" * 400 + "GB"):
        assert "no size" in refused(errors.UsageError, source, tmp_path / "x", max_shard_size=size)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = first(twins.model("gpt"), tmp_path), list[int]()
    pwrite = os.pwrite

    def full(*args: Any) -> int:
        calls.append(1)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", full)
    assert "No space left" in refused(errors.SaveError, source, tmp_path / "out")


def test_ctrl_c_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = first(twins.model("gpt"), tmp_path), tmp_path / "out" / "hf"
    written: list[Path] = []

    def interrupted(*_: Any, **__: Any) -> None:
        written.extend(out.parent.glob(".*/*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSource, "check", interrupted)
    assert main(["export-hf", str(source), str(out)]) == 130
    assert capsys.readouterr().err == "megatron-ucp: interrupted\n"
    assert written and [*out.parent.iterdir()] == []


def test_a_damaged_source(tmp_path: Path) -> None:
    source = first(twins.model("gpt"), tmp_path)
    path = next(source.glob("*optim_states.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1  # masters come after the two moments
    path.write_bytes(data)
    assert "damaged" in refused(errors.DamagedFileError, source, tmp_path / "out", dtype="float32")


def test_verify_sees_one_bit_that_the_disk_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = first(twins.model("gpt"), tmp_path)
    lose_a_bit(monkeypatch, of=7)
    said = refused(errors.SaveError, source, tmp_path / "out", verify=True)
    assert "not what the checkpoint holds" in said and "1 differences" in said


# ------------------------------------------------ the command line


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = first(twins.model("llama"), tmp_path), str(tmp_path / "hf")
    words = ["export-hf", str(source), out, "--dtype", "float32", "--max_shard_size", "5KB"]
    assert main([*words, "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] and found["files"] > 3 and found["dtype"] == "float32"
    assert main(["diff", str(source), out]) == 0
    assert capsys.readouterr().out == "equal\n"
    assert main(["verify", out, "--deep"]) == 0 and "no damage" in capsys.readouterr().out
    assert main(["inspect", out]) == 0 and "weights" in capsys.readouterr().out
    native = str(tmp_path / "native" / "tag")
    assert main(["import-hf", out, native, "--mesh", "dp=2,zero=3"]) == 0
    assert "begin from scratch" in capsys.readouterr().out
    assert main(["inspect", native, "--all"]) == 0
    assert "rotary_base=500000.0" in capsys.readouterr().out
    assert main(["diff", native, out]) == 0
    capsys.readouterr()
    assert main([*words[:3]]) == 2 and "the output exists" in capsys.readouterr().err
    for verb in (["plan", out], ["convert", out, str(tmp_path / "other" / "tag")]):
        assert main([*verb, "--mesh", "dp=2,zero=1"]) == 2
        assert "an engine loads this folder as it is; import-hf" in capsys.readouterr().err


def test_an_export_needs_neither_deepspeed_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_ucp.cli import main; main(sys.argv[1:]);"
        "print([m for m in ('deepspeed', 'megatron', 'transformers') if m in sys.modules])"
    )
    words = ["export-hf", str(first(twins.model("gpt"), tmp_path)), str(tmp_path / "out")]
    done = run_command([sys.executable, "-c", code, *words], timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("case", "named"), [("v019_dpr_mtp_tp2", "MTP"), ("v019_dpr_hybrid_tp2", "hybrid model")]
)
def test_a_model_of_megatron_core_that_no_class_has(tmp_path: Path, case: str, named: str) -> None:
    """The first answer says so, in place of asking for a config that no class has."""
    said = refused(ucp.UnsupportedError, GOLDEN_LATER / case, tmp_path / "out")
    assert "no class of transformers" in said and named in said and "GPTModel" in said
