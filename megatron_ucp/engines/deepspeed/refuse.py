"""What of a DeepSpeed engine can't be saved or resumed exactly, refused by name before anything
is touched."""

from collections.abc import Callable, Iterable
from typing import Any

from megatron_ucp.core.box import dims_in_memory
from megatron_ucp.core.experts import refuse_slices
from megatron_ucp.engines.deepspeed.modules import (
    autoep_layers,
    check_side_data,
    is_autotp,
    layouts_of,
    refuse_hooks,
    refuse_unplaced,
)
from megatron_ucp.engines.deepspeed.optimizer import Wrapper, wrapper_of
from megatron_ucp.engines.deepspeed.program import check_arguments
from megatron_ucp.engines.deepspeed.shard import LocalShard, is_pipeline, parallel_of
from megatron_ucp.engines.deepspeed.state import check_states
from megatron_ucp.engines.live import check_model
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.families import families
from megatron_ucp.families.family import Model
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.optimizers import MUON, steps_matrices
from megatron_ucp.formats.optimizers import (
    REFUSED,
    REFUSED_STATES,
    WHOLE_MATRICES,
    full_name,
    in_table,
    name_in_table,
    refuse_step_in_group,
    taken_as,
)

# ---- carried
#
# Whether saves of an engine can hold all that it trains: found when it is attached, before
# anybody trains for hours.


_OWN_LOAD = (
    "leave `attach` out: DeepSpeed's own save and load, which load_checkpoint(native=True) of an "
    "attached engine is, resume on the same mesh"
)
_NAMED = 5


def carried_as(engine: Any) -> str:
    """A note where the optimizer's class is a subclass that is taken as one that is known, else "".

    Raises UnsupportedError for an optimizer whose states can't be cut, and for a trainable
    parameter that no save would hold.
    """
    wrapper = wrapper_of(engine)
    _refuse_unsaved(engine, wrapper)
    if wrapper.base is None:
        return ""
    kind = type(wrapper.base)
    _refuse_states(wrapper, name_in_table(kind), full_name(kind))
    return taken_as(kind)


def _refuse_states(wrapper: Wrapper, name: str, full: str) -> None:
    groups = wrapper.base.param_groups
    flat = wrapper.zero > 0 or type(wrapper.opt).__name__ == "FP16_Optimizer"
    marked = name != MUON and any(map(steps_matrices, groups))
    if flat and (name in WHOLE_MATRICES or marked):
        raise UnsupportedError(
            "this optimizer steps whole matrices (Muon), and its states at this ZeRO stage follow "
            "no partition, which is not supported",
            found=full,
            expected="ZeRO stage 0",
            fix="train with DeepSpeed's own Muon (optimizer.type: muon in its config), at stage 0 "
            f"with torch.optim.Muon, or {_OWN_LOAD}",
        )
    if name in REFUSED:
        raise UnsupportedError(
            "this optimizer can't be carried to another mesh",
            found=f"{full}: {REFUSED[name]}",
            expected="an optimizer whose step of an element depends on that element alone",
            fix=f"train with torch.optim.AdamW and gradient clipping, or {_OWN_LOAD}",
        )
    refuse_step_in_group(name)
    held = {str(key) for state in wrapper.base.state.values() for key in state}
    refused = sorted(key for key in held if key in REFUSED_STATES)
    if not in_table(name) or refused:
        why = "; ".join(f"{key}: {REFUSED_STATES[key]}" for key in refused)
        raise UnsupportedError(
            "the states of this optimizer are not known, so that a save could not be resumed on "
            "another mesh",
            found=f"{full} ({why})" if why else full,
            expected="an optimizer of torch.optim or of DeepSpeed that is known, or a registered "
            "one",
            fix=f'say what it keeps with ucp.register_optimizer("{name}", element=..., '
            f"scalar=...) before, where each element-wise state is independent of its "
            f"neighbours; or {_OWN_LOAD}",
        )


def _elems(param: Any) -> int:
    """Elements of the whole parameter: one without any has no value that could be lost."""
    return int(getattr(param, "ds_numel", param.numel()))


def _refuse_unsaved(engine: Any, wrapper: Wrapper) -> None:
    """At ZeRO-3 DeepSpeed writes the parameters of the optimizer's groups, and frozen ones."""
    if wrapper.zero < 3 or wrapper.base is None:
        return
    stepped = {id(param) for group in wrapper.opt.fp16_groups for param in group}
    lost = [
        name
        for name, param in engine.module.named_parameters()
        if param.requires_grad and id(param) not in stepped and _elems(param)
    ]
    if lost:
        raise UnsupportedError(
            "a trainable parameter is in no group of the optimizer: at ZeRO-3 DeepSpeed never "
            "writes its value, and each save would lose it",
            parameter=lost[0],
            found=f"{len(lost)} such parameters: {', '.join(lost[:_NAMED])}",
            expected="every trainable parameter in a group, or requires_grad_(False)",
            fix="give it to the optimizer or freeze it before deepspeed.initialize. native=True "
            "and ucp.register_optimizer don't help: no file has the value",
        )


# ---- refuse
#
# Features of DeepSpeed under which a load would not be exact, refused by name before anything is
# touched.


def _offload(section: str, device: str) -> Callable[[Any], bool]:
    def found(engine: Any) -> bool:
        config = getattr(engine._config.zero_config, section, None)
        return config is not None and str(getattr(config.device, "value", config.device)) == device

    return found


def _zero(setting: str) -> Callable[[Any], bool]:
    """Whether a setting of the ZeRO section is given."""
    return lambda engine: getattr(engine._config.zero_config, setting) not in (None, False)


_REFUSED: list[tuple[str, Callable[[Any], bool], str]] = [
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
    (
        "SuperOffload (zero_optimization.offload_optimizer.super_offload)",
        lambda e: getattr(e._config.zero_config.offload_optimizer, "super_offload", False),
        "switch it off",
    ),
    (
        "partial offload (zero_optimization.offload_optimizer.ratio below 1)",
        lambda e: getattr(e._config.zero_config.offload_optimizer, "ratio", 1.0) < 1.0,
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
    (
        "AutoEP folded with AutoTP (expert_parallel beside tensor_parallel.autotp_size)",
        lambda e: any(layer.folding_group_handles is not None for _, layer in autoep_layers(e)),
        "leave one of the two out",
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


_OF_ENGINES = "module", "save_checkpoint", "load_checkpoint"


def require_engine(engine: Any) -> None:
    """Raises UsageError for what is no engine."""
    if not hasattr(engine, "__dict__") or not all(hasattr(engine, name) for name in _OF_ENGINES):
        raise UsageError(
            "this is no engine",
            expected="an engine of DeepSpeed, or what ucp.attach_megatron returned",
            found=type(engine).__qualname__,
            fix="give the engine that deepspeed.initialize returned, the first of its results",
        )


def refuse_engine(engine: Any) -> None:
    """Raises UsageError for what is no engine, UnsupportedError where one uses a feature under
    which a load would not be exact."""
    require_engine(engine)
    _refuse(engine, _REFUSED)
    kept, params = {*engine._get_buffer_names()}, engine.param_names
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
    refuse_slices(params.values())
    refuse_unplaced(engine)
    if auto := is_autotp(engine):
        layouts_of(engine, *parallel_of(engine)[0])  # says what of them can't be put together
    if not is_pipeline(engine):
        refuse_hooks(engine.module)
    check_states(engine)
    offloaded = getattr(engine.optimizer, "offloaded_states", None)
    if offloaded:
        raise UnsupportedError(
            "states of this engine are offloaded at the moment (engine.offload_states)",
            found=", ".join(str(getattr(s, "value", s)) for s in offloaded),
            fix="call engine.reload_states() before",
        )
    stepped = (param for buffer in wrapper_of(engine).buffers() for param in buffer.params)
    strangers = [tuple(getattr(p, "ds_shape", p.shape)) for p in stepped if p not in params]
    if strangers:  # with ZeRO DeepSpeed itself can't build such an engine
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


def refuse_model(engine: Any, model: Model | None) -> None:
    """Raises UnsupportedError where the engine needs a family and has none, or has one that says
    something else than the engine itself."""
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
    if model is not None:
        _refuse(engine, _NO_FAMILY_SAYS)


def refuse_source(source: Checkpoint, shard: LocalShard, optimizer: bool) -> None:
    """Raises ModelMismatchError for a checkpoint of a model that computes something else than the
    engine's, which no shape shows; UnsupportedError for an `optimizer` whose states are asked for,
    and that keeps its steps in its groups."""
    module = shard.engine.module
    if optimizer:
        refuse_step_in_group(shard.optimizer_name())
    if shard.model is not None:
        check_model(source, shard.model, module)
    check_side_data(source, module)
    check_arguments(source, module)


def _one_of(names: Iterable[str]) -> str:
    return " or ".join(f'family="{name}"' for name in names)


def _refuse(engine: Any, rows: list[tuple[str, Callable[[Any], bool], str]]) -> None:
    for what, found, fix in rows:
        if found(engine):
            raise UnsupportedError(f"this engine uses {what}, which is not supported", fix=fix)
