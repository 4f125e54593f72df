"""Layouts from the model itself, for 1,024 ranks of a model of DeepSeek-V3's shape: seconds,
memory, the size of the manifest, and a plan from one mesh of 1,024 ranks to another.

    python -m benchmarks.derive         # some minutes
    python -m benchmarks.derive --tiny  # 16 ranks, to see that it runs

One process is every rank in turn: its process groups are fake, and its model has no memory. What a
rank does at `attach` is timed: asking its model, sending what it says, joining what all ranks say.
Building groups and models is the program's own work, and not counted. A rank of each place that
holds other parameters is asked; the other ranks say the same. Results:
benchmarks/results/derive.json, "Many ranks" in docs/reference/performance.md.
"""

import argparse
import pickle
import resource
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import frame
from benchmarks.paper import on_mesh, paper_manifest, state_file
from megatron_ucp.core.experts import expert_name
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, Mesh
from megatron_ucp.engines import mcore_model as derived
from megatron_ucp.families.family import Declared
from megatron_ucp.reshard.plan import of_manifests
from tests.engines.hybrid_models import on_cpu

PLAN_LIMIT_S = 10.0
LAST_LAYERS = 1  # of 61, on the last stage; fifteen stages have four each
# of the model's published configuration
ATTENTION = {"num_attention_heads": 128, "num_query_groups": 128, "multi_latent_attention": True}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64}
EXPERTS = {"num_moe_experts": 256, "moe_router_topk": 8, "moe_layer_freq": [0] * 3 + [1] * 58}
WIDTHS = {"hidden_size": 7168, "ffn_hidden_size": 18432, "v_head_dim": 128}
EXPERT_WIDTHS = {"moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048}
ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LAYERS = {"num_layers": 61, "mtp_num_layers": 1, "normalization": "RMSNorm", "qk_layernorm": True}
MLP = {"gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}
DEEPSEEK_V3 = WIDTHS | EXPERT_WIDTHS | LAYERS | ATTENTION | LATENT | EXPERTS | ROUTER | MLP
# what says nothing of the parameters, and what runs on a CPU
DTYPES = {"pipeline_dtype": torch.bfloat16, "params_dtype": torch.bfloat16}
DISPATCH = {"moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather"}
EMPTY = {"rope_type": "rope", "use_cpu_initialization": True, "perform_initialization": False}
UNFUSED = {"bias_activation_fusion": False, "bias_dropout_fusion": False}
PLAIN = {"gradient_accumulation_fusion": False, "persist_layer_norm": False}
ON_CPU: dict[str, Any] = DTYPES | DISPATCH | EMPTY | UNFUSED | PLAIN
VOCABULARY = 129280
SOURCE = Mesh(tp=8, pp=16, ep=64, etp=1, dp=8, zero=1)
TARGET = Mesh(tp=4, pp=8, ep=32, etp=1, dp=32, zero=1)
TINY = {"num_layers": 5, "hidden_size": 256, "num_attention_heads": 8, "num_query_groups": 8}
TINY_EXPERTS = {"num_moe_experts": 8, "moe_layer_freq": [0] + [1] * 4}
TINY_MESHES = (
    Mesh(tp=2, pp=2, ep=4, etp=1, dp=2, zero=1),
    Mesh(tp=1, pp=1, ep=2, etp=1, dp=8, zero=1),
)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = {**DEEPSEEK_V3, **(TINY | TINY_EXPERTS if options.tiny else {})}
    source, target = TINY_MESHES if options.tiny else (SOURCE, TARGET)
    # the first rank of each place that holds parameters of its own
    ranks = sorted({source.rank_of(at, 0) for at in source.holding()})
    tables, seconds = zip(*(said_by(rank, source, settings) for rank in ranks), strict=True)
    started = time.perf_counter()
    whole = derived.joined_tables([*tables])
    joining_s = time.perf_counter() - started
    return {
        "ranks": source.world,
        "parameters": len(whole),
        "elements": sum(torch.Size(one.shape).numel() for one in whole.values()),
        "places asked": len(ranks),
        "seconds of a rank's own model, most": max(seconds),
        "bytes that all ranks send": sum(len(pickle.dumps(table)) for table in tables),
        "seconds to join all": joining_s,
        **planned(whole, source, target),
        "peak memory in bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def planned(whole: derived.DeclaredTable, source: Mesh, target: Mesh) -> dict[str, Any]:
    """The manifest of a run with these parameters on one mesh, and what every rank of another one
    would read."""
    experts = 1 + max(one.number for one in map(expert_name, whole) if one is not None)
    known = {name: with_expert(name, declared, experts) for name, declared in whole.items()}
    model = derived.model_by_itself(known)
    paper = paper_manifest(model.family, model.sizes)
    held = on_mesh(paper, source)
    size_bytes = len(to_json(held).encode())
    started = time.perf_counter()
    of_manifests(held, on_mesh(paper, target), lambda slot: state_file(held, slot))
    seconds = time.perf_counter() - started
    what = f"seconds of a plan from {source} to {target}"
    return {"manifest bytes": size_bytes, "plan": frame.claim(what, seconds, PLAN_LIMIT_S)}


def with_expert(name: str, declared: Declared, experts: int) -> Declared:
    """A parameter with the number of the expert that it is of."""
    found = expert_name(name)
    return declared if found is None else replace(declared, expert=(found.number, experts))


# ---- a rank that is not there


def said_by(rank: int, mesh: Mesh, settings: dict[str, Any]) -> tuple[derived.DeclaredTable, float]:
    """What the model of a rank says, and how long asking takes, in seconds."""
    with fake_ranks(rank, mesh):
        model = built(mesh, settings)
        place = mesh.place(mesh.at(rank, (*DENSE_CUT, *EXPERT_CUT)))
        started = time.perf_counter()
        table = derived.derived_table(model, derived.canonical_names(model), place)
        return table, time.perf_counter() - started


@contextmanager
def fake_ranks(rank: int, mesh: Mesh) -> Any:
    """Process groups as that rank has them, in which nobody else is."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world)
    try:
        parallel_state.initialize_model_parallel(
            mesh.tp,
            mesh.pp,
            expert_model_parallel_size=mesh.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        with (
            mock.patch.object(torch.cuda, "current_device", lambda: "cpu"),
            mock.patch.object(torch.Tensor, "cuda", lambda self: self),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def built(mesh: Mesh, settings: dict[str, Any]) -> Any:
    """This rank's part of a model of DeepSeek-V3's kind, without memory."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.identity_op import IdentityOp

    config = MLATransformerConfig(
        **settings,
        **ON_CPU,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=1,
        num_layers_in_last_pipeline_stage=LAST_LAYERS,
    )
    last = parallel_state.is_pipeline_last_stage()
    spec: Any = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    predicts: Any = None
    if last:
        predicts = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False
        )
    with torch.device("meta"), on_cpu():
        return GPTModel(
            config,
            spec,
            VOCABULARY,
            4096,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            mtp_block_spec=predicts,
        )


if __name__ == "__main__":
    raise SystemExit(frame.main("derive"))
