"""The arguments of a run, as Megatron-LM saves them: a Namespace of some 650 values; the classes
that its pickles may name, and its schedule."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from megatron_ucp.core.manifest import RECORDED, Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import DeviceName, DtypeName, InertObject, VersionName
from megatron_ucp.errors import UsageError
from megatron_ucp.formats import expect
from megatron_ucp.formats.param_groups import number
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.pt.unpickle import AllowedClasses

# ---- kinds
#
# Which of megatron-core's optimizers a folder is for: none of them loads the files of another.


class Kind(Enum):
    """By what the files call the fp32 masters. `FLOAT16` and `FP32` keep all states on every
    data-parallel rank; there an fp32 parameter is its own master, and is stored once."""

    DISTRIBUTED = "param"
    FLOAT16 = "fp32_param"
    FP32 = ""


# ---- closed list
#
# The classes that Megatron's pickles may name besides those of every `.pt` file. Each becomes an
# inert `InertObject`; none is imported.
#
# Sources: what Megatron-core 0.16.1 to 0.19.2 with torch 2.13 writes, and its own list
# (`safe_globals.py`). Its enums are not listed: each version adds some, and the arguments of a
# run hold them by default (since 0.18 an `InferenceCudaGraphScope`).


_CHECKPOINT = "torch.distributed.checkpoint"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"

# what the file `.metadata` names
OF_METADATA = AllowedClasses(
    frozenset(
        {
            *(
                f"{_CHECKPOINT}.metadata.{name}"
                for name in (
                    "Metadata",
                    "TensorStorageMetadata",
                    "TensorProperties",
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "_MEM_FORMAT_ENCODING",
                )
            ),
            f"{_CHECKPOINT}.filesystem._StorageInfo",
            f"{_CHECKPOINT}.filesystem._StoragePrefix",
            *(
                f"{_CHECKPOINT}.planner.{name}"
                for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
            ),
            f"{_STRATEGIES}.MCoreMetadata",
            f"{_STRATEGIES}.MCoreSavePlan",
            "torch.serialization._get_layout",
        }
    )
)

# what the arguments of a run and its optimizer may hold
OF_VALUES = AllowedClasses(
    frozenset(
        {
            "megatron.core.optimizer.optimizer_config.OptimizerConfig",
            "signal.Signals",
            "_io.BytesIO",
        }
    ),
    enums_below="megatron",
)


# ---- schedule
#
# Megatron's schedule of rates and weight decay, which two programs spell differently.
#
# megatron-core keeps the weight decay as it grows, and in no file what only flags say;
# `pretrain_gpt.py` keeps one weight decay, and all settings.


SCHEDULE = ("max_lr", "min_lr", "num_steps", "lr_decay_style")  # what every such state has
OF_WSD = ("wsd_decay_steps", "lr_wsd_decay_style")
_WARMUP, _FIRST_RATE = "lr_warmup_steps", "init_lr"
_GROWTH = ("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")
_DECAY = "weight_decay"


def is_schedule(state: Mapping[str, Any]) -> bool:
    """Whether a scheduler's state is of one that computes as Megatron's does."""
    return all(key in state for key in SCHEDULE)


def one_spelling(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A schedule's state without what its spelling alone decides: two that are equal so set the
    same rates and weight decay from here on. Another scheduler's state is as it was.

    Source: `OptimizerParamScheduler.get_lr` and `get_wd` of megatron-core: the first rate counts in
    the warm-up alone, WSD's settings in WSD alone, and a weight decay that ends as it began is one.
    """
    if state is None or not is_schedule(state):
        return state
    out = dict(state)
    if out["lr_decay_style"] != "WSD":
        for key in OF_WSD:
            out.pop(key, None)
    warmup, samples = out.get(_WARMUP), out["num_steps"]
    is_over = isinstance(warmup, int) and isinstance(samples, int) and samples > warmup
    if warmup == 0 or is_over or out.get(_FIRST_RATE) == 0:  # 0 is what no flag says otherwise
        out.pop(_FIRST_RATE, None)
    if _DECAY not in out and all(key in out for key in _GROWTH[:2]):
        if out["start_wd"] == out["end_wd"]:
            out[_DECAY] = out["end_wd"]
            for key in _GROWTH:
                out.pop(key, None)
    return out


# ---- arguments


# the arguments that say the sizes of a mesh, by the names of its axes
SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
)


def plain_arguments(tree: Any) -> dict[str, Any]:
    """Every argument as a plain value: members of enums become their values, dtypes their names,
    what is neither a mark of its type. Empty for what is no Namespace."""
    if not isinstance(tree, InertObject) or not tree.qualname.endswith("Namespace"):
        return {}
    return {str(name): _plain(value) for name, value in tree.state.items()}


def _plain(value: Any, depth: int = 0) -> Any:
    if isinstance(value, DtypeName | DeviceName | VersionName):
        return str(value)
    if isinstance(value, InertObject) and len(value.args) == 1 and not value.state:
        return number(value.args[0])
    if isinstance(value, list | tuple) and depth < 3 and len(value) <= 4096:
        return [_plain(item, depth + 1) for item in value]
    return number(value)


def size(arguments: Mapping[str, Any], name: str, default: int = 1) -> int:
    """A whole number of at least 1; `default` where the arguments say none."""
    value = arguments.get(name)
    return value if type(value) is int and value > 0 else default


def rate(arguments: Mapping[str, Any], name: str) -> float | None:
    """A number; None where the arguments say none."""
    value = arguments.get(name)
    said = isinstance(value, int | float) and value is not True
    return expect.number(value, name, "the arguments") if said else None


def mesh_of(arguments: Mapping[str, Any]) -> Mesh:
    """The mesh of the run; that of one rank where the arguments don't say any."""
    tp, pp, vpp, ep, etp, cp, dp = (size(arguments, name) for name in SIZES)
    if type(arguments.get("expert_tensor_parallel_size")) is not int:
        etp = tp
    order = "pp-dp" if arguments.get("use_tp_pp_dp_mapping") else "dp-pp"
    try:
        return Mesh(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, cp=cp, dp=dp, order=order)
    except UsageError:
        return Mesh()


# ------------------------------------------------ written

LOCAL_MODULES = "local"  # what `transformer_impl` says of megatron-core's own modules
_ENUMS = ("model_type", "attention_backend", "exit_signal", "cuda_graph_scope")
# what a manifest says of a model (see `families/settings`), by the names of arguments
_OF_SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_query_groups": "groups",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "padded_vocab_size": "vocab",
    "swiglu": "gated",
    "add_bias_linear": "biases",
    "add_qkv_bias": "qkv_biases",
    "qk_layernorm": "qk_norms",
    "num_experts": "experts",
    "moe_ffn_hidden_size": "expert_ffn",
}
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_USUAL = {
    "add_position_embedding": True,
    "max_position_embeddings": 0,
    "make_vocab_size_divisible_by": 1,
    "tokenizer_type": None,
    "skipped_train_samples": 0,
    "consumed_valid_samples": 0,
    "transformer_impl": LOCAL_MODULES,
}


def written_arguments(
    known: Mapping[str, Any], manifest: Manifest, mesh: Mesh, samples: int, kind: Kind
) -> dict[str, Any]:
    """The arguments that a folder for Megatron-LM says: those of the source's run, the sizes that
    its manifest says, and what the files are. Empty where nobody knows the model's sizes."""
    distributed = kind is Kind.DISTRIBUTED
    out = {name: _restored(value) for name, value in known.items() if name not in _ENUMS}
    out |= _recorded(known, manifest)
    if any(type(out.get(name)) is not int for name in _NEEDED):
        return {}
    embedding = manifest.by_name.get("embedding.word_embeddings.weight")
    if embedding is not None:
        out["padded_vocab_size"] = embedding.shape[0]
    return {
        **_USUAL,
        **out,
        **dict(zip(SIZES, _sizes_of(mesh), strict=True)),
        "world_size": mesh.world,
        "consumed_train_samples": samples,
        "no_save_rng": True,
        "use_distributed_optimizer": distributed,
        "ckpt_format": "torch_dist",
        "dist_ckpt_optim_fully_reshardable": distributed,
    }


def _recorded(known: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """What a manifest records of the model, by arguments; of what no shape shows those that are
    `known` go before."""
    said = expect.section(manifest.run, RECORDED)
    sizes = said.get("sizes")
    if not isinstance(sizes, dict):
        return {}
    architecture = said.get("architecture") or {}
    more = _not_in_shapes(manifest.family, sizes, architecture)
    return {
        **{name: sizes[key] for name, key in _OF_SIZES.items() if key in sizes},
        **_of_model(sizes, architecture),
        **{name: value for name, value in more.items() if known.get(name) is None},
    }


def _restored(value: Any) -> Any:
    """A plain value as Megatron's flags have it: names of dtypes as dtypes."""
    is_dtype = isinstance(value, str) and value.removeprefix("torch.") in ITEMSIZE
    return DtypeName(value) if is_dtype and str(value).startswith("torch.") else value


def _of_model(sizes: Mapping[str, Any], architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from sizes and architecture."""
    out: dict[str, Any] = {
        "untie_embeddings_and_output_weights": not sizes.get("tied"),
        "group_query_attention": sizes.get("groups") != sizes.get("heads"),
        "normalization": "LayerNorm" if sizes.get("norm_biases") else "RMSNorm",
        "position_embedding_type": "learned_absolute" if sizes.get("positions") else "rope",
    }
    kept = {
        "positions": "max_position_embeddings",
        "norm_epsilon": "layernorm_epsilon",
        "rotary_base": "rotary_base",
        "topk": "moe_router_topk",
    }
    out |= {name: architecture[key] for key, name in kept.items() if architecture.get(key)}
    if not sizes.get("experts"):
        out["num_experts"] = None
    return out


def _not_in_shapes(
    family: str, sizes: Mapping[str, Any], architecture: Mapping[str, Any]
) -> dict[str, Any]:
    """What the model computes besides, by the arguments that say it; family, true vocabulary and
    activation by names of this package's own where Megatron-LM has none: an export of the folder
    asks for them."""
    out: dict[str, Any] = {
        "model_family": family,
        "true_vocab_size": sizes.get("true_vocab"),
        "moe_layer_freq": sizes.get("every"),
        "moe_shared_expert_intermediate_size": sizes.get("shared_ffn"),
        "activation_func": architecture.get("activation"),
        "use_rope_scaling": bool(architecture.get("rope_factor")),
        "rope_scaling_factor": architecture.get("rope_factor"),
        "rotary_seq_len_interpolation_factor": architecture.get("interpolation"),
        **architecture.get("odd", {}),
    }
    return {name: value for name, value in out.items() if value}


def _sizes_of(mesh: Mesh) -> tuple[int | None, ...]:
    chunks = mesh.vpp if mesh.vpp > 1 else None
    return mesh.tp, mesh.pp, chunks, mesh.ep, mesh.etp, mesh.cp, mesh.dp
