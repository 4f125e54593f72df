"""Models of megatron-core's that no family describes, in its own stack: built, trained, saved,
resumed on other meshes, and compared by stock megatron-core's own checkpoints of both."""

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import megatron_ucp as ucp
from megatron_ucp.core.layout import Shard
from megatron_ucp.engines import mcore_model as derived
from megatron_ucp.reshard import hybrid as renumbered
from pretrain.mcore import models
from pretrain.mcore.chunks import Stack, Stages
from tests.engines.encoder_models import bert, forward_of, losses_of, t5
from tests.engines.hybrid_models import PATTERNS, hybrid, on_cpu, with_latent_attention
from tests.engines.megatron_jobs import (
    BATCH,
    SEQUENCE,
    VOCAB,
    Engine,
    Mcore,
    close,
    make_optimizer,
    stock_save,
    train,
)
from tests.engines.planted_layouts import PLANTS
from tests.engines.recurrent_models import delta_net, kernels_on_cpu

HIDDEN = 16


def quick_gelu(values: torch.Tensor) -> torch.Tensor:
    """As megatron-core's, which it compiles."""
    return values * torch.sigmoid(1.702 * values)


EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_topk": 2,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
DENSE_FIRST = {**EXPERTS, "moe_layer_freq": [0, 1, 1, 1]}
SHARED = {**DENSE_FIRST, "moe_shared_expert_intermediate_size": 12}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "rope_type": "rope",
}
GPT_OSS = {
    **EXPERTS,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": (2, 0),
    "window_attn_skip_freq": 2,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.75,
    "activation_func": quick_gelu,
}
MAMBA = {
    "num_layers": 8,
    "mamba_state_dim": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 4,
}
DELTA_NET = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 2,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "deterministic_mode": True,
}


def block(mlp: int | None = 24, heads: int | None = 2) -> dict[str, Any]:
    """A layer with an MLP of that width, or with none, and attention of groups of so many heads, or
    without it."""
    attention = {"n_heads_in_group": heads, "no_op": heads is None, "replace_with_linear": False}
    inner = {"ffn_hidden_size": mlp, "no_op": mlp is None, "replace_with_linear": False}
    return {"attention": attention, "ffn": inner}


BLOCKS = {"block_configs": [block(), block(40), block(None), block(16, None)]}
OWN_LAYERS = {"heterogeneous_layers_config_encoded_json": json.dumps(BLOCKS)}
ENCODES = {"gated_linear_unit": False, "activation_func": F.gelu, "add_bias_linear": True}
# what a model has beside those of `_config`
SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "q/k norms and experts": {**EXPERTS, "qk_layernorm": True},
    "leading dense layers": DENSE_FIRST,
    "shared experts and router bias": {**SHARED, **BIASED},
    "latent attention": {**LATENT, **SHARED, **BIASED},
    "latent attention alone": LATENT,
    "multi-token prediction": {"mtp_num_layers": 1},
    "predicting mixture": {**SHARED, "mtp_num_layers": 2, "qk_layernorm": True},
    "bert": ENCODES,
    "t5": {**ENCODES, "num_layers": 2, "num_query_groups": 4},
    "gpt-oss": GPT_OSS,
    "hybrid": {"num_layers": 8},
    "hybrid mixture": {**EXPERTS, "num_layers": 8, "qk_layernorm": True},
    "mamba": MAMBA,
    "gated delta net": DELTA_NET,
    "layers of their own": OWN_LAYERS,
    "own module": {},
}


@dataclass(frozen=True)
class AnyModel(Mcore):
    """A model of some kind of `SETTINGS` on a mesh."""

    kind: str = "dense"


def make_any(setup: AnyModel, attach: bool = True) -> Engine:
    """Built, wrapped, with an optimizer, and attached without a family."""
    models.start(setup.tp, 7, setup.pp, setup.ep, setup.etp, vpp=setup.vpp, deepspeed=False)
    import megatron_ucp_patches as patches

    for name in ("moe_router_gemm", "moe_dispatch_on_cpu", "uneven_gather_on_cpu"):
        patches.apply(name)
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}  # of the size that the process met first
    torch.manual_seed(setup.seed)
    stack = _stack(setup)
    optimizer, scheduler = make_optimizer(setup, stack)
    handle = ucp.attach_megatron(stack.chunks, optimizer, scheduler) if attach else None
    return Engine(setup, stack, optimizer, scheduler, handle)


def _stack(setup: AnyModel) -> Stack:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    config = _config(setup)
    numbers = range(setup.vpp) if setup.vpp > 1 else [None]
    bare = [_model(setup, config, number) for number in numbers]
    for name, param in [pair for one in bare for pair in one.named_parameters()]:
        _mend_marks(name, param)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=setup.distributed
    )
    made = [
        DistributedDataParallel(config, settings, one, disable_bucketing=n > 0)
        for n, one in enumerate(bare)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    shown: Any = SimpleNamespace(positions=SEQUENCE)
    return Stack(shown, config, made, bare)


def _mend_marks(name: str, param: Any) -> None:
    """0.16.1 takes some parameters of tensor-parallel ranks for copies of one: softmax offsets in
    the gradient norm, biases of experts there and as if sequence parallelism had made them. A run
    would depend on the mesh."""
    if name.endswith("softmax_offset"):
        param.tensor_model_parallel, param.partition_dim = True, 0
    elif ".local_experts." in name and name.endswith("bias"):
        param.tensor_model_parallel, param.sequence_parallel = True, False


def _config(setup: AnyModel) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )

    settings = SETTINGS[setup.kind]
    latent = settings.get("multi_latent_attention")
    kind: Any = MLATransformerConfig if latent else TransformerConfig
    kind = HeterogeneousTransformerConfig if settings is OWN_LAYERS else kind
    drawn = partial(torch.nn.init.normal_, std=0.15)
    # also so that ranks sum gradients of what their heads share: a delta net's output norm
    by_sequence = bool({"num_moe_experts", "linear_conv_kernel_dim"} & settings.keys())
    usual = {
        "num_layers": setup.layers,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 24,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "init_method": drawn,
        "output_layer_init_method": drawn,
        "embedding_init_method": drawn,
        "tensor_model_parallel_size": setup.tp,
        "expert_model_parallel_size": setup.ep,
        "expert_tensor_parallel_size": setup.etp or setup.tp,
        "sequence_parallel": by_sequence and setup.tp > 1,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    stages = Stages(setup.pp, setup.vpp, setup.layout, setup.first, setup.last)
    return kind(**{**usual, **settings, **stages.transformer(torch.float32)})


def _model(setup: AnyModel, config: Any, number: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
        get_gpt_heterogeneous_layer_spec,
    )

    place: dict[str, Any] = {"ignore_virtual": False, "vp_stage": number}
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(**place),
        "post_process": parallel_state.is_pipeline_last_stage(**place),
    }
    if setup.kind == "own module":
        return _own_module()(config)
    if setup.kind == "bert":
        return bert(config, VOCAB, SEQUENCE, ends, number)
    if setup.kind == "t5":
        return t5(config, VOCAB, SEQUENCE, ends)
    if setup.kind in PATTERNS:
        return hybrid(config, PATTERNS[setup.kind], VOCAB, SEQUENCE, tied=setup.tied, **ends)
    with on_cpu(), kernels_on_cpu():
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=number)
        if config.heterogeneous_block_specs:
            spec = get_gpt_heterogeneous_layer_spec(config, vp_stage=number)
        if config.multi_latent_attention:
            with_latent_attention(spec)
        if setup.kind == "gated delta net":
            _with_delta_nets(spec)
        predicts = None
        if config.mtp_num_layers and ends["post_process"]:
            predicts = get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=False, vp_stage=number
            )
        return GPTModel(
            config,
            spec,
            VOCAB,
            SEQUENCE,
            share_embeddings_and_output_weights=setup.tied,
            position_embedding_type="rope",
            mtp_block_spec=predicts,
            vp_stage=number,
            **ends,
        )


def _with_delta_nets(spec: Any) -> None:
    """In the place of attention, in every second layer."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    parts: Any = ColumnParallelLinear, RowParallelLinear, WrappedTorchNorm
    for layer in spec.layer_specs[::2]:
        layer.submodules = copy.copy(layer.submodules)
        layer.submodules.self_attention = delta_net(*parts)


def _own_module() -> Any:
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.transformer.module import MegatronModule

    class Mine(MegatronModule):
        """A user's own: names like no family's."""

        share_embeddings_and_output_weights = False

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            own: dict[str, Any] = {"config": config, "init_method": config.init_method}
            self.words = VocabParallelEmbedding(VOCAB, HIDDEN, **own)
            self.up = ColumnParallelLinear(HIDDEN, 32, gather_output=False, **own)
            self.down = RowParallelLinear(
                32, HIDDEN, bias=True, input_is_parallel=True, skip_bias_add=False, **own
            )
            self.scale = torch.nn.Parameter(torch.ones(HIDDEN))
            self.head = ColumnParallelLinear(HIDDEN, VOCAB, bias=False, gather_output=False, **own)

        def set_input_tensor(self, _: Any) -> None:
            """There is one stage."""

        def forward(self, tokens: Any, _: Any, __: Any, labels: Any) -> Any:
            words = self.words(tokens)
            hidden = words + self.down(torch.tanh(self.up(words)[0]))[0] * self.scale
            return vocab_parallel_cross_entropy(self.head(hidden)[0].float(), labels)

    return Mine


# ------------------------------------------------ under DeepSpeed


def make_under_deepspeed(setup: AnyModel, zero: int) -> Any:
    """An engine of DeepSpeed around such a model, attached without a family."""
    import deepspeed

    deepspeed.init_distributed("gloo", dist_init_required=False)
    models.start(setup.tp, 7)
    torch.manual_seed(setup.seed)
    model = _model(setup, _config(setup), None)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, mpu=models.mpu(), config=config
    )
    return ucp.attach(engine)


def train_under_deepspeed(kind: str, engine: Any, steps: int, first: int = 0) -> list[float]:
    """As `train`; every rank has the same batch."""
    out: list[float] = []
    for step in range(first, first + steps):
        drawn = torch.randint(
            40, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step)
        )
        loss = losses_of(kind, engine, drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
        engine.backward(loss.float().mean())
        engine.step()
        out.append(float(loss.detach().float().mean()))
    return out


def saved_under_deepspeed(setup: AnyModel, zero: int, folder: str) -> list[float]:
    """As `saved`."""
    engine = make_under_deepspeed(setup, zero)
    train_under_deepspeed(setup.kind, engine, 2)
    engine.save_checkpoint(folder)
    losses = train_under_deepspeed(setup.kind, engine, 3, first=2)
    engine.destroy()
    models.stop()
    return losses


def resumed_under_deepspeed(setup: AnyModel, zero: int, folder: str) -> dict[str, Any]:
    """As `resumed`."""
    engine = make_under_deepspeed(setup, zero)
    train_under_deepspeed(setup.kind, engine, 1, first=50)
    before = ucp.fingerprint(engine).differences(ucp.fingerprint(folder))
    engine.load_checkpoint(folder)
    others = ucp.fingerprint(engine).differences(ucp.fingerprint(folder))
    losses = train_under_deepspeed(setup.kind, engine, 3, first=2)
    engine.destroy()
    models.stop()
    return {"losses": losses, "before": before, "others": others}


# ------------------------------------------------ jobs


def saved(setup: AnyModel, folder: str, steps: int = 2, more: int = 3) -> list[float]:
    """Trains, saves by this package and by stock, goes on; the losses after the save."""
    engine = make_any(setup)
    with forward_of(setup.kind):
        train(engine, steps)
        ucp.save(engine.handle, folder)
        stock_save(engine, Path(folder) / "stock")
        found = train(engine, more, first=steps)
    close(engine)
    return found


def resumed(
    setup: AnyModel, folder: str, again: str, steps: int = 2, more: int = 3
) -> dict[str, Any]:
    """Loads into a model that has trained on something else; stock then saves what it holds."""
    engine = make_any(setup)
    with forward_of(setup.kind):
        train(engine, 1, first=50)
        report = ucp.load(engine.handle, folder)
        others = ucp.fingerprint(engine.handle).differences(ucp.fingerprint(folder))
        stock_save(engine, Path(again))
        losses = train(engine, more, first=steps)
    close(engine)
    return {"losses": losses, "notes": list(report.notes), "others": others}


def resumed_as_one(setup: AnyModel, folder: str, again: str) -> dict[str, Any]:
    """As `resumed`, with a fault in the derivation: what a model saves in parts is cut as one."""

    def as_one(share: Any, dim: int, sizes: Any) -> Any:
        return Shard(share.axis, dim)

    with mock.patch.object(derived, "_cut_along", as_one):
        return resumed(setup, folder, again)


def carried(
    setup: AnyModel, folder: str, allow: set[str], backwards: bool = False
) -> dict[str, Any]:
    """Loads what a model saved that counts its layers otherwise, and goes on; what the load said,
    and the states that the model has then. `backwards`: a fault, layers in the wrong order."""
    stock = renumbered._layers_with

    def reversed_layers(*of: Any) -> Any:
        return stock(*of)[::-1]

    engine = make_any(setup)
    before = ucp.fingerprint(engine.handle).table
    out: dict[str, Any] = {"error": ""}
    with mock.patch.object(renumbered, "_layers_with", reversed_layers if backwards else stock):
        try:
            out["notes"] = ucp.load(engine.handle, folder, allow=allow).notes
        except ucp.UcpError as error:
            out["error"] = str(error)
    out["table"] = ucp.fingerprint(engine.handle).table
    out["changed"] = before != out["table"]
    out["losses"] = train(engine, 3, first=2)
    close(engine)
    return out


def refused(setup: AnyModel, plant: str) -> str:
    """What attaching a model says that numbers or cuts a parameter otherwise than it says."""
    engine = make_any(setup, attach=False)
    with PLANTS[plant](engine.stack.bare[0]):
        parts = (engine.stack.chunks, engine.optimizer, engine.scheduler)
        try:
            ucp.attach_megatron(*parts)
            found = ""
        except ucp.UcpError as error:
            found = str(error)
    close(engine)
    return found


def unmarked(setup: AnyModel, folder: str) -> dict[str, Any]:
    """Loads into a model whose experts have no attributes that are true: Transformer Engine leaves
    some out. Or what attaching says; and whether megatron-core knows its experts as such."""
    engine = make_any(setup, attach=False)
    parts = engine.stack.chunks, engine.optimizer, engine.scheduler
    out: dict[str, Any] = {"error": "", "marked": True}
    for name, param in engine.stack.bare[0].named_parameters():
        if ".local_experts." in name:
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = False, 1, 7
            out["marked"] &= not param.allreduce
    try:
        handle = ucp.attach_megatron(*parts)
        ucp.load(handle, folder)
        out["others"] = ucp.fingerprint(handle).differences(ucp.fingerprint(folder))
    except ucp.UcpError as error:
        out["error"] = str(error)
    close(engine)
    return out


def differing(one: Path, other: Path) -> list[str]:
    """The keys under which two of stock's checkpoints hold other values."""
    from megatron.core import dist_checkpointing

    found = [dist_checkpointing.load_plain_tensors(str(path)) for path in (one, other)]
    keys = {*found[0], *found[1]}
    return sorted(
        key
        for key in keys
        if key not in found[0]
        or key not in found[1]
        or torch.is_tensor(found[0][key])
        and not torch.equal(found[0][key], found[1][key])
    )


def compared(folder: str, again: str) -> tuple[int, list[str]]:
    """How many tensors the first has, and those that differ; on one rank."""
    from megatron.core import dist_checkpointing

    count = len(dist_checkpointing.load_plain_tensors(folder))
    return count, differing(Path(folder), Path(again))


def asked_for(folder: str) -> tuple[int, int, list[str], list[str]]:
    """What stock's files of a moment hold, and so its load asks for, that ours of the same moment
    have not; tensors that both have and that differ. With the number of tensors and of objects."""
    from torch.distributed.checkpoint import FileSystemReader

    stock, (ours,) = Path(folder) / "stock", [*Path(folder).glob("iter_*")]
    held = [FileSystemReader(one).read_metadata().state_dict_metadata for one in (stock, ours)]
    missing = sorted(key for key in held[0] if key not in held[1])
    tensors = {key for key, entry in held[0].items() if hasattr(entry, "size")}
    unequal = [key for key in differing(stock, ours) if key in tensors and key not in missing]
    return len(tensors), len(held[0]) - len(tensors), missing, unequal
