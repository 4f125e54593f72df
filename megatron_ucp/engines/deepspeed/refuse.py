"""Features of DeepSpeed under which a load would not be exact, refused by name before anything is
touched."""

from collections.abc import Callable, Iterable
from typing import Any

from megatron_ucp.core.box import dims_in_memory
from megatron_ucp.core.experts import refuse_slices
from megatron_ucp.engines.deepspeed.autotp import is_autotp, layouts_of
from megatron_ucp.engines.deepspeed.experts import autoep_layers, refuse_unplaced
from megatron_ucp.engines.deepspeed.extra_state import check_states
from megatron_ucp.engines.deepspeed.hooks import refuse_hooks
from megatron_ucp.engines.deepspeed.stage import is_pipeline, parallel_of
from megatron_ucp.engines.deepspeed.wrappers import wrapper_of
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families import families
from megatron_ucp.families.base import Model


def _offload(section: str, device: str) -> Callable[[Any], bool]:
    def found(engine: Any) -> bool:
        config = getattr(engine._config.zero_config, section, None)
        return config is not None and str(getattr(config.device, "value", config.device)) == device

    return found


def _zero(setting: str) -> Callable[[Any], bool]:
    """Whether a setting of the ZeRO section is given."""
    return lambda engine: getattr(engine._config.zero_config, setting) not in (None, False)


def _partial(engine: Any) -> bool:
    config = engine._config.zero_config.offload_optimizer
    return config is not None and getattr(config, "ratio", 1.0) < 1.0


def _super(engine: Any) -> bool:
    config = engine._config.zero_config.offload_optimizer
    return config is not None and bool(getattr(config, "super_offload", False))


def _folded(engine: Any) -> bool:
    return any(layer.folding_group_handles is not None for _, layer in autoep_layers(engine))


_REFUSED: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "AutoEP folded with AutoTP (expert_parallel beside tensor_parallel.autotp_size)",
        _folded,
        "leave one of the two out",
    ),
    (
        "optimizer states offloaded to NVMe (zero_optimization.offload_optimizer.device: nvme)",
        _offload("offload_optimizer", "nvme"),
        "offload to cpu",
    ),
    (
        "parameters offloaded to NVMe (zero_optimization.offload_param.device: nvme)",
        _offload("offload_param", "nvme"),
        "offload to cpu",
    ),
    ("SuperOffload (zero_optimization.offload_optimizer.super_offload)", _super, "switch it off"),
    (
        "partial offload (zero_optimization.offload_optimizer.ratio below 1)",
        _partial,
        "set ratio to 1",
    ),
    ("ZenFlow (zero_optimization.zenflow)", _zero("zenflow"), "switch it off"),
    (
        "DualPipeV (DualPipeVModule), whose ranks hold two separate runs of layers",
        lambda e: any(kind.__name__ == "DualPipeVEngine" for kind in type(e).__mro__),
        "use a PipelineModule with its usual schedule",
    ),
    (
        "hpZ (zero_optimization.zero_hpz_partition_size above 1)",
        lambda e: e._config.zero_config.zero_hpz_partition_size > 1,
        "set it to 1",
    ),
    (
        "quantized weights of ZeRO++ (zero_optimization.zero_quantized_weights)",
        _zero("zero_quantized_weights"),
        "switch it off",
    ),
    (
        "quantized frozen weights of ZeRO++ (zero_optimization.zero_quantized_nontrainable_weights)"
        ", whose scales DeepSpeed does not save",
        _zero("zero_quantized_nontrainable_weights"),
        "switch it off",
    ),
    (
        "a second home of Muon's momentum (zero_optimization.save_muon_momentum_buffer_in_memory)",
        _zero("save_muon_momentum_buffer_in_memory"),
        "leave it out",
    ),
    (
        "sequence parallelism by the config alone (sequence_parallel_size beside "
        "data_parallel_size, or mesh_param): ZeRO divides over data-parallel ranks, and all ranks "
        "of a sequence write the same files",
        lambda e: e.mesh_device is not None and int(e.sequence_parallel_size) > 1,
        "give DeepSpeed's parallel_state_sp, or what UlyssesSPAttentionHF registers, as mpu",
    ),
    (
        "sequence parallelism at ZeRO-3 under an mpu with a data-parallel group of its own: "
        "DeepSpeed divides parameters over that group alone, and the ranks of a sequence train "
        "copies that drift apart",
        lambda e: (
            int(e.sequence_parallel_size) > 1
            and e.zero_optimization_stage() == 3
            and hasattr(e.mpu, "get_data_parallel_group")
        ),
        "give DeepSpeed's parallel_state_sp as mpu, or train at ZeRO-2",
    ),
    (
        "node-local storage (checkpoint.use_node_local_storage): a rank does not see the files of "
        "other nodes",
        lambda e: bool(e.use_node_local_storage()),
        "save to storage that every rank sees",
    ),
]


_NO_FAMILY_SAYS: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "megatron-core's grouped experts (moe_grouped_gemm)",
        lambda e: any(type(m).__name__ in _GROUPED for m in e.module.modules()),
        "build the experts one by one: moe_grouped_gemm=False",
    ),
]
_GROUPED = ("GroupedMLP", "TEGroupedMLP")

_REFUSED_WRITERS: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "a decoupled checkpoint writer (checkpoint.writer.decoupled): files are not whole when "
        "save_checkpoint returns",
        lambda e: bool(e.checkpoint_engine.is_decoupled()),
        "set decoupled to false",
    ),
    (
        "the legacy file format (checkpoint.checkpoint_serialization: false)",
        lambda e: not e._config.checkpoint_config.get("checkpoint_serialization", True),
        "leave checkpoint_serialization out",
    ),
    (
        "a checkpoint writer other than torch's (checkpoint.writer), whose files were not checked",
        lambda e: (
            type(e.checkpoint_engine).__name__
            not in ("TorchCheckpointEngine", "DecoupledCheckpointEngine")
        ),
        "leave the section checkpoint.writer out",
    ),
]


_OR_RULES = "; or rules=FILE, which says it for any other model (docs/reference/rules.md)"


def refuse_writer(engine: Any) -> None:
    """Raises UnsupportedError where the engine's saves could not be described by a manifest."""
    if engine.checkpoint_engine is not None:  # ZeRO-3 without an optimizer has none
        _refuse(engine, _REFUSED_WRITERS)


def refuse_engine(engine: Any, model: Model | None) -> None:
    """Raises UnsupportedError where the engine uses a feature under which a load would not be
    exact."""
    _refuse(engine, _REFUSED)
    if is_pipeline(engine) and (model is None or not model.pipe):
        raise UnsupportedError(
            "this engine is a pipeline whose parameter names no family explains, which is not "
            "supported",
            expected="a family with pipeline names",
            found=model.family.name if model else "no family",
            fix=f"give {_one_of(name for name, family in families().items() if family.pipe)}"
            f"{_OR_RULES}",
            id="layout-unknown",
        )
    if model is None and int(engine.mp_world_size) > 1 and not is_autotp(engine):
        raise UnsupportedError(
            "this engine uses tensor parallelism without a family, which is not supported",
            found=f"mp_world_size {engine.mp_world_size}",
            fix=f"give {_one_of(families())}{_OR_RULES}",
            id="layout-unknown",
        )
    if model is not None and is_autotp(engine):
        raise UnsupportedError(
            "DeepSpeed's AutoTP cut this engine (tensor_parallel.autotp_size), and a family says "
            "something else of its parameters",
            expected="no family: each parameter says itself how it is cut",
            found=model.family.name,
            fix="leave family= out",
        )
    layouts_of(engine, *parallel_of(engine)[0])  # says what of them can't be put together
    if model is not None:
        _refuse(engine, _NO_FAMILY_SAYS)
    refuse_slices(engine.param_names.values())
    refuse_unplaced(engine)
    check_states(engine)
    _refuse_gaps(engine)
    if not is_pipeline(engine):
        refuse_hooks(engine.module)
    offloaded = getattr(engine.optimizer, "offloaded_states", None)
    if offloaded:
        raise UnsupportedError(
            "states of this engine are offloaded at the moment (engine.offload_states)",
            found=", ".join(str(getattr(s, "value", s)) for s in offloaded),
            fix="call engine.reload_states() before",
        )
    _refuse_strangers(engine)


def _refuse_gaps(engine: Any) -> None:
    """Raises UnsupportedError for a buffer whose memory is not its own elements alone."""
    kept = {*engine._get_buffer_names()}
    for name, tensor in engine.module.named_buffers():
        if name in kept and dims_in_memory(tuple(tensor.shape), tensor.stride()) is None:
            raise UnsupportedError(
                "the memory of a buffer has gaps, or one place for several elements: it is a view "
                "of another tensor (expand, a slice), which is not supported",
                parameter=name,
                expected="a tensor with memory of its own",
                found=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                fix="register a copy: tensor.contiguous(), or persistent=False",
            )


def _refuse_strangers(engine: Any) -> None:
    """Raises UnsupportedError where the optimizer steps what is no parameter of the model. With
    ZeRO DeepSpeed itself can't build such an engine."""
    strangers = [
        tuple(getattr(param, "ds_shape", param.shape))
        for buffer in wrapper_of(engine).buffers()
        for param in buffer.params
        if param not in engine.param_names
    ]
    if strangers:
        auto = is_autotp(engine)
        raise UnsupportedError(
            "the optimizer steps parameters that are not in the model: the model does not use "
            "them, and no save would hold them",
            expected="an optimizer of the model's own parameters",
            found=f"{len(strangers)} others, the first of shape {strangers[0]}",
            fix="AutoTP puts its own layers in the place of peft's and drops their adapters: leave "
            "one of the two out"
            if auto
            else "give the optimizer the parameters that the model has when it is given to "
            "deepspeed.initialize",
        )


def _one_of(names: Iterable[str]) -> str:
    return " or ".join(f'family="{name}"' for name in names)


def _refuse(engine: Any, rows: list[tuple[str, Callable[[Any], bool], str]]) -> None:
    for what, found, fix in rows:
        if found(engine):
            raise UnsupportedError(f"this engine uses {what}, which is not supported", fix=fix)
