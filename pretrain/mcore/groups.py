"""megatron-core's process groups for the current world, as DeepSpeed asks for them; and the
generators of random numbers, which follow a rank's place in them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.errors import UsageError
from pretrain.mcore import ulysses

PATCHES = ("no_torch_compile", "current_device_is_cpu", "rng_tracker_on_cpu")
# what either of the two engines needs besides
OF_DEEPSPEED = ("unfused_norm", "no_muon_compile")
OF_MEGATRON = (
    "cuda_literals_on_cpu",
    "cuda_type_names_on_cpu",
    "cuda_streams_on_cpu",
    "adamw_load",
)

# Names of the process groups that `start` made. Not the groups: they would be kept alive after the
# end of the world.
_groups: set[str] = set()
# whether the model of the last `start` is trained by DeepSpeed, and how many ranks share a sequence
_deepspeed = True
_sequence_ranks = 1


def start(
    tp: int,
    seed: int,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    deepspeed: bool = True,
    sp: int = 1,
) -> None:
    """Makes megatron-core's process groups for the current world (dp = world / tp / pp, default
    rank order) and seeds all generators as Megatron does. Applies the patches that training needs;
    those for machines without a GPU only there.

    `ep` ranks share the experts of a layer, `etp` ranks (as Megatron: by default `tp`) cut each of
    them. Both re-divide the ranks of a stage. Where that gives experts other copies than the rest
    of the model has (see `experts_are_apart`), DeepSpeed is told who holds them.

    `sp` neighbouring ranks share each sequence under DeepSpeed (see `ulysses`), without any other
    parallelism than data parallelism.

    `deepspeed` False: megatron-core's own optimizer trains what is built next, in pipeline stages
    of `vpp` chunks each (see `chunks`), and nothing of DeepSpeed is imported.

    Collective. Raises UsageError when torch.distributed is not initialised, when tp x pp or
    etp x ep x pp does not divide the world, or when the groups of an earlier `start` are still
    there.
    """
    if not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised", fix="call deepspeed.init_distributed() first"
        )
    etp = tp if etp is None else etp
    _check_sizes(dist.get_world_size(), tp, pp, ep, etp)
    import megatron_ucp_patches as patches  # pyright: ignore[reportMissingImports]  (package_dir in setup.py)

    for name in (*PATCHES, *(OF_DEEPSPEED if deepspeed else OF_MEGATRON)):
        patches.apply(name)
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        there = "megatron-core's process groups are there already"
        raise UsageError(there, fix="call models.stop() first")
    global _deepspeed, _sequence_ranks
    _deepspeed, _sequence_ranks = deepspeed, sp
    _groups.clear()
    with closed_by_stop():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            create_gloo_process_groups=not deepspeed,  # its own checkpoints gather over them
        )
        if sp > 1:
            ulysses.start(sp)
    if deepspeed and experts_are_apart():
        _tell_deepspeed()
    _seed_generators(stage_seed(seed))


def _seed_generators(seed: int) -> None:
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    # dropout outside of the tensor-parallel regions: alike on all tensor-parallel ranks
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _check_sizes(world: int, tp: int, pp: int, ep: int, etp: int) -> None:
    if tp < 1 or world % tp:
        raise UsageError(
            "the tensor-parallel size does not divide the number of ranks",
            expected=f"a divisor of {world}",
            found=tp,
            fix="start another number of ranks, or change --tensor-model-parallel-size",
        )
    if pp < 1 or world // tp % pp:
        raise UsageError(
            "the number of pipeline stages does not divide the number of ranks",
            expected=f"a divisor of {world // tp} ({world} ranks, tensor-parallel size {tp})",
            found=pp,
            fix="start another number of ranks, or change --pipeline-model-parallel-size",
        )
    if min(ep, etp) < 1 or world // pp % (ep * etp):
        raise UsageError(
            "expert-parallel size x expert-tensor-parallel size does not divide the ranks of a "
            "stage",
            expected=f"a divisor of {world // pp} ({world} ranks, {pp} stages)",
            found=f"{ep} x {etp}",
            fix="change --expert-model-parallel-size or --expert-tensor-parallel-size",
        )


def experts_are_apart() -> bool:
    """Whether an expert's copies are on other ranks than those of the rest of the model: the ranks
    share the experts of a layer, or cut an expert otherwise than attention. DeepSpeed then sums
    their gradients, and cuts their optimizer states, over groups of their own. Where not, experts
    are parameters like others."""
    from megatron.core import parallel_state

    return (
        parallel_state.get_expert_model_parallel_world_size() > 1
        or parallel_state.get_expert_tensor_parallel_world_size()
        != parallel_state.get_tensor_model_parallel_world_size()
    )


def deepspeed_trains() -> bool:
    """Whether `start` was called for a model that DeepSpeed trains; else megatron-core's own
    optimizer does."""
    return _deepspeed


def expert_group_name() -> str:
    """The name under which DeepSpeed knows the groups of the experts."""
    from megatron.core import parallel_state

    return f"ep_size_{parallel_state.get_expert_model_parallel_world_size()}"


def _tell_deepspeed() -> None:
    """Registers megatron-core's groups of experts. Those that DeepSpeed would make by itself are
    others wherever there is tensor parallelism."""
    from deepspeed.utils import groups
    from megatron.core import parallel_state

    sharing: Any = parallel_state.get_expert_model_parallel_group()
    copies: Any = parallel_state.get_expert_data_parallel_group()
    sharers, holders = map(dist.get_process_group_ranks, (sharing, copies))
    for held, found in zip(_registries(), (sharing, sharers, copies, holders), strict=True):
        held[expert_group_name()] = found
    groups.expert_tensor_parallel_world_size = (
        parallel_state.get_expert_tensor_parallel_world_size()
    )


def _untell_deepspeed() -> None:
    from deepspeed.utils import groups

    for held in _registries():
        held.pop(expert_group_name(), None)
    groups.expert_tensor_parallel_world_size = 1


def _registries() -> tuple[dict[str, Any], ...]:
    """Where DeepSpeed has the groups of experts by name, and the ranks of each: those that share a
    layer's experts, and those that hold the same ones."""
    from deepspeed.utils import groups

    return (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    )


def stage_seed(seed: int) -> int:
    """The seed of this rank's pipeline stage: Megatron's rule, under which stages draw apart."""
    from megatron.core import parallel_state

    return seed + 100 * parallel_state.get_pipeline_model_parallel_rank()


@contextlib.contextmanager
def closed_by_stop() -> Iterator[None]:
    """The process groups that are made inside are closed by `stop`."""
    before = set(_open_groups())
    yield
    _groups.update(set(_open_groups()) - before)


def stop() -> None:
    """Takes down what `start` made, so that it can be called again with other sizes. Collective.

    Destroy the engines first. megatron-core forgets its groups but leaves them open, with a few
    sockets and threads each; they are closed here.
    """
    from megatron.core import parallel_state

    if _deepspeed and parallel_state.model_parallel_is_initialized() and experts_are_apart():
        _untell_deepspeed()
    parallel_state.destroy_model_parallel()
    if _sequence_ranks > 1:
        ulysses.stop()
    for name, group in _open_groups().items():
        if name in _groups:
            dist.destroy_process_group(group)
    _groups.clear()


def _open_groups() -> dict[str, Any]:
    """All process groups that this rank belongs to, by name."""
    from torch.distributed import distributed_c10d

    return (
        {name: group for group, name in distributed_c10d._world.pg_names.items()}
        if dist.is_initialized()
        else {}
    )


class _Mpu:
    """megatron-core's parallel_state with the names that DeepSpeed asks for.

    DeepSpeed sums gradient norms over, and numbers model files by, the "model parallel" group.
    megatron-core's own `get_model_parallel_group` would be tensor x pipeline; without pipeline
    stages the two are the same ranks. A pipeline brings an object of its own to DeepSpeed; for what
    else asks, this one has the right groups there too.
    """

    def __getattr__(self, name: str) -> Any:
        from megatron.core import parallel_state

        return getattr(parallel_state, name)

    def get_model_parallel_rank(self) -> int:
        return self.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        return self.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> Any:
        return self.get_tensor_model_parallel_group()


def mpu() -> Any:
    """The object for `deepspeed.initialize(mpu=...)`. It asks megatron-core each time, so it
    outlives `stop` and `start`."""
    return _Mpu()
