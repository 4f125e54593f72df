"""torchtitan's own modules, optimizers and checkpointer on two ranks: what they save goes on under
DeepSpeed and megatron-core's stack, and what those save goes on under torchtitan; every weight,
moment, step, setting, and the losses that follow."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import titan_jobs
from tests.engines.fsdp2_jobs import Plain
from tests.engines.test_fsdp2_pairs import MORE, STEPS, near
from tests.formats import fsdp2_runs, titan_program
from tests.ranks import RankPool
from tests.reshard.test_torchtitan import differ

pytestmark = pytest.mark.slow
if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

BASE: dict[str, Any] = {
    "vocab_size": titan_program.VOCABULARY,
    "hidden_size": titan_program.WIDTH,
    "num_hidden_layers": titan_program.LAYERS,
    "num_attention_heads": titan_program.HEADS,
    "num_key_value_heads": titan_program.GROUPS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama3": {"model_type": "llama", "intermediate_size": 24, "head_dim": 4},
    "qwen3": {
        **{"model_type": "qwen3", "intermediate_size": 24, "head_dim": 8, "rms_norm_eps": 1e-6},
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **{"model_type": "qwen3_moe", "intermediate_size": 24, "head_dim": 8},
        **{"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        "rms_norm_eps": 1e-6,
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", "intermediate_size": 24, "moe_intermediate_size": 12},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 12, "v_head_dim": 4},
        **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "routed_scaling_factor": 2.5},
        **{"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rope_interleave": True},
        "num_key_value_heads": titan_program.HEADS,
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", "intermediate_size": 12, "head_dim": 4},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128},
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
CLASSES = {
    "llama3": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


class Runs:
    """Runs of torchtitan, each made once, with the model's config beside the files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._made = folder, dict[str, Any]()

    def program(self, kind: str, folder: object, *how: object) -> Any:
        program = Path(titan_program.__file__)
        return fsdp2_runs.run(2, kind, str(folder), *map(str, how), program=program)

    def made(self, kind: str, *how: str) -> tuple[Path, Any]:
        key = "-".join((kind, *how))
        folder = self.folder / key
        if key not in self._made:
            held = self.program(kind, folder, *how, "--steps", STEPS)
            more = self.program(kind, "-", *how, "--steps", STEPS + MORE)
            self._made[key] = {**held, "more": more["losses"][STEPS:]}
            config = {**BASE, **CONFIGS[kind], "architectures": [CLASSES[kind]]}
            (folder / f"step-{STEPS}" / "config.json").write_text(json.dumps(config))
        return folder / f"step-{STEPS}", self._made[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("titan"))


HOW_IT_RUNS = (".fused", ".foreach")  # an optimizer, and not what it computes: each side's own


def goes_on(runs: Runs, kind: str, folder: Path, held: Any, *how: str) -> None:
    """torchtitan loads what was written for it, and has all that the run had."""
    again = runs.program(kind, "-", *how, "--load", folder, "--seed", 5, "--steps", MORE)
    found = differ(held, again["begun"])
    assert [key for key in found if not key.endswith(HOW_IT_RUNS)] == []
    assert near(again["losses"], held["more"])
    key = next(key for key in held["optimizer"] if key.endswith(".exp_avg"))
    again["begun"]["optimizer"][key].view(-1)[-1] += 1e-3
    assert {*differ(held, again["begun"])} - {*found} == {key}


def for_titan(out: Path, source: Path) -> Path:
    """What an engine saved, as a folder for torchtitan; the model's config is that of the folder
    that the engine had loaded."""
    shutil.copy(source / "config.json", out)
    done = ucp.convert(out, out.parent / "titan" / f"step-{STEPS}", to="torchtitan")
    return Path(done.path)


@pytest.mark.parametrize("kind", titan_program.KINDS)
def test_logits_of_transformers(runs: Runs, kind: str, tmp_path: Path) -> None:
    """In fp32: so rows of queries and keys, halves of gates and experts are where they belong."""
    from transformers import AutoModelForCausalLM

    folder, held = runs.made(kind)
    titan_jobs.export(str(folder), str(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def unlike() -> float:
        with torch.no_grad():
            found = model(input_ids=titan_program.batch(99)[:, :-1]).logits
        return float((found - held["logits"]).abs().max())

    # DeepSeek's class norms its latents with 1e-6 whatever the config says, and torchtitan 1e-5
    assert unlike() < (2e-4 if kind == "deepseek_v3" else 1e-5)
    name = "q_b_proj" if kind == "deepseek_v3" else "q_proj"
    rows = getattr(model.model.layers[0].self_attn, name).weight.data
    rows[[0, 1]] = rows[[1, 0]]
    assert unlike() > 1e-3


PAIRS = [
    ("llama3", 2, Plain(1)),
    ("llama3", 2, Plain(3)),
    ("llama3", 2, Plain(2, tp=2)),
    ("qwen3", 2, Plain(3)),
    ("qwen3_moe", 2, Plain(1)),
    ("deepseek_v3", 2, Plain(1)),
    ("gpt_oss", 1, Plain(0)),
]


@pytest.mark.parametrize(("kind", "world", "setup"), PAIRS, ids=str)
def test_by_way_of_deepspeed(
    runs: Runs, ranks: RankPool, kind: str, world: int, setup: Plain, tmp_path: Path
) -> None:
    folder, held = runs.made(kind)
    out = tmp_path / "out"
    steps = MORE if kind in ("llama3", "qwen3") else 0  # transformers' experts add a loss
    found = ranks.run(
        world,
        titan_jobs.pass_on,
        setup=setup,
        folder=str(folder),
        out=str(out),
        steps=steps,
        timeout_s=200,
    )[0]
    goes_on(runs, kind, for_titan(out, folder), held)
    assert found["scheduled"] == STEPS + steps
    if steps:
        assert near(found["losses"], held["more"])


@pytest.mark.parametrize("tp", [1, 2])
def test_by_way_of_megatron(runs: Runs, ranks: RankPool, tp: int, tmp_path: Path) -> None:
    how = ("--rate", str(titan_program.RATE))  # one for all, as the stack's schedule has
    folder, held = runs.made("llama3", *how)
    out = tmp_path / "out"
    job = titan_jobs.pass_on_stack
    own = {"folder": str(folder), "out": str(out), "steps": MORE, "timeout_s": 200}
    found = ranks.run(2, job, tp=tp, **own)[0]
    goes_on(runs, "llama3", for_titan(out, folder), held, *how)
    assert near(found["losses"], held["more"])


def test_separate_queries_keys_and_values(runs: Runs, tmp_path: Path) -> None:
    """A model whose modules keep them apart is read; what is written is for those that don't."""
    folder, held = runs.made("qwen3", "--unfused")
    ucp.convert(folder, tmp_path / "mid", mesh="dp=2,zero=1")
    shutil.copy(folder / "config.json", tmp_path / "mid")
    ucp.convert(tmp_path / "mid", tmp_path / "out" / "step-3", to="torchtitan")
    again = runs.program("qwen3", "-", "--load", tmp_path / "out" / "step-3", "--steps", MORE)
    assert near(again["losses"], held["more"])
