"""What of megatron-core's stack can't be resumed exactly; each is refused by name."""

from collections.abc import Sequence
from typing import Any

from megatron_ucp.engines.megatron.engine.known import refuse_unknown
from megatron_ucp.engines.megatron.experts import moe_layers
from megatron_ucp.engines.megatron.names import bare_model
from megatron_ucp.errors import UnsupportedError, UsageError

# settings of OptimizerConfig under which masters or states lie elsewhere
_OPTIMIZER = {
    "use_precision_aware_optimizer": "masters lie in Transformer Engine's optimizer",
    "optimizer_cpu_offload": "states are divided between CPU and GPU",
}
_BUFFERS = {
    "use_megatron_fsdp": "parameters are sharded by Megatron-FSDP",
    "fp8_param_gather": "weights are in fp8",
}
_MODEL = {
    "fp8": "scales lie in extra states of Transformer Engine's layers",
    "fp4": "scales lie in extra states of Transformer Engine's layers",
}


def refuse_stack(chunks: Sequence[Any], optimizer: Any) -> None:
    """Raises UsageError for what is no stack, UnsupportedError for one that can't be resumed
    exactly."""
    if not chunks or any(not hasattr(chunk, "ddp_config") for chunk in chunks):
        raise UsageError(
            "the chunks of the model are megatron-core's",
            expected="DistributedDataParallel around each chunk",
            found=", ".join(type(chunk).__name__ for chunk in chunks) or "none",
            fix="give what Megatron-LM's get_model returned",
        )
    buffers: Any = chunks[0].ddp_config
    _refuse(buffers, _BUFFERS)
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
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


def _refuse(config: Any, settings: dict[str, str]) -> None:
    for name, why in settings.items():
        if getattr(config, name, None):
            raise UnsupportedError(
                f"{name} is not supported: {why}",
                expected=f"{name} off",
                found="on",
                fix="switch it off, or save and load with Megatron-LM's own functions on "
                "the same mesh",
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
    for name, layer in moe_layers(model):
        one_by_one = hasattr(layer.experts, "local_experts")
        if not one_by_one and not hasattr(getattr(layer.experts, "linear_fc1", None), "weight0"):
            raise UnsupportedError(
                "experts that lie in one tensor are not supported",
                parameter=f"{name}.experts",
                expected="a module or a parameter for each expert (SequentialMLP, TEGroupedMLP)",
                found=type(layer.experts).__name__,
                fix="build the model without --moe-grouped-gemm",
            )
