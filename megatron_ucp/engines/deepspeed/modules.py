"""Modules that keep their parameters in a way of their own: hooks of the state dict, AutoTP's
cuts, experts, quantized layers."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import check_files, is_expert
from megatron_ucp.core.layout import Layout, Replicate
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.values import Values
from megatron_ucp.errors import LayoutError, ModelMismatchError, UnsupportedError, some_of
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.autoep import stacks_in
from megatron_ucp.formats.deepspeed.files import at_tp
from megatron_ucp.formats.deepspeed.tp_patterns import affine_layout
from megatron_ucp.formats.deepspeed.weights import is_extra_state

# ---- hooks
#
# Hooks of a model's state dict: what the files call its parameters and buffers.


def renamed_entries(module: torch.nn.Module) -> dict[str, str]:
    """Entries of the state dict under names that no parameter or buffer has, with the names of
    those that they are."""
    held, names = _held(module), _names(module)
    return {
        entry: names[id(value)]
        for entry, value in _entries(module).items()
        if entry not in held and id(value) in names
    }


def refuse_hooks(module: torch.nn.Module) -> None:
    """Raises UnsupportedError for an entry of the state dict that is no parameter and no buffer of
    the model: its file would have what no load can put back. What quantized layers add beside
    their frozen weights is no such entry: see `side_data_of`."""
    held, names = _held(module), _names(module)
    for entry, value in _entries(module).items():
        is_own = id(value) == id(held[entry]) if entry in held else id(value) in names
        if not is_own and not _is_of_frozen_weights(module, entry, held):
            raise UnsupportedError(
                "a hook of the model's state dict changes values or adds entries, which is not "
                "supported",
                parameter=entry,
                expected="the model's own parameters and buffers, under any names",
                found="another tensor than the model's" if entry in held else type(value).__name__,
                fix="take the hook away, or leave `attach` out: DeepSpeed's own save and load "
                "resume on the same mesh",
            )


def side_data_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What quantized layers add to the state dict beside their frozen weights, as bitsandbytes'
    layers do: tensors by the names of these entries."""
    held, names = _held(module), _names(module)
    return {
        entry: value
        for entry, value in _entries(module).items()
        if entry not in held and id(value) not in names and isinstance(value, torch.Tensor)
    }


def _is_of_frozen_weights(module: torch.nn.Module, entry: str, held: dict[str, Any]) -> bool:
    """Whether an entry is added by a module that has weights, all of them frozen."""
    if entry in held:
        return False
    path = entry
    modules = dict(module.named_modules())
    while path and path not in modules:
        path = path.rpartition(".")[0]
    params = [*modules[path].parameters(recurse=False)] if path else []
    return bool(params) and not any(param.requires_grad for param in params)


def _held(module: torch.nn.Module) -> dict[str, Any]:
    """Parameters and buffers by all of their names."""
    params = module.named_parameters(remove_duplicate=False)
    return {**dict(params), **dict(module.named_buffers(remove_duplicate=False))}


def _names(module: torch.nn.Module) -> dict[int, str]:
    return {id(value): name for name, value in reversed(_held(module).items())}


def _entries(module: torch.nn.Module) -> dict[str, Any]:
    entries = module.state_dict(keep_vars=True).items()
    return {name: value for name, value in entries if not is_extra_state(name)}


# ---- autotp
#
# How DeepSpeed's AutoTP cut the parameters of a live engine, as each of them says itself.


Layouts = Mapping[str, tuple[Ints, Layout]]  # by name: whole shape, layout


def is_autotp(engine: Any) -> bool:
    """Whether AutoTP cut the engine's model among several ranks."""
    return int(engine.autotp_size()) > 1


def layouts_of(engine: Any, tp: int, rank: int) -> Layouts:
    """Whole shape and layout of every parameter of an engine that AutoTP cut for `tp` ranks, of
    which this is the `rank`-th; empty for another engine. What AutoTP left alone is whole.

    Raises UnsupportedError for what AutoTP itself can't describe and for what `affine_layout`
    refuses, LayoutError where a live parameter has another shape than it says.
    """
    if not is_autotp(engine):
        return {}
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    _refuse_unsupported(engine)
    out: dict[str, tuple[Ints, Layout]] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        local = tuple(getattr(param, "ds_shape", param.shape))
        said = getattr(param, DS_AUTOTP_UC_META, None)
        if not said:
            out[name] = local, Replicate()
            continue
        shape, layout = affine_layout(said["conversion"]["affine_map"], name, None)
        share = layout.local_shape(name, shape, Mesh(tp=tp).place(at_tp(rank)))
        if share != local:
            raise LayoutError(
                "a live parameter has another shape than AutoTP says of it",
                parameter=name,
                expected=f"{share} of {shape} at tensor-parallel rank {rank} of {tp}",
                found=local,
                fix="this is a kind of layer that DeepSpeed's AutoTP describes wrongly: leave it "
                "out of tensor_parallel.partition_config",
            )
        out[name] = shape, layout
    return out


def _refuse_unsupported(engine: Any) -> None:
    """Raises UnsupportedError for parameters that AutoTP cut without describing how."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    reasons: dict[str, str] = {}
    for name, param in engine.module.named_parameters():
        said = getattr(param, DS_AUTOTP_UC_META, None)
        told = said["conversion"] if said else {}
        if said and (told.get("unsupported_reason") or told.get("affine_map") is None):
            reasons[name] = told.get("unsupported_reason") or "it does not say how it cut it"
    if reasons:
        name, why = next(iter(reasons.items()))
        raise UnsupportedError(
            "DeepSpeed marks parameters that AutoTP cut as ones that can't be put together",
            parameter=", ".join(reasons)[:200],
            expected="layouts that are described",
            found=f"{name}: {why}",
            fix="leave `attach` out: DeepSpeed's own save and load resume on the same mesh",
        )


def is_uneven(layouts: Layouts, tp: int) -> bool:
    """Whether ranks have shares of different sizes of some parameter."""
    places = [Mesh(tp=tp).place(at_tp(rank)) for rank in range(tp)]
    return any(
        len({layout.local_shape(name, shape, place) for place in places}) > 1
        for name, (shape, layout) in layouts.items()
    )


# ---- experts
#
# Where a live engine's experts lie: which ranks hold other experts, and which hold copies.


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
                fix="build the model with pretrain.mcore.models, or give DeepSpeed "
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


# ---- quantized
#
# Layers with quantized weights in a live engine (QLoRA: bitsandbytes' 4 and 8 bits): the base is
# frozen and quantized by its own loader, an adapter on it is trained, saved and resumed.


def check_side_data(source: Checkpoint, module: torch.nn.Module) -> None:
    """Compares what quantized layers keep beside their weights in a checkpoint with the live
    model's. Raises ModelMismatchError where the files hold quantized weights that a load would put
    between other scales."""
    saved = source.extras.side_data
    weights = {spec.name for spec in source.manifest.params if spec.kind == "frozen"}
    of_files = {name for name in saved if _lies_beside(name, weights)}
    if not of_files:
        return  # adapters alone, as trainers save them: the base is the engine's own
    live = side_data_of(module)
    values = Values.of(source, False)
    other = [
        name
        for name in sorted(of_files)
        if name not in live or not _same(values.built(saved[name], name), live[name])
    ]
    if other:
        raise ModelMismatchError(
            "the quantized weights of the base are others than those of the run",
            file=source.main_file,
            parameter=some_of(other),
            expected="the run's scales beside the weights (absmax, quant_state, SCB)",
            found=f"{len(other)} of {len(of_files)} that differ or are missing in the model",
            fix="quantize the base that the run had, with the same settings; or load the adapter "
            "alone, from a save with exclude_frozen_parameters=True",
        )


def quantized_note(module: torch.nn.Module) -> list[str]:
    """A note where a model has such layers."""
    found = side_data_of(module)
    if not found:
        return []
    kinds = {
        f"{type(layer).__module__.partition('.')[0]}'s {type(layer).__name__}"
        for name, layer in module.named_modules()
        if any(True for _ in layer.parameters(recurse=False))
        and any(entry.startswith(f"{name}.") for entry in found)
    }
    return [
        f"quantized layers ({', '.join(sorted(kinds))}): what is trained beside them is saved and "
        "resumed on any mesh. Their scales and settings are in saves that DeepSpeed's own code "
        "writes, and no load sets them: the base's own loader makes them anew"
    ]


def _lies_beside(name: str, weights: set[str]) -> bool:
    """Whether the weight that an entry belongs to is one of these: the entry's name goes on behind
    the weight's (`q.weight.absmax`), or lies in the same layer (`q.SCB`)."""
    path = name
    while path := path.rpartition(".")[0]:
        if weights & {path, f"{path}.weight", f"{path}.W_q"}:
            return True
    return False


def _same(one: Any, two: torch.Tensor) -> bool:
    if not isinstance(one, torch.Tensor) or one.shape != two.shape or one.dtype != two.dtype:
        return False
    flat = [value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in (one, two)]
    return torch.equal(*flat)
