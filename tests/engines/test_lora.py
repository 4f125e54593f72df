"""LoRA: the real peft around transformers' models under DeepSpeed. Adapters go out in peft's own
format, or merged into their base; runs resume on other meshes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import DamagedFileError, ModelMismatchError, UnsupportedError, UsageError
from megatron_ucp.reshard.hugging_face.adapter import adapter_of, tensor_of
from tests.engines.lora_jobs import BESIDE, FORMS
from tests.engines.sources import without_manifest
from tests.engines.test_pairs import check, check_fails
from tests.ranks import RankPool, RanksFailed
from tests.reshard import twins

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.lora_jobs:"
Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_checkpoints: Path) -> Saved:
    """(kind, ZeRO stage, without frozen weights) -> the folder of a run on two ranks, and what rank
    0 saw."""
    kept: dict[Any, tuple[Path, dict[str, Any]]] = {}

    def get(kind: str, zero: int = 1, exclude: bool = True, dtype: str = "fp32") -> Any:
        key = kind, zero, exclude, dtype
        if key not in kept:
            folder = tmp_checkpoints / f"lora_{kind}_{zero}_{exclude}_{dtype}"
            found = ranks.run(2, JOBS + "save", kind, zero, str(folder), exclude, dtype)
            kept[key] = folder, found[0]
        return kept[key]

    return get


CASES = [
    ("llama", 1, True),
    ("llama", 2, False),
    ("llama", 3, True),
    ("gpt2", 1, True),
    ("rslora", 2, True),
    ("embedding", 1, True),
    ("dora", 1, True),
]


@pytest.mark.parametrize(("kind", "zero", "exclude"), CASES)
def test_the_adapter_as_peft_writes_it(
    saved: Saved, tmp_path: Path, kind: str, zero: int, exclude: bool
) -> None:
    """The same names and bits, from files and from memory; and the config of the run."""
    folder, _ = saved(kind, zero, exclude)
    found = ucp.export_hf(
        folder,
        tmp_path / "out",
        dtype="float32",
        config=folder / "peft",
        verify=True,
        max_shard_size=900,
    )
    want = load_file(folder / "peft" / "adapter_model.safetensors")
    files = "adapter_model.safetensors", "adapter_config.json"
    assert twins.same(load_file(folder / "live" / files[0]), want) == []
    if kind == "embedding":  # peft adds the frozen embedding of the base, which was not saved
        del want["base_model.model.model.embed_tokens.base_layer.weight"]
        assert "embed_tokens.base_layer.weight: frozen, and left out" in found.notes[-1]
    assert twins.same(load_file(tmp_path / "out" / "adapter_model.safetensors"), want) == []
    assert found.tensors == len(want) > 3
    assert any(tensor.abs().max() > 0 for name, tensor in want.items() if "lora_B" in name)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*files, "README.md", "ucp_export.json"}  # the card lies beside the config
    from_memory, from_files = (path / files[0] for path in (folder / "live", tmp_path / "out"))
    assert kind == "embedding" or from_memory.read_bytes() == from_files.read_bytes()
    configs = [settings(path) for path in (folder / "live", tmp_path / "out", folder / "peft")]
    assert configs[0] == configs[1] == configs[2] and configs[0]["r"] == 4


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_of_adapter_as_peft_writes_it(saved: Saved, tmp_path: Path, kind: str) -> None:
    """Tensor by tensor, from files and from memory; of what was trained beside it every name is
    said, with a way that keeps it."""
    folder, seen = saved(kind, 3, False)
    config = folder / "peft"
    done = ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=config, verify=True)
    want = load_file(config / "adapter_model.safetensors")
    for found in (tmp_path / "out", folder / "live"):
        assert twins.same(load_file(found / "adapter_model.safetensors"), want) == []
    notes = "\n".join(done.notes)
    assert ("NOT IN THE ADAPTER" in notes) == (kind in BESIDE)
    if kind not in BESIDE:
        return
    beside = {n for n in seen["trained"] if not re.search(r"\.lora_|default", n)}
    assert f"{len(beside)} tensors" in notes and any(name in notes for name in beside)
    # both ways that the note names have all of it
    whole = ucp.fp32_state_dict(folder)
    assert all(torch.equal(whole[name], value) for name, value in seen["trained"].items())
    ucp.export_hf(folder, tmp_path / "merged", config=config, merge=folder / "base", verify=True)
    merged = twins.read(tmp_path / "merged")
    inside = {name: tensor_of(name) for name in beside}
    assert all(torch.equal(merged[inside[n]], seen["trained"][n]) for n in beside)


def test_peft_loads_adapters_of_experts_and_tokens(saved: Saved, tmp_path: Path) -> None:
    from peft import PeftModel

    from tests.engines.lora_jobs import base_model

    for kind in ("experts", "tokens and head"):
        folder, _ = saved(kind, 3, False)
        out = tmp_path / kind
        ucp.export_hf(folder, out, dtype="float32", config=folder / "peft")
        tokens = torch.arange(8).view(1, 8)
        logits = [
            PeftModel.from_pretrained(base_model(kind, 1), str(path))(tokens).logits
            for path in (out, folder / "peft")
        ]
        assert torch.equal(*logits)
        assert not torch.equal(logits[0], base_model(kind, 1)(tokens).logits)


def test_one_sign_of_an_adapter_is_seen(saved: Saved, tmp_path: Path) -> None:
    """By the comparison of the tests above, and by that of `--verify`, which reads it back."""
    folder, _ = saved("experts", 3, False)
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "peft")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    want = load_file(folder / "peft" / "adapter_model.safetensors")
    name = max(want, key=lambda name: want[name].numel())
    found[name].view(-1)[3] *= -1
    (said,) = twins.same(found, want)
    assert name in said


def test_a_factor_that_was_not_saved() -> None:
    """A frozen lora_A is left out by exclude_frozen_parameters: half an adapter is none."""
    specs = (ParamSpec("base_model.model.q.lora_B.default.weight", (4, 2), "float32", "trainable"),)
    with pytest.raises(ModelMismatchError, match=r"q\.lora_A.*\n.*(.|\n)*exclude_frozen"):
        adapter_of(Manifest(Keeper.ZERO_3, Mesh(), specs, ()), "")


def settings(folder: Path) -> dict[str, Any]:
    """An adapter's config; sets have no order, and `auto_mapping` is added by peft's own save."""
    found = json.loads((folder / "adapter_config.json").read_text())
    del found["auto_mapping"]
    return {k: sorted(v) if isinstance(v, list) else v for k, v in found.items()}


def test_peft_loads_the_adapter(saved: Saved, tmp_path: Path) -> None:
    from peft import PeftModel

    from tests.engines.lora_jobs import base_model

    folder, _ = saved("llama", 3)
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "peft")
    tokens = torch.arange(8).view(1, 8)
    logits = [
        PeftModel.from_pretrained(base_model("llama", 1), str(path))(tokens).logits
        for path in (tmp_path / "out", folder / "peft")
    ]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], base_model("llama", 1)(tokens).logits)


def test_without_a_config_the_weights_alone(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("llama")
    found = ucp.export_hf(folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"adapter_model.safetensors", "ucp_export.json"} and not found.loadable
    assert "no adapter_config.json was found" in found.notes[-1]


def exact(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The merged model by peft's own formula in fp64, from what peft wrote."""
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    adapter = load_file(folder / "peft" / "adapter_model.safetensors")
    out = load_file(folder / "base" / "model.safetensors")
    for name, tensor in adapter.items():
        inside = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora_" not in name and inside in out:
            out[inside] = tensor
    for name in out:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for down, up in (("lora_A.weight", "lora_B.weight"),) + (
            ("lora_embedding_A", "lora_embedding_B"),
        ):
            if f"{module}.{down}" not in adapter:
                continue
            a, b = (adapter[f"{module}.{part}"].double() for part in (down, up))
            alpha = 20 if kind == "rslora" and "1.self_attn.q_proj" in name else 12
            scale = alpha / (len(a) ** 0.5 if config["use_rslora"] else len(a))
            product = b @ a
            conv1d = "c_attn" in name if kind == "mixed" else config["fan_in_fan_out"]
            turned = down != "lora_A.weight" or conv1d
            out[name] = (out[name].double() + scale * (product.T if turned else product)).float()
    return out


@pytest.mark.parametrize(
    ("kind", "zero", "exclude"),
    [("llama", 1, True), ("llama", 2, False), ("gpt2", 1, True), ("rslora", 2, True)]
    + [("embedding", 1, True), ("mixed", 1, True)],
)
def test_merged_into_the_base(
    saved: Saved, tmp_path: Path, kind: str, zero: int, exclude: bool
) -> None:
    """The exact sum, rounded once; peft's own sum in fp32 is that but for its rounding."""
    folder, _ = saved(kind, zero, exclude)
    ucp.export_hf(
        folder, tmp_path / "out", config=folder / "peft", merge=folder / "base", verify=True
    )
    found = twins.read(tmp_path / "out")
    assert twins.same(found, exact(folder, kind)) == []
    base, theirs = (load_file(folder / name / "model.safetensors") for name in ("base", "merged"))
    changed = [name for name in base if not torch.equal(base[name], found[name])]
    assert len(changed) >= 3 and {*found} == {*base}
    assert all(torch.allclose(found[n], theirs[n], rtol=1e-6, atol=1e-7) for n in found)
    assert not all(torch.allclose(base[n], theirs[n], rtol=1e-6, atol=1e-7) for n in found)
    assert (tmp_path / "out" / "config.json").is_file()


def test_files_of_the_run_and_of_its_base(saved: Saved, tmp_path: Path) -> None:
    """A merged model has the run's tokenizer, and what its base's folder has besides."""
    folder, _ = saved("llama")
    config, base = tmp_path / "peft", tmp_path / "base"
    shutil.copytree(folder / "peft", config)
    shutil.copytree(folder / "base", base)
    for name in ("tokenizer.json", "added_tokens.json"):
        (config / name).write_text(f"the run's {name}")
    for name in ("tokenizer.json", "merges.txt", "processor_config.json", "chat_template.jinja"):
        (base / name).write_text(f"the base's {name}")
    ucp.export_hf(folder, tmp_path / "out", config=config, merge=base)
    names = {
        path.name: path.read_text()
        for path in (tmp_path / "out").iterdir()
        if path.suffix in (".json", ".txt", ".jinja")
    }
    assert names["tokenizer.json"] == "the run's tokenizer.json"
    assert names["processor_config.json"] == "the base's processor_config.json"
    assert "added_tokens.json" in names and "merges.txt" not in names
    assert "adapter_config.json" not in names and "config.json" in names


def test_a_base_whose_files_have_other_names(saved: Saved, tmp_path: Path) -> None:
    """An adapter of memory's names is merged into a folder of released ones, which it stays; as
    peft merges, within its rounding."""
    folder, _ = saved("images", 2, False)
    base, theirs = (load_file(folder / name / "model.safetensors") for name in ("base", "merged"))
    assert "language_model.model.embed_tokens.weight" in base
    options = {"config": folder / "peft", "merge": folder / "base"}
    ucp.export_hf(folder, tmp_path / "out", verify=True, **options)
    found = twins.read(tmp_path / "out")
    assert {*found} == {*base} == {*theirs}
    assert all(torch.allclose(found[n], theirs[n], rtol=1e-6, atol=1e-7) for n in found)
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert "language_model.lm_head.weight" in changed
    wrong = tmp_path / "base"
    shutil.copytree(folder / "base", wrong)
    base["language_model.model.layers.1.mlp.up_proj.weight"][3, 2] += 1e-3
    save_file(base, wrong / "model.safetensors", {"format": "pt"})
    said = refused(ModelMismatchError, folder, tmp_path / "no", config=folder / "peft", merge=wrong)
    assert "language_model.model.layers.1.mlp.up_proj.weight" in said


def test_transformers_loads_the_merged_model(saved: Saved, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    folder, _ = saved("llama")
    options = {"config": folder / "peft", "merge": folder / "base"}
    ucp.export_hf(folder, tmp_path / "out", dtype="bfloat16", max_shard_size=3000, **options)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    want = {name: tensor.bfloat16() for name, tensor in exact(folder, "llama").items()}
    assert twins.same({k: v for k, v in model.state_dict().items()}, want) == []


def refused(error: type[ucp.UcpError], folder: Path, out: Path, **options: Any) -> str:
    with pytest.raises(error) as caught:
        ucp.export_hf(folder, out, **options)
    assert not out.exists() and not [*out.parent.glob(".*")]
    return str(caught.value)


def test_what_can_not_be_merged(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("llama")
    out, peft, base = tmp_path / "out", folder / "peft", folder / "base"
    assert "--config" in refused(UsageError, folder, out, merge=base)
    said = refused(
        UnsupportedError, saved("dora")[0], out, config=saved("dora")[0] / "peft", merge=base
    )
    assert "use_dora" in said
    said = refused(ModelMismatchError, folder, out, config=peft, merge=saved("gpt2")[0] / "base")
    assert "model.layers.0.self_attn.q_proj.weight: the base has no such tensor" in said
    assert "lm_head.weight" in said  # all at once
    wrong = tmp_path / "config"
    for key, value, error, word in (
        ("init_lora_weights", "pissa", UnsupportedError, "took weights out"),
        # the adapter is used behind these tokens alone
        ("alora_invocation_tokens", [1, 2], UnsupportedError, "alora_invocation_tokens: [1, 2]"),
        ("of_a_later_peft", True, UnsupportedError, "of_a_later_peft: True"),
        ("r", 5, ModelMismatchError, "rank 5"),
        ("peft_type", "IA3", ModelMismatchError, "IA3"),
    ):
        shutil.copytree(peft, wrong)
        config = json.loads((wrong / "adapter_config.json").read_text()) | {key: value}
        (wrong / "adapter_config.json").write_text(json.dumps(config))
        assert word in refused(error, folder, out, config=wrong, merge=base)
        shutil.rmtree(wrong)


def test_a_scale_that_nobody_says(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved("llama")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    (tmp_path / "wrong").mkdir()
    options = {"config": tmp_path / "wrong", "merge": folder / "base"}
    for change, word in (
        ({"lora_alpha": "x"}, "lora_alpha 'x'"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"alpha_pattern": {"[": 3}}, "alpha_pattern"),
        ({"alpha_pattern": "x"}, "alpha_pattern 'x'"),
        ({"r": None}, "r None"),
        ({"rank_pattern": [[2]]}, "rank_pattern"),
    ):
        text = json.dumps({**config, **change})
        (tmp_path / "wrong" / "adapter_config.json").write_text(text)
        assert word in refused(DamagedFileError, folder, tmp_path / "out", **options)


def test_one_name_of_a_tied_tensor(saved: Saved, tmp_path: Path) -> None:
    """The head of the trained model is not the trained embedding, but would be that of the base."""
    folder, _ = saved("tied")
    options = {"config": folder / "peft", "merge": folder / "base"}
    said = refused(UnsupportedError, folder, tmp_path / "out", **options)
    assert "model.embed_tokens.weight" in said and "lm_head.weight as in the base" in said
    ucp.export_hf(folder, tmp_path / "out", config=folder / "peft")  # the adapter itself


def test_square_matrices_of_which_the_config_does_not_speak(saved: Saved, tmp_path: Path) -> None:
    """peft saves `fan_in_fan_out` as it is for the last layer, which here is the head."""
    folder, _ = saved("square")
    options = {"config": folder / "peft", "merge": folder / "base"}
    said = refused(UnsupportedError, folder, tmp_path / "out", **options)
    assert "transformer.h.1.attn.c_proj.weight" in said and "lm_head" not in said
    assert not json.loads((folder / "peft" / "adapter_config.json").read_text())["fan_in_fan_out"]


def test_another_base_is_found_by_the_frozen_weights(saved: Saved, tmp_path: Path) -> None:
    """Of the same shapes; a checkpoint without its frozen weights can't tell."""
    folder, _ = saved("llama", 2, False)
    shutil.copytree(folder / "base", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] += 1e-3
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    options = {"config": folder / "peft", "merge": tmp_path / "base"}
    said = refused(ModelMismatchError, folder, tmp_path / "out", **options)
    assert "model.layers.1.mlp.up_proj.weight" in said
    blind, _ = saved("llama", 1, True)
    ucp.export_hf(blind, tmp_path / "out", **options)


def test_names_that_are_not_pefts() -> None:
    """Only what peft wrapped is renamed: others' factors have its words without its wrapper."""

    def of(*names: str) -> Manifest:
        specs = tuple(ParamSpec(name, (4, 2), "float32") for name in names)
        return Manifest(Keeper.ZERO_1_OR_2, Mesh(), specs, ())

    inner = "base_model.model.lm"
    assert (
        adapter_of(of("layer.q.weight", "layer.q.lora_A.weight", "layer.q.lora_B.weight"), "")
        is None
    )
    found = adapter_of(of(f"{inner}.lora_A.mine.weight", f"{inner}.lora_B.mine.weight"), "")
    assert found is not None and found.name == "mine"
    assert [*found.files.values()] == [f"{inner}.lora_A.weight", f"{inner}.lora_B.weight"]
    pairs = [f"{inner}.lora_{part}.{name}.weight" for name in ("one", "two") for part in "AB"]
    beside = adapter_of(of(*pairs[:2], f"{inner}.weight"), "")
    assert beside is not None and beside.beside == [f"{inner}.weight"]
    for wrong in (
        of(f"{inner}.vera_lambda_b.default"),
        of(*pairs),
        of("prompt_encoder.default.embedding.weight", "prompt_encoder.default.mlp.0.weight"),
    ):
        with pytest.raises(UnsupportedError):
            adapter_of(wrong, "")


def test_a_merge_of_nothing(tmp_path: Path, saved: Saved) -> None:
    folder, _ = saved("llama")
    ucp.export_hf(folder, tmp_path / "merged", config=folder / "peft", merge=folder / "base")
    said = refused(
        UsageError,
        tmp_path / "merged",
        tmp_path / "out",
        config=tmp_path / "merged",
        merge=folder / "base",
    )
    assert "holds no adapter" in said


PAIRS = [
    ("llama", 2, True, 4, 1),
    ("llama", 1, False, 1, 3),
    ("llama", 3, True, 2, 2),
    ("dora", 1, True, 4, 2),
    ("gpt2", 1, True, 4, 3),
    ("rslora", 2, True, 1, 1),
    ("experts", 3, True, 1, 2),
    ("tokens and head", 2, True, 2, 3),
    ("whole layers beside", 3, False, 1, 1),
]


@pytest.mark.parametrize(("kind", "zero", "exclude", "world", "target"), PAIRS)
def test_pair(
    ranks: RankPool, saved: Saved, kind: str, zero: int, exclude: bool, world: int, target: int
) -> None:
    """Without its frozen weights, which the model has from its base."""
    folder, run = saved(kind, zero, exclude)
    job = JOBS + "resume"
    check(ranks.run(world, job, kind, target, str(folder), run["states"], exclude))


HALF = [
    ("llama", 2, True, 4, 1, "bf16"),
    ("llama", 3, True, 1, 0, "bf16"),
    ("gpt2", 0, True, 2, 3, "bf16"),
    ("llama", 1, True, 2, 3, "fp16"),
    ("dora", 3, True, 4, 2, "fp16"),
]


@pytest.mark.parametrize(("kind", "zero", "exclude", "world", "target", "dtype"), HALF)
def test_half_precision(
    ranks: RankPool,
    saved: Saved,
    kind: str,
    zero: int,
    exclude: bool,
    world: int,
    target: int,
    dtype: str,
) -> None:
    folder, run = saved(kind, zero, exclude, dtype)
    options = {"dtype": dtype}
    job = JOBS + "resume"
    check(ranks.run(world, job, kind, target, str(folder), run["states"], exclude, **options))


@pytest.mark.parametrize("named", [True, False])
def test_tied_weights_that_were_left_out(
    ranks: RankPool, saved: Saved, tmp_path: Path, named: bool
) -> None:
    """DeepSpeed leaves out the embedding, and at stage 0 not the head, which is the same."""
    folder, run = saved("gpt2", 0, True, "bf16")
    shutil.copytree(folder / "tag", tmp_path / "tag")
    allow = {"missing"} if named else {"missing", "extra"}
    if not named:
        without_manifest(tmp_path)
        with pytest.raises(RanksFailed, match="leaves out their first names alone"):
            ranks.run(1, JOBS + "resume", "gpt2", 0, str(tmp_path), {}, {"missing"}, dtype="bf16")
    assert ucp.verify(tmp_path / "tag", deep=True).findings == ()
    job = JOBS + "resume"
    for zero in (0, 2):
        check(ranks.run(2, job, "gpt2", zero, str(tmp_path), run["states"], allow, dtype="bf16"))


@pytest.mark.parametrize("fault", ["one bit", "one moment", "one step"])
def test_a_planted_fault_is_seen(ranks: RankPool, saved: Saved, fault: str) -> None:
    folder, run = saved("llama", 2, True)
    job = JOBS + "resume"
    check_fails(ranks.run(1, job, "llama", 1, str(folder), run["states"], True, fault))
