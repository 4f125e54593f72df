"""The names of released folders, by transformers' own tables: exports of checkpoints on paper,
compared with what save_pretrained writes of the same values; and what is said where the tables, or
transformers, are not there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.reshard.hugging_face import released
from megatron_ucp.reshard.hugging_face.names import twin_of
from megatron_ucp.reshard.hugging_face.traced import Traced, UntracedError
from tests.engines.model_classes import CLASSES, tiny_model
from tests.reshard import paper, twins


def on_paper(model: Any, folder: Path) -> Path:
    """A native checkpoint with the model's parameters; the model gets their values."""
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    written = paper.plain_model(shapes)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(written.truth(name))
    return paper.write(written, folder / "native" / "step7")


def compared(model: Any, tmp_path: Path) -> tuple[list[str], str]:
    """Where an export differs from what save_pretrained writes; its notes."""
    source = on_paper(model, tmp_path)
    model.save_pretrained(tmp_path / "want")
    done = ucp.export_hf(source, tmp_path / "out", config=tmp_path / "want", verify=True)
    assert ucp.diff(source, tmp_path / "want") == ucp.diff(tmp_path / "want", source) == []
    want = load_file(tmp_path / "want" / "model.safetensors")
    held = {name for name, _ in model.named_buffers()}
    want = {name: value for name, value in want.items() if name not in held}
    return twins.same(twins.read(tmp_path / "out"), want), "\n".join(done.notes)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """transformers' tables, to change for a test."""
    from transformers import conversion_mapping

    conversion_mapping.get_checkpoint_conversion_mapping("llama")
    found: Any = conversion_mapping._checkpoint_conversion_mapping_cache
    changed = dict(found)
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", changed)
    return changed


def converter(sources: Any, targets: Any, *operations: Any) -> Any:
    from transformers.core_model_loading import WeightConverter

    return WeightConverter(sources, targets, operations=[*operations])


def fused(kind: str) -> list[Any]:
    """Tables in which files have other tensors than memory, in several ways."""
    from transformers import core_model_loading as ops

    mlp, attention = r"\.mlp\.", r"\.self_attn\."
    return {
        "one above the other": [
            converter(
                rf"{mlp}gate_up\.weight",
                [rf"{mlp}gate_proj\.weight", rf"{mlp}up_proj\.weight"],
                ops.Chunk(dim=0),
            )
        ],
        "transposed": [
            converter(rf"{mlp}down\.weight", rf"{mlp}down_proj\.weight", ops.Transpose(0, 1))
        ],
        "several rows": [
            converter(
                rf"{attention}qkv\.weight",
                [rf"{attention}{name}_proj\.weight" for name in "qkv"],
                ops.Split(dim=0),
            ),
            ops.WeightRenaming(r"^model\.", "backbone."),
        ],
        "rows in turns": [
            converter(rf"{mlp}down\.weight", rf"{mlp}down_proj\.weight", ops.Interleave(dim=0))
        ],
        "side by side": [
            converter(
                rf"{mlp}gate_up\.weight",
                [rf"{mlp}gate_proj\.weight", rf"{mlp}up_proj\.weight"],
                ops.Chunk(dim=1),
            )
        ],
    }[kind]


@pytest.mark.parametrize("name", ["Qwen3MoeForCausalLM", "GPTNeoXForCausalLM", "LlamaForCausalLM"])
def test_the_files_of_save_pretrained(tmp_path: Path, name: str) -> None:
    assert compared(tiny_model(name, 1), tmp_path) == ([], "")


@pytest.mark.parametrize("kind", ["one above the other", "transposed", "several rows"])
def test_tensors_that_are_others(tables: Any, tmp_path: Path, kind: str) -> None:
    tables["llama"] = fused(kind)
    assert compared(tiny_model("LlamaForCausalLM", 1), tmp_path) == ([], "")
    names = {*twins.read(tmp_path / "out")}
    lost = {"one above the other": "gate_proj", "transposed": "down_proj", "several rows": "q_proj"}
    assert not any(lost[kind] in name for name in names)


@pytest.mark.parametrize("kind", ["rows in turns", "side by side"])
def test_what_can_not_be_said_is_noted(tables: Any, tmp_path: Path, kind: str) -> None:
    """Memory's names, which transformers loads; the note's way leads to the released ones."""
    from transformers import AutoModelForCausalLM

    tables["llama"] = fused(kind)
    model = tiny_model("LlamaForCausalLM", 1)
    source = on_paper(model, tmp_path)
    model.save_pretrained(tmp_path / "want")
    done = ucp.export_hf(source, tmp_path / "out", config=tmp_path / "want", verify=True)
    assert any("have others, which can't be said without values" in note for note in done.notes)
    assert {*twins.read(tmp_path / "out")} == {name for name, _ in model.named_parameters()}
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    del again._weight_conversions
    again.save_pretrained(tmp_path / "again")
    found = [twins.read(tmp_path / folder) for folder in ("again", "want")]
    assert twins.same(*found) == []


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note says which readers the names suit; experts are found all the same."""
    monkeypatch.setattr(released, "is_installed", lambda: False)
    model = tiny_model("Qwen3MoeForCausalLM", 1)
    source = on_paper(model, tmp_path)
    model.save_pretrained(tmp_path / "want")
    done = ucp.export_hf(source, tmp_path / "out", config=tmp_path / "want", verify=True)
    assert any("transformers is not installed" in note for note in done.notes)
    assert {*twins.read(tmp_path / "out")} == {name for name, _ in model.named_parameters()}
    assert ucp.diff(source, tmp_path / "want") == []


def test_a_config_without_the_name_of_its_class(tmp_path: Path) -> None:
    """The first class of its model_type with these parameters; none where none has them."""
    model = tiny_model("GPTNeoXForCausalLM", 1)
    config = {**model.config.to_dict(), "architectures": None}
    specs = {n: ParamSpec(n, tuple(p.shape), "float32") for n, p in model.named_parameters()}
    found = released.released_names(config, specs)
    assert found is not None and "embed_out.weight" in found.shares and found.are_others
    wrapped = {f"policy.{name}": spec for name, spec in specs.items()}
    assert released.released_names(config, wrapped) is None
    config["architectures"] = ["GPTNeoXForSequenceClassification"]  # of another run
    found = released.released_names(config, specs)
    assert found is not None and "embed_out.weight" in found.shares


def test_code_of_its_own_has_the_names_of_memory() -> None:
    """As save_pretrained of such a class writes it; and nothing of it is looked for in the name."""
    model = tiny_model("GPTNeoXForCausalLM", 1)
    specs = {n: ParamSpec(n, tuple(p.shape), "float32") for n, p in model.named_parameters()}
    config = model.config.to_dict()
    assert released.released_names(config, specs) is not None
    assert released.released_names(config, specs, "own.GPTNeoXForCausalLM") is None
    assert released.released_names({**config, "architectures": ["Mine"]}, specs) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name",
    ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration", "GPTNeoXForCausalLM"],
)
def test_from_pretrained_gives_the_head_that_was_trained(
    tmp_path: Path, name: str, tied: bool
) -> None:
    """Tied by hand under a config that says false, in the config of the text too, and the other
    way round. The flag as it was is the control: that head is drawn, or another one."""
    import transformers

    def saying(tree: dict[str, Any], value: bool) -> dict[str, Any]:
        return {
            key: value
            if key == "tie_word_embeddings"
            else saying(one, value)
            if isinstance(one, dict)
            else one
            for key, one in tree.items()
        }

    model = tiny_model(name, 1)
    table: Any = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    head.weight = table if tied else type(table)(table.detach() + 1)
    own = dict(model.named_parameters())
    every = model.named_parameters(remove_duplicate=False)
    first, *aliases = [one for one, param in every if param is table]
    specs = [ParamSpec(n, tuple(p.shape), "float32", "trainable") for n, p in own.items()]
    ties = (Tie(first, tuple(aliases)),) if aliases else ()
    manifest = Manifest(Keeper.ZERO_3, Mesh(), tuple(specs), (), ties=ties)
    config = saying({**model.config.to_dict(), "architectures": [name]}, not tied)
    twin = twin_of(manifest, config, "", "float32", "x")
    assert "tie_word_embeddings" in twin.notes[0] and twin.is_complete, (
        "as the exported config says"
    )
    values = {n: own[share.param].detach().clone() for n, share in twin.shares.items()}
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    for said in (twin.config, saying(dict(twin.config or {}), not tied)):
        (tmp_path / "config.json").write_text(json.dumps(said))
        found: Any = getattr(transformers, name).from_pretrained(tmp_path)
        same = torch.equal(found.get_output_embeddings().weight, head.weight)
        # transformers 5 keeps a head that the files have, whatever the flag says
        assert same == (said is twin.config or not tied)


def test_no_random_number_is_drawn() -> None:
    model = tiny_model("MixtralForCausalLM", 1)
    specs = {n: ParamSpec(n, tuple(p.shape), "float32") for n, p in model.named_parameters()}
    before = torch.get_rng_state()
    assert released.released_names(model.config.to_dict(), specs) is not None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "change",
    [
        {"depths": [2, 10**9]},
        {"num_hidden_layers": 10**9},
        {"hidden_size": -3},
        {"num_attention_heads": 0},
        {"hidden_size": "x"},
        {"architectures": ["os"]},
        {"architectures": ["PreTrainedModel", 3, None]},
        {"model_type": ["llama"]},
        {"rope_parameters": {"rope_type": "of a later version"}},
        {"auto_map": {"AutoConfig": "evil.Config"}, "model_type": "evil"},
    ],
)
def test_a_config_of_anybody(change: Mapping[str, Any]) -> None:
    """Nothing is built that the checkpoint does not have, no code is run, and nothing is raised."""
    model = tiny_model("LlamaForCausalLM", 1)
    specs = {n: ParamSpec(n, tuple(p.shape), "float32") for n, p in model.named_parameters()}
    config = json.loads(json.dumps({**model.config.to_dict(), **change}))
    found = released.released_names(config, specs)
    assert found is None or not found.are_others


def test_folders_under_other_names(tmp_path: Path) -> None:
    """Names of memory, of the base class and of the oldest files, as from_pretrained takes them."""
    model = tiny_model("Qwen2VLForConditionalGeneration", 1)
    specs = {n: ParamSpec(n, tuple(p.shape), "float32") for n, p in model.named_parameters()}
    names = released.released_names(model.config.to_dict(), specs)
    assert names is not None and names.are_others
    in_memory = {name: spec.shape for name, spec in specs.items()}
    assert {name: share.param for name, share in names.of_folder(in_memory).items()} == {
        name: name for name in specs
    }
    bert = tiny_model("BertForMaskedLM", 1)
    specs = {n: ParamSpec(n, tuple(p.shape), "float32") for n, p in bert.named_parameters()}
    names = released.released_names(bert.config.to_dict(), specs)
    assert names is not None
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): (name, spec.shape)
        for name, spec in specs.items()
    }
    found = names.of_folder({name: shape for name, (_, shape) in old.items()})
    assert {name: share.param for name, share in found.items()} == {
        name: param for name, (param, _) in old.items()
    }
    base = {name.removeprefix("bert."): spec.shape for name, spec in specs.items()}
    found = names.of_folder(base)
    assert {share.param for share in found.values()} == {*specs}


def test_places_of_elements() -> None:
    """What torch does to tensors and to their places is the same."""
    one, two = torch.arange(24).view(4, 3, 2), 100 + torch.arange(12).view(2, 3, 2)
    values = {"one": one, "two": two}

    def done(a: Any, b: Any) -> Any:
        first, second = torch.chunk(a, 2, dim=0)
        stacked = torch.stack([first, b], dim=1)
        turned = torch.transpose(stacked, 0, 3).contiguous()
        return torch.cat([turned, torch.stack([second, b], dim=1).transpose(0, 3)], dim=2)

    want = done(one, two)
    found = done(*(Traced.whole(name, tuple(value.shape)) for name, value in values.items()))
    assert tuple(found.shape) == tuple(want.shape)
    made = torch.full_like(want, -1)
    for part in found.parts:
        at = tuple(slice(a, a + n) for a, n in zip(part.start, part.extent, strict=True))
        flat = values[part.name].reshape(-1)
        made[at] = torch.as_strided(flat, part.extent, part.strides, part.offset)
    assert torch.equal(made, want)
    with pytest.raises(UntracedError):
        torch.flip(Traced.whole("one", (2, 2)), [0])  # type: ignore[arg-type]
    with pytest.raises(UntracedError):
        Traced.whole("one", (2, 2)).reshape(4)


# ------------------------------------------------ what save_pretrained of the class would hold


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def checkpointing(model: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    layers = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layers))
    return model


class ValueHead(torch.nn.Module):
    """A model inside a module of the user's, as for reinforcement learning."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model, self.v_head = model, torch.nn.Linear(8, 1)


WRAPPERS = {"compiled": compiled, "checkpointing": checkpointing, "value head": ValueHead}
OFTEN = (
    *("LlamaForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Gemma2ForCausalLM"),
    *("Olmo2ForCausalLM", "DeepseekV3ForCausalLM"),  # the last one keeps weights in float32
)
# whose tensors are too large for values that tell places apart
LARGE = ("MiniMaxForCausalLM", "NemotronHForCausalLM", "MllamaForConditionalGeneration")
KINDS = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name in CLASSES
    if name not in LARGE
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("wrapper", "dtype"), [("compiled", "bfloat16"), ("value head", "float32"), ("", "bfloat16")]
)
def test_an_export_is_what_save_pretrained_would_write(
    tmp_path: Path, kind: str, wrapper: str, dtype: str
) -> None:
    """Names, dtypes and values, also of a model in a wrapper; the module's own is named."""
    model = tiny_model(kind, 3)
    _compare_with_class(model, WRAPPERS[wrapper](model) if wrapper else model, dtype, tmp_path)


@pytest.mark.parametrize("kind", OFTEN)
def test_a_model_in_activation_checkpointing_has_the_names_of_its_class(
    tmp_path: Path, kind: str
) -> None:
    model = tiny_model(kind, 3)
    _compare_with_class(model, checkpointing(model), "float32", tmp_path)


def _compare_with_class(model: Any, whole: Any, dtype: str, folder: Path) -> None:
    """An export of a run of the `whole`, in which `model` is, against what the class saves."""
    saved = whole.state_dict()  # without the prefix of checkpointed modules, with tied names
    buffers = {n: t for n, t in whole.named_buffers() if n.replace(_CHECKPOINTED, "") in saved}
    held = {name: tuple(t.shape) for name, t in (*whole.named_parameters(), *buffers.items())}
    own = dict.fromkeys(buffers, "buffer")
    dtypes = {name: str(t.dtype).removeprefix("torch.") for name, t in buffers.items()}
    written = paper.plain_model(held, dtype, own, dtypes)
    source = paper.write(written, folder / "native" / "step7")
    plain = getattr(model, "_orig_mod", model)
    with torch.no_grad():
        for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
            if name in held:
                tensor.copy_(written.truth(name))
    plain.save_pretrained(folder / "want")
    done = ucp.export_hf(source, folder / "out", config=folder / "want", verify=True)
    assert done.loadable and done.complete, done.notes
    found, want = twins.read(folder / "out"), load_file(folder / "want" / "model.safetensors")
    want = {name.replace(_CHECKPOINTED, ""): t for name, t in want.items()}
    left = {name for name in found if name.startswith("v_head.")}
    assert len(left) == (2 if isinstance(whole, ValueHead) else 0)
    assert any("v_head.weight" in note for note in done.notes) == bool(left)
    wide = _kept_in_float32(type(plain), folder / "out") if dtype == "bfloat16" else ("",)
    wide += tuple(name.removeprefix("_orig_mod.") for name in own)
    want = {name: t if name.endswith(wide) else t.bfloat16() for name, t in want.items()}
    assert twins.same({n: t for n, t in found.items() if n not in left}, want) == []


_CHECKPOINTED = "_checkpoint_wrapped_module."


def _kept_in_float32(kind: Any, folder: Path) -> tuple[str, ...]:
    """How the names end of what a class keeps in float32 in a model in bf16: files may have other
    names before that."""
    loaded = kind.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    kept = (name for name, tensor in loaded.items() if tensor.dtype == torch.float32)
    return tuple(".".join(name.split(".")[-2:]) for name in kept)


def test_tensors_that_would_be_drawn_at_random_are_said(tmp_path: Path) -> None:
    """The class of the config is another one than that of the run."""
    model = tiny_model("LlamaForCausalLM", 3)
    source = on_paper(model, tmp_path)
    model.save_pretrained(tmp_path / "want")
    tree = json.loads((tmp_path / "want" / "config.json").read_text())
    tree["architectures"] = ["LlamaForTokenClassification"]
    (tmp_path / "config.json").write_text(json.dumps(tree))
    done = ucp.export_hf(source, tmp_path / "out", config=tmp_path)
    assert not done.complete and "2 tensors of LlamaForTokenClassification" in done.notes[-1]
    assert "score.weight" in done.notes[-1] and "NOT COMPLETE" in str(done)


@pytest.mark.parametrize("is_known", [True, False])
def test_names_that_the_class_renames_are_not_drawn(
    tmp_path: Path, tables: dict[str, list[Any]], is_known: bool
) -> None:
    """All names are those of an earlier version, which `from_pretrained` renames; or of none."""
    from transformers.core_model_loading import WeightRenaming

    model = tiny_model("LlamaForCausalLM", 3)
    model.config.save_pretrained(tmp_path / "config")
    tree = json.loads((tmp_path / "config" / "config.json").read_text())
    tree |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config" / "config.json").write_text(json.dumps(tree))
    tables["llama"] = [WeightRenaming(r"^backbone\.", "model.")] if is_known else []
    names = {n.replace("model.", "backbone."): tuple(p.shape) for n, p in model.named_parameters()}
    names.pop("lm_head.weight", None)
    source = paper.write(paper.plain_model(names), tmp_path / "native" / "step7")
    done = ucp.export_hf(source, tmp_path / "out", config=tmp_path / "config")
    assert done.complete == is_known, done.notes


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_each_tensor_has_the_dtype_that_the_class_would_write(
    tmp_path: Path, dtype: str | None
) -> None:
    """In a run in bf16: a router's correction, a buffer, stays in float32, as its weight does."""
    model = tiny_model("Glm4MoeForCausalLM", 3)
    held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    buffers = [name for name, _ in model.named_buffers() if name in held]
    kinds, dtypes = dict.fromkeys(buffers, "buffer"), dict.fromkeys(buffers, "float32")
    written = paper.plain_model(held, "bfloat16", kinds, dtypes)
    source = paper.write(written, tmp_path / "native" / "step7")
    model.save_pretrained(tmp_path / "config")
    done = ucp.export_hf(source, tmp_path / "out", dtype=dtype, config=tmp_path / "config")
    found = load_file(tmp_path / "out" / "model.safetensors")
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.bfloat16).state_dict()
    kept = {name for name, tensor in loaded.items() if tensor.dtype == torch.float32}
    assert done.loadable and done.complete and len(kept) >= 2 and {*buffers} <= kept
    wide = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert wide == ({*found} if dtype == "float32" else kept)
    for name in kept:
        want = written.truth(name)  # of weights the masters
        assert torch.equal(found[name], want) and torch.equal(loaded[name], want), name


@pytest.mark.parametrize("odd", ["a width", "no attention", "nothing"])
def test_layers_of_megatron_core_that_differ_are_of_no_class(odd: str) -> None:
    """The answer is no config.json, which no such model has."""
    shapes = {"embedding.word_embeddings.weight": (8, 4)}
    for layer in range(2):
        width = 6 if odd == "a width" and layer else 8
        shapes[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] = (width, 4)
        if not (odd == "no attention" and layer):
            shapes[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = (12, 4)
    specs = [ParamSpec(name, shape, "float32", "trainable") for name, shape in shapes.items()]
    manifest = Manifest(Keeper.TORCH_DIST, Mesh(), tuple(specs), ())
    with pytest.raises(ucp.UcpError) as caught:
        twin_of(manifest, None, "", "float32", "x")
    assert ("layers that differ" in str(caught.value)) == (odd != "nothing")
    assert ("--config" in str(caught.value)) == (odd == "nothing")
