"""LoRA: the real peft around transformers' models under DeepSpeed. Adapters go out in peft's own
format; runs resume on other meshes."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import DamagedFileError, ModelMismatchError, UnsupportedError
from megatron_ucp.reshard.hugging_face.adapter import adapter_of
from tests.engines.lora_jobs import BESIDE, FORMS, Adapted, base_model
from tests.engines.sources import Sources, check, check_fails, without_manifest
from tests.ranks import RanksFailed
from tests.reshard import twins

pytestmark = pytest.mark.ranks
Saved = Callable[..., Path]


@pytest.fixture
def saved(sources: Sources) -> Saved:
    """(kind, ZeRO stage, without frozen weights) -> the folder of a run on two ranks."""

    def get(kind: str, zero: int = 1, exclude: bool = True, dtype: str = "fp32") -> Path:
        setup = Adapted(kind, zero, dtype)
        return Path(sources.get(2, setup, more=1, filled=False, exclude=exclude))

    return get


def resumed(
    sources: Sources, world: int, setup: Adapted, folder: Path, allow: Any = (), **how: Any
) -> list[dict[str, Any]]:
    """Another seed's adapter, then the checkpoint's; a step follows."""
    how |= {"tags": ("trained",), "allow": allow} if allow else {"tags": ("trained",)}
    return sources.resume(world, replace(setup, seed=8), folder, more=1, **how)


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
    folder = saved(kind, zero, exclude)
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
    folder = saved(kind, 3, False)
    trained = torch.load(folder / "trained.pt")
    config = folder / "peft"
    done = ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=config, verify=True)
    want = load_file(config / "adapter_model.safetensors")
    for found in (tmp_path / "out", folder / "live"):
        assert twins.same(load_file(found / "adapter_model.safetensors"), want) == []
    notes = "\n".join(done.notes)
    assert ("NOT IN THE ADAPTER" in notes) == (kind in BESIDE) == (not done.complete)
    if kind not in BESIDE:
        return
    beside = {n for n in trained if not re.search(r"\.lora_|default", n)}
    assert f"{len(beside)} tensors" in notes and any(name in notes for name in beside)
    # the way that the note names has all of it
    whole = ucp.fp32_state_dict(folder)
    assert all(torch.equal(whole[name], value) for name, value in trained.items())


def test_peft_loads_adapters_of_experts_and_tokens(saved: Saved, tmp_path: Path) -> None:
    from peft import PeftModel

    for kind in ("experts", "tokens and head"):
        folder = saved(kind, 3, False)
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
    folder = saved("experts", 3, False)
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

    folder = saved("llama", 3)
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "peft")
    tokens = torch.arange(8).view(1, 8)
    logits = [
        PeftModel.from_pretrained(base_model("llama", 1), str(path))(tokens).logits
        for path in (tmp_path / "out", folder / "peft")
    ]
    assert torch.equal(*logits)
    assert not torch.equal(logits[0], base_model("llama", 1)(tokens).logits)


def test_without_a_config_the_weights_alone(saved: Saved, tmp_path: Path) -> None:
    folder = saved("llama")
    found = ucp.export_hf(folder, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"adapter_model.safetensors", "ucp_export.json"} and not found.loadable
    assert "no adapter_config.json was found" in found.notes[-1]


def refused(error: type[ucp.UcpError], folder: Path, out: Path, **options: Any) -> str:
    with pytest.raises(error) as caught:
        ucp.export_hf(folder, out, **options)
    assert not out.exists() and not [*out.parent.glob(".*")]
    return str(caught.value)


def test_peft_merges_what_is_exported(saved: Saved, tmp_path: Path) -> None:
    """Bit for bit what it merges of the live model."""
    from peft import PeftModel

    folder = saved("llama")
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", config=folder / "peft")
    model = PeftModel.from_pretrained(base_model("llama", 1), str(tmp_path / "out"))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    found, theirs, base = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "merged", folder / "merged", folder / "base")
    )
    assert twins.same(found, theirs) == []
    assert sum(not torch.equal(base[name], found[name]) for name in base) >= 3


def test_a_config_of_another_adapter(saved: Saved, tmp_path: Path) -> None:
    folder = saved("llama")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    (tmp_path / "wrong").mkdir()
    cases: list[tuple[dict[str, Any], type[ucp.UcpError], str]] = [
        ({"r": None}, DamagedFileError, "r None"),
        ({"rank_pattern": [[2]]}, DamagedFileError, "rank_pattern"),
        ({"r": 5}, ModelMismatchError, "rank 5"),
        ({"peft_type": "IA3"}, ModelMismatchError, "IA3"),
    ]
    for change, error, word in cases:
        text = json.dumps({**config, **change})
        (tmp_path / "wrong" / "adapter_config.json").write_text(text)
        assert word in refused(error, folder, tmp_path / "out", config=tmp_path / "wrong")


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
        of("prompt_encoder.default.embedding.weight"),
        of(f"{inner}.ia3_l.default"),
        of(f"{inner}.trainable_tokens_delta.default"),
        of(*(f"{inner}.lora_{part}.default" for part in "ABE")),
    ):
        with pytest.raises(UnsupportedError):
            adapter_of(wrong, "")


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
@pytest.mark.cases(5)
def test_pair(
    sources: Sources, saved: Saved, kind: str, zero: int, exclude: bool, world: int, target: int
) -> None:
    """Without its frozen weights, which the model has from its base."""
    folder, allow = saved(kind, zero, exclude), {"missing"} if exclude else ()
    check(resumed(sources, world, Adapted(kind, target), folder, allow))


HALF = [
    ("llama", 2, True, 4, 1, "bf16"),
    ("llama", 3, True, 1, 0, "bf16"),
    ("gpt2", 0, True, 2, 3, "bf16"),
    ("llama", 1, True, 2, 3, "fp16"),
    ("dora", 3, True, 4, 2, "fp16"),
]


@pytest.mark.parametrize("case", HALF, ids=str)
def test_half_precision(sources: Sources, saved: Saved, case: tuple[Any, ...]) -> None:
    kind, zero, exclude, world, target, dtype = case
    folder = saved(kind, zero, exclude, dtype)
    check(resumed(sources, world, Adapted(kind, target, dtype), folder, {"missing"}))


@pytest.mark.parametrize("named", [True, False])
def test_tied_weights_that_were_left_out(
    sources: Sources, saved: Saved, tmp_path: Path, named: bool
) -> None:
    """DeepSpeed leaves out the embedding, and at stage 0 not the head, which is the same."""
    folder, tied = saved("gpt2", 0, True, "bf16"), Adapted("gpt2", 0, "bf16")
    shutil.copytree(folder, tmp_path / "run")
    run = tmp_path / "run"
    if not named:
        without_manifest(run)
        words, more = {"missing", "weights"}, {"load_optimizer_states": False}
        with pytest.raises(RanksFailed, match="leaves out their first names alone"):
            resumed(sources, 1, tied, run, words, **more)
        for rank in resumed(sources, 2, tied, run, words | {"extra"}, **more):
            kinds = {line.partition(" ")[0] for line in rank["differences"]["trained"]}
            assert kinds and not kinds & {"weights", "values"}
    assert ucp.verify(run / "trained", deep=True).findings == ()
    for zero in (0, 2) if named else ():  # without a manifest its states have no names
        check(resumed(sources, 2, replace(tied, zero=zero), run, {"missing"}))


@pytest.mark.parametrize("fault", ["one bit", "one moment", "one step"])
def test_a_planted_fault_is_seen(sources: Sources, saved: Saved, fault: str) -> None:
    folder = saved("llama", 2, True)
    check_fails(resumed(sources, 1, Adapted("llama", 1), folder, {"missing"}, plant=fault))
