"""Models like DeepSeek-V3: from megatron-core's own stack to Hugging Face and back, to the bit, and
with the logits of transformers.

Those are compared in fp32: both sides compute routers in fp32 whatever the model is in.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp.errors import ModelMismatchError
from tests.engines import family_jobs
from tests.engines.any_models import VOCAB, AnyModel
from tests.engines.family_jobs import DEEPSEEK as KINDS
from tests.engines.hf_twin import transformers
from tests.engines.megatron_jobs import SEQUENCE
from tests.ranks import RankPool
from tests.reshard import twins

pytestmark = pytest.mark.ranks
EQUAL = 1e-4
TOKENS = torch.randint(VOCAB, (3, SEQUENCE), generator=torch.Generator().manual_seed(3))


def is_built(kind: str) -> bool:
    """Whether this megatron-core builds such a model without Transformer Engine. 0.19 wants a fused
    norm of that for queries without latents, where keys and values have a norm."""
    whole = KINDS[kind]["q_lora_rank"] is None
    return not whole or find_spec("megatron.core.transformer.mla_qk_norm_config") is None


class Computed(dict[str, Any]):
    """By kind or fault. A test of a kind that is not built is skipped."""

    def __missing__(self, kind: str) -> Any:
        assert not is_built(kind)
        pytest.skip(f"this megatron-core builds {kind} with Transformer Engine only")


@pytest.fixture(scope="module")
def computed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each kind the folder, and what both sides compute; of a fault what transformers does."""
    folder = tmp_path_factory.mktemp("deepseek")
    found = Computed()
    requests: dict[str, Path] = {}
    for kind in filter(is_built, KINDS):
        (ours,) = ranks.run(1, family_jobs.save, AnyModel(kind=kind), str(folder / kind), TOKENS)
        ucp.export_hf(folder / kind, folder / f"{kind} hf", verify=True)
        found[kind] = {"folder": folder, "ours": ours}
        requests[kind] = folder / f"{kind} hf"
    for fault, change in FAULTS.items():
        requests[fault] = changed(requests["DeepSeek-V3"], folder / fault, change)
    asked = [
        {"folder": str(out), "tokens": TOKENS, "dtype": "float32"} for out in requests.values()
    ]
    for name, said in zip(requests, transformers(asked), strict=True):
        found.setdefault(name, {})["theirs"] = said["logits"]
    return found


def changed(folder: Path, out: Path, change: Any) -> Path:
    """A copy of a folder with other tensors."""
    held = load_file(folder / "model.safetensors")
    change(held)
    out.mkdir()
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


def swap_experts(held: dict[str, torch.Tensor]) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.2.mlp.experts.{n}.{part}.weight" for n in (0, 1))
        held[one], held[other] = held[other], held[one]


def cut_by_rows(held: dict[str, torch.Tensor]) -> None:
    """All keys above all values, and not head by head."""
    rows = held["model.layers.1.self_attn.kv_b_proj.weight"]
    keys, values = rows.view(4, 2, 4, -1).unbind(1)
    parts = keys.reshape(16, -1), values.reshape(16, -1)
    held["model.layers.1.self_attn.kv_b_proj.weight"] = torch.cat(parts)


def no_bias(held: dict[str, torch.Tensor]) -> None:
    for name in [name for name in held if name.endswith("e_score_correction_bias")]:
        held[name] = torch.zeros_like(held[name])


FAULTS = {"swapped experts": swap_experts, "cut by rows": cut_by_rows, "no bias": no_bias}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same(computed: dict[str, Any], kind: str) -> None:
    ours, theirs = computed[kind]["ours"], computed[kind]["theirs"]
    assert float(ours.abs().max()) > 1 and difference(ours, theirs) < EQUAL


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(computed: dict[str, Any], fault: str) -> None:
    ours = computed["DeepSeek-V3"]["ours"]
    assert difference(ours, computed[fault]["theirs"]) > 100 * EQUAL


def comes_out_again(ranks: RankPool, setup: AnyModel, hf: Path, folder: Path) -> None:
    """The same bytes, by way of what is loaded and of what is imported."""
    ranks.run(4, family_jobs.load, setup, str(hf), str(folder / "out"))
    ucp.import_hf(hf, folder / "native" / "tag", mesh="dp=2,zero=1")
    ucp.export_hf(folder / "native" / "tag", folder / "again")
    for out in ("out", "again"):
        weights, config = "model.safetensors", "config.json"
        assert (folder / out / weights).read_bytes() == (hf / weights).read_bytes(), out
        assert json.loads((folder / out / config).read_text()) == json.loads(
            (hf / config).read_text()
        )
    assert ucp.diff(folder / "native" / "tag", hf) == []


# kind; tp, pp, ep, etp of what is loaded
LOADS = [
    ("DeepSeek-V3", (2, 1, 2, 1)),
    ("DeepSeek-V3", (1, 2, 2, 1)),
    ("yarn, groups of experts", (2, 2, 1, None)),
    ("Moonlight", (1, 1, 4, 1)),
]


@pytest.mark.parametrize(("kind", "mesh"), LOADS)
def test_in_on_another_mesh_and_out_again(
    ranks: RankPool, computed: dict[str, Any], tmp_path: Path, kind: str, mesh: Any
) -> None:
    tp, pp, ep, etp = mesh
    setup = AnyModel(kind=kind, tp=tp, pp=pp, ep=ep, etp=etp, seed=3)
    comes_out_again(ranks, setup, computed[kind]["folder"] / f"{kind} hf", tmp_path)


def test_what_is_loaded_computes_the_same(
    ranks: RankPool, computed: dict[str, Any], tmp_path: Path
) -> None:
    for kind in filter(is_built, KINDS):
        args = AnyModel(kind=kind, seed=3), str(computed[kind]["folder"] / f"{kind} hf")
        (found,) = ranks.run(1, family_jobs.load, *args, str(tmp_path / kind), TOKENS)
        assert torch.equal(found, computed[kind]["ours"])


def test_from_the_files_of_stock_megatron(computed: dict[str, Any], tmp_path: Path) -> None:
    """They say no family: the config does."""
    folder = computed["DeepSeek-V3"]["folder"]
    hf = folder / "DeepSeek-V3 hf"
    ucp.export_hf(folder / "DeepSeek-V3" / "stock", tmp_path / "out", config=hf)
    assert twins.same(twins.read(tmp_path / "out"), twins.read(hf)) == []


def test_a_copy_that_is_none_is_refused(computed: dict[str, Any], tmp_path: Path) -> None:
    """One that is left out is not missed."""
    hf = computed["DeepSeek-V3"]["folder"] / "DeepSeek-V3 hf"
    name = "model.layers.4.shared_head.head.weight"

    def other(held: dict[str, torch.Tensor]) -> None:
        held[name][0, 0] += 1

    with pytest.raises(ModelMismatchError, match="two parameters are one in the model"):
        ucp.import_hf(changed(hf, tmp_path / "a", other), tmp_path / "n", mesh="dp=1")
    without = changed(hf, tmp_path / "b", lambda held: held.pop(name))
    ucp.import_hf(without, tmp_path / "native", mesh="dp=1")
    assert ucp.diff(tmp_path / "native", hf) == []


def test_settings_that_differ_are_refused(
    ranks: RankPool, computed: dict[str, Any], tmp_path: Path
) -> None:
    hf = computed["Moonlight"]["folder"] / "Moonlight hf"
    folder = changed(hf, tmp_path / "a", lambda held: None)
    config = json.loads((folder / "config.json").read_text())
    config["routed_scaling_factor"] = 1.5
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="moe_router_topk_scaling_factor"):
        ranks.run(1, family_jobs.load, AnyModel(kind="Moonlight"), str(folder), str(tmp_path / "b"))


def test_family_and_model_must_agree(ranks: RankPool) -> None:
    (said,) = ranks.run(1, family_jobs.refused, AnyModel(kind="DeepSeek-V3"))
    assert "the family declares a parameter otherwise than the model says itself" in said
    assert "decoder.layers.1.self_attention.linear_kv_up_proj.weight" in said
