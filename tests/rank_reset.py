"""Take DeepSpeed and Megatron-Core down inside a process, so that the next job finds them as after
their import.

Both keep process groups, caches and counters in module globals that outlive
`destroy_process_group`. What is listed here was found by running one job after another on other
world sizes; each entry says what goes wrong without it.
"""

import functools
import gc
import sys
from typing import Any

# Module -> global -> value after the import. A list, dict or set is emptied in place: others may
# have imported the object.
FRESH: dict[str, dict[str, Any]] = {
    # the next init_distributed believes that it is initialised, with the old world
    "deepspeed.comm.comm": {"cdb": None},
    # before 0.19.5 they outlived the world: "Group ... is not registered" in the next one
    "deepspeed.utils.groups": {
        "_WORLD_GROUP": None,
        "_EXPERT_PARALLEL_GROUP": {},
        "_EXPERT_DATA_PARALLEL_GROUP": {},
        "_ALL_TO_ALL_GROUP": {},
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP": None,
        "_TENSOR_MODEL_PARALLEL_GROUP": None,
        "_MODEL_PARALLEL_GROUP": None,
        "_DATA_PARALLEL_GROUP": None,
        "mesh_device": None,
        "mpu": None,
    },
    # the grid holds groups of the old world; unfinished sends would be waited for
    "deepspeed.runtime.pipe.p2p": {"_groups": None, "_grid": None, "_async": []},
    # "Conflicting tp_model_init arguments" when the next job wants another tensor-parallel size
    "deepspeed.runtime.tensor_parallel.init_utils": {"_TP_MODEL_INIT_ARGS": None},
    # "sequence parallel group is already initialized" when the next job wants one, too
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "_SEQUENCE_PARALLEL_GROUP": None,
        "_SEQUENCE_DATA_PARALLEL_GROUP": None,
    },
    # a job without torch_autocast would communicate in the last job's dtype
    "deepspeed.runtime.torch_autocast": {
        "TORCH_AUTOCAST_INITIALIZED": False,
        "TORCH_AUTOCAST_DTYPE": None,
    },
    # asked for only while None: recomputation would go over the old model-parallel group
    "deepspeed.runtime.activation_checkpointing.checkpointing": {
        "mpu": None,
        "mp_rank": 0,
        "mp_size": 1,
        "mp_group": None,
        "num_layers": None,
        "contiguous_data_buffers": [],
        "contiguous_size_buffers": [],
        "data_offsets": [],
        "size_offsets": [],
        "PARTITION_ACTIVATIONS": False,
        "CPU_CHECKPOINT": False,
        "CONTIGUOUS_CHECKPOINTING": False,
        "deepspeed_checkpointing_enabled": False,
    },
    # hold every module and parameter of an engine that was not destroyed
    "deepspeed.utils.debug": {"module_names": {}, "param_names": {}},
    "deepspeed.runtime.zero.parameter_offload": {"FWD_MODULE_STACK": []},
    "deepspeed.runtime.zero.partition_parameters": {
        "temp_contiguous_tensor": None,
        "empty_buffers": {},
    },
    # auxiliary losses that the last job counted: in the first up to 0.17, in the second from 0.18
    "megatron.core.transformer.moe.moe_utils": {"_MOE_LAYER_WISE_LOGGING_TRACKER": {}},
    "megatron.core.transformer.moe.moe_logging": {"_MOE_METRICS_TRACKER": None},
    "megatron.core.rerun_state_machine": {"_GLOBAL_RERUN_STATE_MACHINE": None},
    "megatron.core.num_microbatches_calculator": {"_GLOBAL_NUM_MICROBATCHES_CALCULATOR": None},
    "megatron.core.tensor_parallel.random": {
        "_CUDA_RNG_STATE_TRACKER": None,
        "_CUDA_RNG_STATE_TRACKER_INITIALIZED": False,
    },
    # names of groups, which count from zero again: the next job would close DeepSpeed's
    "pretrain.mcore.groups": {"_groups": set()},
}

frozen_modules = 0
frozen_caches: list[Any] = []


def take_down() -> None:
    """Destroy all process groups of this process and make both libraries forget them. Not
    collective."""
    destroy_engines()
    gc.collect()  # engines are full of cycles; what they hold of the groups must go first
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state:
        parallel_state.destroy_model_parallel()
    comm = sys.modules["deepspeed.comm.comm"]
    if comm.cdb is not None and comm.cdb.is_initialized():
        comm.destroy_process_group()
    mailboxes = sys.modules.get("tests.mailboxes")
    if mailboxes and hasattr(mailboxes.MailboxGroup, "mailboxes"):
        mailboxes.MailboxGroup.mailboxes.close()
        del mailboxes.MailboxGroup.mailboxes
    for module_name, values in FRESH.items():
        module = sys.modules.get(module_name)
        for name, value in values.items() if module else ():
            if not hasattr(module, name):  # this version of the library keeps nothing there
                continue
            if isinstance(value, list | dict | set):
                getattr(module, name).clear()
            else:
                setattr(module, name, value)
    reset_zero3()
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils:  # DeepSpeed's loss left a scalar there; megatron-core would copy one element
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    clear_caches()
    gc.collect()
    freeze_imports()


def destroy_engines() -> None:
    """Hooks on gradients tie a ZeRO engine into cycles through C++, which no collector sees: each
    leaks its threads."""
    import deepspeed

    for thing in gc.get_objects():
        if issubclass(type(thing), deepspeed.DeepSpeedEngine):
            thing.destroy()
            for held in (
                "pipe_buffers",
                "total_loss",
                "loss",
                "fwd_outputs",
                "agg_train_loss",
                "total_additional_losses",
            ):
                if (
                    held in thing.__dict__
                    # of a pipeline: the last micro batches' graphs, whose hooks lead back to the
                    # engine
                ):
                    setattr(thing, held, None)


def reset_zero3() -> None:
    import torch
    from deepspeed.runtime.zero import parameter_offload, partition_parameters

    # Both count on over engines. A rank that sat out a job is behind: "disagreement between rank0
    # and rank2".
    register: Any = getattr(
        parameter_offload.DeepSpeedZeRoOffload, "_register_deepspeed_module", None
    )
    if register is not None:  # from DeepSpeed 0.16 on
        register.__defaults__[0][0] = 0
    partition_parameters.Init.param_id = 0
    # ZeRO-3 replaces it for good; engines of other stages in later jobs would multiply with it.
    patched = partition_parameters.InsertPostInitMethodToModuleSubClasses
    torch.nn.functional.linear = getattr(patched, "linear_bk", torch.nn.functional.linear)
    patched.num_module_parameters = patched.num_module_elements = 0


def clear_caches() -> None:
    """Empty every `lru_cache` of both libraries. Some sit on methods and keep engines alive, with
    threads and sockets: `PartitionedParameterCoordinator.__params_to_release` (hidden in a
    closure), `RotaryEmbedding.forward`."""
    for cache in frozen_caches + find_caches():
        cache.cache_clear()


def find_caches() -> list[Any]:
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is functools._lru_cache_wrapper
        and thing.__module__.startswith(("deepspeed.", "megatron.core"))
    ]


def freeze_imports() -> None:
    """After new imports: take all that lives now out of the garbage collector's sight, 0.2 s less
    per four-rank job."""
    global frozen_modules
    if len(sys.modules) > frozen_modules:
        frozen_modules = len(sys.modules)
        frozen_caches.extend(find_caches())
        gc.freeze()
