"""What of megatron-core's stack can't be resumed exactly; each is refused by name."""

from collections.abc import Sequence
from typing import Any

from megatron_ucp.engines.live import check_model
from megatron_ucp.engines.mcore_model import bare_model, moe_layers
from megatron_ucp.engines.megatron.optimizer import refuse_unknown
from megatron_ucp.errors import StateMismatchError, UnsupportedError, UsageError
from megatron_ucp.formats.checkpoint import Checkpoint

# settings of OptimizerConfig under which masters or states lie elsewhere
_OPTIMIZER = {
    "use_precision_aware_optimizer": "masters lie in Transformer Engine's optimizer",
    "optimizer_cpu_offload": "states are divided between CPU and GPU",
    "optimizer_cuda_graph": "a CUDA graph holds the memory of masters and states",
}
_BUFFERS = {
    "use_megatron_fsdp": "parameters are sharded by Megatron-FSDP",
    "use_custom_fsdp": "parameters are sharded by Megatron-FSDP",
    "fp8_param_gather": "weights are in fp8",
    "fp4_param_gather": "weights are in fp4",
}
_IN_TURNS = "rows of gates and linear units lie in turns, which sharded_state_dict() doesn't say"
_MODEL = {
    "fp8": "scales lie in extra states of Transformer Engine's layers",
    "fp4": "scales lie in extra states of Transformer Engine's layers",
    "moe_single_grouped_weight": "all experts of a rank lie in one tensor",
    "moe_single_grouped_bias": "the biases of all experts of a rank lie in one tensor",
    "moe_mlp_glu_interleave_size": _IN_TURNS,
    "moe_shared_expert_glu_interleave_size": _IN_TURNS,
}
# sizes of a mesh that has one more axis: generalized tensor parallelism, of 0.19 and later
_MORE_SHARDS = {
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
}
_OWN_SAVE = "save and load with Megatron-LM's own functions on the same mesh"


def refuse_stack(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raises UsageError for what is no stack, UnsupportedError for one that can't be resumed
    exactly."""
    for chunk in chunks:
        _refuse_wrapper(chunk)
    if not chunks or any(not hasattr(chunk, "ddp_config") for chunk in chunks):
        raise UsageError(
            "the chunks of the model are megatron-core's",
            expected="DistributedDataParallel around each chunk",
            found=", ".join(type(chunk).__name__ for chunk in chunks) or "none",
            fix="give what Megatron-LM's get_model returned",
        )
    buffers: Any = chunks[0].ddp_config
    _refuse(buffers, _BUFFERS)
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    for one in (optimizer, *inner):
        _refuse_layer_wise(one)
    for one in inner:
        _refuse(getattr(one, "config", None), _OPTIMIZER)
        if getattr(one, "optimizer", None) is not None:
            refuse_unknown(one.optimizer)
    if buffers.num_distributed_optimizer_instances > 1:
        raise UnsupportedError(
            "several instances of the distributed optimizer are not supported",
            expected="num_distributed_optimizer_instances 1",
            found=buffers.num_distributed_optimizer_instances,
            fix="leave --num-distributed-optimizer-instances out",
        )
    for chunk in chunks:
        _refuse_model(bare_model(chunk))


def refuse_source(source: Checkpoint, stack: Any, optimizer: bool) -> None:
    """Raises ModelMismatchError for a checkpoint of a model that computes something else than the
    stack's, which no shape shows; StateMismatchError for one whose states of the `optimizer` are
    asked for, and were stepped a different number of times: megatron-core counts once."""
    check_model(source, stack.model, bare_model(stack.chunks[0]))
    if not optimizer:
        return
    steps: dict[float, str] = {}
    for buffer in source.manifest.buffers:
        for member in buffer.members:
            if "step" in member.scalars:
                steps.setdefault(member.scalars["step"], member.param)
    if len(steps) > 1:
        raise StateMismatchError(
            "parameters have different steps in the checkpoint, and megatron-core's optimizer "
            "has one for all",
            file=str(source.folder),
            parameter=" and ".join([*steps.values()][:2]),
            expected="one step",
            found=", ".join(f"{step:g}" for step in steps),
            fix="load with load_optimizer_states=False",
        )


def _is_a(thing: Any, name: str) -> bool:
    """Whether a thing is of a class of this name, which not every version of megatron-core has."""
    return any(one.__name__ == name for one in type(thing).__mro__)


def _refuse_wrapper(chunk: Any) -> None:
    """Raises UnsupportedError for a chunk that FSDP2 shards, and for one of several modules that
    have meshes of their own (an encoder beside a language model)."""
    parameters = chunk.parameters() if hasattr(chunk, "parameters") else ()
    sharded = _is_a(chunk, "TorchFullyShardedDataParallel")
    if sharded or any(_is_a(parameter, "DTensor") for parameter in parameters):
        raise UnsupportedError(
            "torch's FSDP2 is not supported: parameters are DTensors, which lie in no buffer of "
            "megatron-core's",
            expected="DistributedDataParallel around each chunk",
            found=type(chunk).__name__ if sharded else "parameters that are DTensors",
            fix=f"leave --use-torch-fsdp2 out, or {_OWN_SAVE}",
        )
    for one in (chunk, bare_model(chunk)):
        groups = getattr(one, "pg_collection", None)
        if _is_a(groups, "MultiModuleProcessGroupCollection") or _is_a(one, "MimoModel"):
            raise UnsupportedError(
                "a model of several modules, each on a mesh of its own, is not supported",
                expected="one mesh for the whole model",
                found=type(groups if groups is not None else one).__name__,
                fix=f"train on the groups of parallel_state, or {_OWN_SAVE}",
            )


def _refuse_layer_wise(optimizer: Any) -> None:
    name, setting = "LayerWiseDistributedOptimizer", "use_layer_wise_distributed_optimizer"
    is_set = getattr(getattr(optimizer, "config", None), setting, None)
    if is_set or _is_a(optimizer, name):
        raise UnsupportedError(
            f"{name} is not supported: each rank steps whole parameters of its own, of which no "
            "other rank has masters",
            expected="DistributedOptimizer, or an optimizer that every rank has whole",
            found=f"{setting} on" if is_set else type(optimizer).__name__,
            fix=f"train with --optimizer adam, or {_OWN_SAVE}",
        )


def _refuse(config: Any, settings: dict[str, str]) -> None:
    for name, why in settings.items():
        if (found := getattr(config, name, None)) not in (None, False):
            raise UnsupportedError(
                f"{name} is not supported: {why}",
                expected=f"{name} off",
                found="on" if found is True else found,
                fix=f"switch it off, or {_OWN_SAVE}",
            )


def _refuse_model(model: Any) -> None:
    if not hasattr(model, "sharded_state_dict"):
        raise UnsupportedError(
            "the model is none of megatron-core's",
            expected="a module with a sharded_state_dict, such as a GPTModel",
            found=type(model).__name__,
            fix="give it one (megatron.core.transformer.MegatronModule has it), or save and load "
            "with the program's own functions on the same mesh",
        )
    _refuse(model.config, _MODEL)
    for name, flag in _MORE_SHARDS.items():
        if (size := getattr(model.config, name, None) or 1) > 1:
            raise UnsupportedError(
                "generalized tensor parallelism is not supported: weights are cut along an axis "
                "beside tp, which no mesh here has",
                expected=f"{name} 1",
                found=size,
                fix=f"leave {flag} out, or {_OWN_SAVE}",
            )
    for name, layer in moe_layers(model):
        one_by_one = hasattr(layer.experts, "local_experts")
        if not one_by_one and not hasattr(getattr(layer.experts, "linear_fc1", None), "weight0"):
            raise UnsupportedError(
                "experts that lie in one tensor are not supported",
                parameter=f"{name}.experts",
                expected="a module or a parameter for each expert (SequentialMLP, TEGroupedMLP)",
                found=type(layer.experts).__name__,
                fix="build the model without --moe-grouped-gemm, or with Transformer Engine's "
                "layers and without --moe-single-grouped-weight",
            )
