"""Logits of megatron-core and transformers for the same weights and tokens, both directions.

In fp64, norms and softmax too: what is left is rounding. Each setting that must agree has a control
in which it does not.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from pretrain.mcore.experts import Experts
from pretrain.mcore.models import ModelConfig
from tests.engines import hf_jobs
from tests.engines.hf_twin import transformers
from tests.ranks import RankPool
from tests.reshard import twins

pytestmark = pytest.mark.ranks
EQUAL, EQUAL_FP32, MORE = 1e-11, 1e-4, 6
BASE = ModelConfig(
    "llama",
    layers=3,
    hidden=64,
    head_dim=8,
    ffn=96,
    heads=8,
    groups=4,
    vocab=256,
    true_vocab=251,
    positions=32,
)
GPT = replace(BASE, family="gpt", groups=8, ffn=256, tied=True)
MIXTRAL = replace(BASE, family="mixtral", experts=Experts(4, ffn=48))
QWEN3_MOE = replace(BASE, family="qwen3_moe", head_dim=16, experts=Experts(4, ffn=48, every=2))
SHAPES = {
    "gpt tied": GPT,
    "gpt untied": replace(GPT, tied=False, norm_eps=1e-3),
    "gpt, tanh": replace(GPT, tanh_gelu=True),
    "llama": BASE,
    "llama tied, one group": replace(BASE, tied=True, groups=1),
    "llama, large heads": replace(BASE, groups=8, head_dim=24),
    "llama, base": replace(BASE, rotary_base=5e5, norm_eps=1e-6),
    "llama, scaled": replace(BASE, rope_factor=8.0, rotary_base=5e5),
    "llama, interpolated": replace(BASE, interpolation=2.0),
    "mistral": replace(BASE, family="mistral", rotary_base=1e6),
    "qwen2": replace(BASE, family="qwen2", tied=True),
    "qwen3": replace(BASE, family="qwen3", head_dim=16, norm_eps=1e-6),
    "mixtral": MIXTRAL,
    "qwen3_moe": replace(QWEN3_MOE, norm_eps=1e-6),
    "qwen3_moe, softmax over all": replace(
        QWEN3_MOE, experts=Experts(5, ffn=32, topk=1, pre_softmax=True)
    ),
    "mixtral, three of five": replace(MIXTRAL, groups=2, experts=Experts(5, ffn=32, topk=3)),
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# settings of config.json that are changed, and must show
CONTROLS: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("gpt tied", {"activation_function": "gelu_new"}),
    "gelu's tanh form": ("gpt, tanh", {"activation_function": "gelu"}),
    "epsilon of gpt": ("gpt tied", {"layer_norm_epsilon": 1e-6}),
    "attention scale": ("gpt tied", {"scale_attn_by_inverse_layer_idx": True}),
    "epsilon of llama": ("llama", {"rms_norm_eps": 1e-6}),
    "rotary base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "no scaling": (
        "llama, scaled",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "scaled from another length": (
        "llama, scaled",
        {"rope_parameters": {**LLAMA_3, "original_max_position_embeddings": 16}},
    ),
    "no interpolation": (
        "llama, interpolated",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "rotary base of mixtral": (
        "mixtral",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "epsilon of norms on q and k": ("qwen3", {"rms_norm_eps": 1e-5}),
    "weights of all experts": ("qwen3_moe", {"norm_topk_prob": False}),
    "experts of a token": ("mixtral", {"num_experts_per_tok": 3}),
}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max())


@dataclass
class Computed:
    """What both sides computed, by the name of the shape, of the control, or of the fault."""

    ours: dict[str, dict[str, torch.Tensor]]
    theirs: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


TOKENS = torch.randint(251, (4, 32), generator=torch.Generator().manual_seed(3))


def swapped(folder: Path, out: Path, first: str, second: str) -> Path:
    """A copy in which two tensors of one shape have each other's values in every layer."""
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    for name in [name for name in held if first in name]:
        other = name.replace(first, second)
        held[name], held[other] = held[other].clone(), held[name].clone()
    out.mkdir()
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 32,
    "vocab_size": 251,
}
WIDE = {**COMMON, "intermediate_size": 96, "num_key_value_heads": 4}
# models that transformers makes, and as megatron-core builds them
MADE: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "gpt": (
        {
            "model_type": "gpt2",
            **{"n_embd": 64, "n_head": 8, "n_layer": 3, "n_positions": 32, "vocab_size": 251},
            "activation_function": "gelu",
        },
        replace(GPT, vocab=251),
    ),
    "llama": (
        {"model_type": "llama", **WIDE},
        replace(BASE, vocab=251, norm_eps=1e-6),
    ),
    "mistral": (
        {"model_type": "mistral", **WIDE, "sliding_window": None, "rms_norm_eps": 1e-5},
        replace(BASE, family="mistral", vocab=251),
    ),
    "qwen2": (
        {"model_type": "qwen2", **WIDE, "rms_norm_eps": 1e-5},
        replace(BASE, family="qwen2", vocab=251),
    ),
    "qwen3": (
        {"model_type": "qwen3", **WIDE, "rms_norm_eps": 1e-5, "head_dim": 16},
        replace(BASE, family="qwen3", vocab=251, head_dim=16),
    ),
    "qwen3_moe": (
        {
            **{"model_type": "qwen3_moe", **WIDE, "rms_norm_eps": 1e-5, "head_dim": 16},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"norm_topk_prob": True, "mlp_only_layers": [1]},
        },
        replace(QWEN3_MOE, vocab=251),
    ),
    "mixtral": (
        {"model_type": "mixtral", **WIDE, "num_local_experts": 4},
        replace(MIXTRAL, vocab=251, rotary_base=1e6, experts=Experts(4, ffn=96)),
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Folders that `save_pretrained` wrote, and the logits of their models."""
    folder = tmp_path_factory.mktemp("made")
    requests = [
        {"create": True, "config": config, "folder": str(folder / name), "tokens": TOKENS}
        for name, (config, _) in MADE.items()
    ]
    theirs = transformers(requests)
    return {
        name: (folder / name, found["logits"]) for name, found in zip(MADE, theirs, strict=True)
    }


@pytest.mark.parametrize("family", MADE)
def test_a_model_of_transformers_computes_the_same_here(
    ranks: RankPool, made: dict[str, tuple[Path, torch.Tensor]], family: str
) -> None:
    folder, logits = made[family]
    args = [MADE[family][1]], [str(folder)], TOKENS
    ((found,),) = ranks.run(1, hf_jobs.load_and_compute, *args, timeout_s=120)
    assert float(found.abs().max()) > 1 and difference(found, logits) < EQUAL


FILES = ("5GB", "60KB")


@pytest.fixture(scope="module")
def saved_again(
    made: dict[str, tuple[Path, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Each model imported, exported, loaded by transformers and saved again."""
    folder = tmp_path_factory.mktemp("again")
    requests: list[dict[str, Any]] = []
    for family, (origin, _) in made.items():
        ucp.import_hf(origin, folder / family / "native", target=ucp.Mesh(dp=2, zero=1))
        for size in FILES:
            out = folder / family / f"out {size}"
            ucp.export_hf(folder / family / "native", out, max_shard_size=size)
            ask = {"folder": str(out), "tokens": TOKENS[:1], "dtype": "float32"}
            again = {"save": str(folder / family / f"saved {size}"), "max_shard_size": size}
            requests.append({**ask, **again})
    transformers(requests)
    return folder


@pytest.mark.parametrize("size", FILES)
@pytest.mark.parametrize("family", MADE)
def test_the_files_are_those_of_save_pretrained(
    saved_again: Path, made: dict[str, tuple[Path, torch.Tensor]], family: str, size: str
) -> None:
    """Byte by byte, with the tensors that were imported. But for several files of experts:
    transformers divides views of its stacked tensors, and counts the bytes of gate and up once."""
    folders = [saved_again / family / f"{name} {size}" for name in ("out", "saved")]
    assert twins.same(*map(twins.read, folders)) == []
    assert twins.same(twins.read(folders[0]), twins.read(made[family][0])) == []
    if MADE[family][1].experts and size != "5GB":
        return
    ours, theirs = (
        {path.name: path.read_bytes() for path in folder.glob("model*")} for folder in folders
    )
    assert len(ours) == 1 if size == "5GB" else len(ours) > 4
    assert {*ours} == {*theirs} and [name for name in ours if ours[name] != theirs[name]] == []


@pytest.fixture(scope="module")
def computed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    """All shapes in one process of each side: starting them takes longer than what they do."""
    folder = tmp_path_factory.mktemp("parity")
    names = [*SHAPES]
    (ours,) = ranks.run(
        1, hf_jobs.save_and_compute, [*SHAPES.values()], str(folder), TOKENS, MORE, timeout_s=300
    )
    found = Computed(dict(zip(names, ours, strict=True)))
    requests: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        out = folder / f"hf{number}"
        ucp.export_hf(folder / str(number), out, verify=True)
        ask = {"folder": str(out), "tokens": TOKENS}
        requests[name] = {**ask, "prompt": TOKENS[:, :4], "more": MORE}
        requests[f"{name}, fp32"] = {**ask, "dtype": "float32"}
    for control, (name, config) in CONTROLS.items():
        requests[control] = {**requests[name], "config": config}
    llama = Path(requests["llama"]["folder"])
    for first, second in (("gate_proj", "up_proj"), ("k_proj", "v_proj")):
        out = swapped(llama, folder / first, first, second)
        requests[first] = {"folder": str(out), "tokens": TOKENS}
    for request, theirs in zip(requests, transformers([*requests.values()]), strict=True):
        found.theirs[request] = theirs
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_greedy_tokens(computed: Computed, name: str) -> None:
    ours, theirs = computed.ours[name], computed.theirs[name]
    assert float(ours["float64"].abs().max()) > 1
    assert difference(ours["float64"], theirs["logits"]) < EQUAL
    assert difference(ours["float32"], computed.theirs[f"{name}, fp32"]["logits"]) < EQUAL_FP32
    assert torch.equal(ours["greedy"], theirs["generated"])


@pytest.mark.parametrize("control", CONTROLS)
def test_a_setting_that_is_wrong_shows(computed: Computed, control: str) -> None:
    name, _ = CONTROLS[control]
    assert difference(computed.ours[name]["float64"], computed.theirs[control]["logits"]) > 1e-6


@pytest.mark.parametrize("control", ["gate_proj", "k_proj"])
def test_tensors_in_each_others_place_show(computed: Computed, control: str) -> None:
    found = difference(computed.ours["llama"]["float64"], computed.theirs[control]["logits"])
    assert found > 1e-2
