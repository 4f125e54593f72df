"""Where a live engine's experts lie: which ranks hold other experts, and which hold copies."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_ucp.core.experts import check_files, is_expert
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.autoep import stacks_in


def with_experts(engine: Any, mesh: Mesh) -> Mesh:
    """The mesh of an engine with the axes of its experts, as the groups say with which DeepSpeed
    reduces their gradients. Experts without such groups are parameters like all others.

    Raises UnsupportedError for groups that no mesh has, and as `check_files`.
    """
    from deepspeed.moe.utils import is_moe_param

    named = engine.module.named_parameters()
    of_experts = {name: param for name, param in named if is_moe_param(param)}
    groups = {param.group_name for param in of_experts.values()}
    if not groups:
        ordinary = any(is_expert(name) for name in engine.param_names.values())
        return mesh.with_experts(1, mesh.cut_of_dense) if ordinary else mesh
    if len(groups) > 1:
        raise UnsupportedError(
            "the layers' experts are divided among different numbers of ranks",
            expected="one expert-parallel size for all layers",
            found=", ".join(sorted(groups)),
            fix="build all layers with one ep_size",
        )
    (name,) = groups
    parallel, copies = _ranks(name)
    found = mesh.with_experts(len(parallel), mesh.world // (mesh.pp * len(parallel) * len(copies)))
    _check(found, name, parallel, copies)
    if found.experts_apart:
        _check_names(engine, of_experts)
        _check_reduced(engine, of_experts)
        check_files(found.cut_of_dense, found.ep, found.cut_of_experts)
    return found


def refuse_unplaced(engine: Any) -> None:
    """Raises UnsupportedError for experts that ranks number from 0 for themselves, where no group
    says which rank has which."""
    from deepspeed.moe.utils import is_moe_param

    for name, param in engine.module.named_parameters():
        if is_moe_param(param) and not hasattr(param, "group_name"):
            raise UnsupportedError(
                "experts are divided among ranks, and nothing says which rank has which",
                parameter=name,
                expected="param.group_name, as deepspeed.moe and megatron_ucp's models set it",
                found="allreduce is False, and there is no group",
                fix="build the model with megatron_ucp.engines.megatron.models, or give DeepSpeed "
                "the groups of the experts",
            )


def _check_names(engine: Any, of_experts: Iterable[str]) -> None:
    """Raises UnsupportedError for a parameter that other ranks hold otherwise, and whose name does
    not say of which expert it is."""
    stacks = stacks_of(engine)
    for name in of_experts:
        if name not in stacks and not is_expert(name):
            raise UnsupportedError(
                "a parameter of experts does not say of which ones",
                parameter=name,
                expected="a module for each expert, in local_experts or deepspeed_experts",
                found="a parameter that DeepSpeed reduces with the experts (allreduce is False)",
                fix="build the experts one by one",
            )


def _check_reduced(engine: Any, of_experts: Collection[str]) -> None:
    """Raises UnsupportedError for a trained parameter of an expert whose gradients DeepSpeed takes
    for those of other ranks' experts too, as of adapters that were added to them later."""
    for name, param in engine.module.named_parameters():
        if param.requires_grad and is_expert(name) and name not in of_experts:
            raise UnsupportedError(
                "a parameter of an expert is reduced with those of other experts",
                parameter=name,
                expected="allreduce False and the group_name of the expert's other parameters",
                found="a parameter that DeepSpeed takes for one that all ranks have",
                fix="set both before the optimizer's groups are made, or train it at "
                "expert-parallel size 1",
            )


def autoep_layers(engine: Any) -> Iterator[tuple[str, Any]]:
    """The mixtures that DeepSpeed's AutoEP divided, by name in the model."""
    for name, module in engine.module.named_modules():
        if type(module).__name__ == "AutoEPMoELayer":
            yield name, module


def stacks_of(engine: Any) -> dict[str, int]:
    """Parameters that hold all experts of a rank, by the module's names, and how many: AutoEP's."""
    return {
        stack: int(layer.num_local_experts)
        for name, layer in autoep_layers(engine)
        for stack in stacks_in(f"{name}.experts" if name else "experts")
    }


def _ranks(name: str) -> tuple[list[int], list[int]]:
    """Ranks among which the experts are divided, and those that hold this rank's."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    return (
        list(dist.get_process_group_ranks(groups._get_expert_parallel_group(name))),
        list(dist.get_process_group_ranks(groups._get_expert_data_parallel_group(name))),
    )


def _check(mesh: Mesh, name: str, parallel: list[int], copies: list[int]) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    want: Mapping[str, list[int]] = {
        "expert-data-parallel": list(mesh.expert_data_group(rank)),
        "expert-parallel": mesh.expert_parallel_group(rank),
    }
    for (what, ranks), found in zip(want.items(), (copies, parallel), strict=True):
        if sorted(found) != ranks:
            raise UnsupportedError(
                f"the {what} groups of the experts are not those of a mesh",
                expected=f"ranks {ranks} for {name}",
                found=str(found),
                fix="make the groups in the order of megatron-core: expert-tensor-parallel ranks "
                "first, then expert-parallel ones, then copies",
            )
