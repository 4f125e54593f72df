"""What this rank's masters hold, from the bookkeeping of DeepSpeed's wrappers of where gradients
go, not from the package's formulas."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# (parameter, first element of it, elements, flat master, offset in the master, group)
Run = tuple[str, int, int, torch.Tensor, int, int]


def names(engine: Any) -> dict[Any, str]:
    return {param: name for name, param in named(engine).items()}


def named(engine: Any) -> dict[str, Any]:
    """This rank's parameters by the name that a model of one rank has: with the number of an expert
    in the whole layer, and as a GPTModel without pipeline has it."""
    params = dict(engine.module.named_parameters())
    return {without_pipeline(engine, _numbered(params, name)): params[name] for name in params}


STACKED = re.compile(r".*\.experts\.w[123]")  # all experts of a rank, as AutoEP keeps them
EXPERT = re.compile(r"(.*\.(?:local_experts|deepspeed_experts)\.)(\d+)(\..*)")


def expert_group(param: Any) -> str | None:
    """The name of DeepSpeed's group of an expert's parameter; None for any other parameter."""
    return param.group_name if not getattr(param, "allreduce", True) else None


def _numbered(params: dict[str, Any], name: str) -> str:
    if STACKED.fullmatch(name):
        from deepspeed.utils import groups

        return f"{name}@{groups._get_expert_parallel_rank(params[name].group_name)}"
    found = EXPERT.fullmatch(name)
    group = expert_group(params[name]) if found else None
    if found is None or group is None:
        return name
    from deepspeed.utils import groups

    head, number, rest = found.groups()
    listed = filter(None, map(EXPERT.fullmatch, params))
    own = {other[2] for other in listed if other[1] == head}
    first = groups._get_expert_parallel_rank(group) * len(own)
    return f"{head}{first + int(number)}{rest}"


def name_of_buffer(engine: Any, name: str) -> str:
    """As `named`, of a module's buffer."""
    params, found = dict(engine.module.named_parameters()), EXPERT.fullmatch(name)
    if found is not None:
        beside = next(other for other in params if other.startswith(f"{found[1]}{found[2]}."))
        name = _numbered(params, beside).removesuffix(beside.removeprefix(found[1] + found[2]))
        name += found[3]
    return without_pipeline(engine, name)


def without_pipeline(engine: Any, name: str) -> str:
    """A name in a model of one stage; a pipeline has embedding, L layers, norm and head."""
    if not hasattr(engine, "num_stages"):
        return name
    head, _, rest = name.partition(".")
    if head == "tied_modules":
        return "embedding." + rest.partition(".")[2]
    layer, layers = int(head), engine.module.config.num_layers
    fixed = {0: "embedding", layers + 1: "decoder.final_layernorm", layers + 2: "output_layer"}
    return f"{fixed.get(layer, f'decoder.layers.{layer - 1}')}.{rest}"


def wrapper_of(engine: Any) -> str:
    return type(engine.optimizer).__name__


def base_of(engine: Any) -> Any:
    """The optimizer inside DeepSpeed's wrapper."""
    plain = isinstance(engine.optimizer, torch.optim.Optimizer)
    return engine.optimizer if plain else engine.optimizer.optimizer


def runs_of(engine: Any) -> list[Run]:
    """Every run of elements of a parameter that this rank's masters hold."""
    of_kind = BY_WRAPPER.get(wrapper_of(engine), _unwrapped)
    return list(of_kind(engine.optimizer, names(engine)))


def matrices_of(engine: Any) -> list[tuple[torch.Tensor, list[tuple[str, int, int]]]]:
    """Each master whose momentum is whole matrices, as DeepSpeed's Muon keeps it at ZeRO-1 and 2
    without offload, and (parameter, elements, offset in the momentum): in the order of the
    wrapper's own list of what touches a partition."""
    opt, known = engine.optimizer, names(engine)
    if wrapper_of(engine) != "DeepSpeedZeroOptimizer" or opt.cpu_offload:
        return []
    out = []
    for g, master in enumerate(opt.single_partition_of_fp32_groups):
        if opt.optimizer.param_groups[g].get("use_muon"):
            runs, at = [], 0
            for p in opt.params_in_partition[g]:
                runs.append((known[p], p.numel(), at))
                at += p.numel()
            out.append((master, runs))
    return out


def _partitioned(opt: Any, known: dict[Any, str]) -> Iterator[Run]:
    """ZeRO-1 and 2."""
    masters, flats = opt.single_partition_of_fp32_groups, opt.bit16_groups_flat
    for g, master in enumerate(masters):
        yield from _in_flat(opt, known, g, flats[g], opt.bit16_groups[g], master)


def _bf16(opt: Any, known: dict[Any, str]) -> Iterator[Run]:
    masters, flats = opt.fp32_groups_flat_partition, opt.bf16_groups_flat
    for g, master in enumerate(masters):
        yield from _in_flat(opt, known, g, flats[g], opt.bf16_groups[g], master)


def _in_flat(
    opt: Any, known: dict[Any, str], g: int, flat: torch.Tensor, params: Any, master: torch.Tensor
) -> Iterator[Run]:
    low = dist.get_rank(opt.real_dp_process_group[g]) * master.numel()
    for p in params:  # the model's weights are views of the flat buffer: ask the memory
        start = (p.data_ptr() - flat.data_ptr()) // p.element_size()
        a, b = max(start, low), min(start + p.numel(), low + master.numel())
        if a < b:
            yield known[p], a - start, b - a, master, a - low, g


def _zero3(opt: Any, known: dict[Any, str]) -> Iterator[Run]:
    for group in opt.fp16_groups:
        for p in group:
            rank = dist.get_rank(p.ds_process_group)  # experts have one of their own
            i, offset, width = opt.grad_position[opt.get_param_id(p)][:3]
            first = rank * width
            count = max(0, min(width, p.ds_numel - first))
            master, g = opt.fp32_partitioned_groups_flat[i], opt.sub_group_to_group_id[i]
            if count:
                yield known[p], first, count, master, offset, g


def _unfused(opt: Any, known: dict[Any, str]) -> Iterator[Run]:
    """One master for each parameter."""
    for g, (params, masters) in enumerate(zip(opt.fp16_groups, opt.fp32_groups, strict=True)):
        for p, master in zip(params, masters, strict=True):
            yield known[p], 0, p.numel(), master, 0, g


def _fused(opt: Any, known: dict[Any, str]) -> Iterator[Run]:
    """One whole flat master for each group."""
    for g, master in enumerate(opt.fp32_groups_flat):
        at = 0
        for p in opt.fp16_groups[g]:
            yield known[p], 0, p.numel(), master, at, g
            at += p.numel()


def _unwrapped(opt: Any, known: dict[Any, str]) -> Iterator[Run]:
    """The parameters are the masters."""
    for g, group in enumerate(opt.param_groups):
        for p in group["params"]:
            if p.requires_grad:
                yield known[p], 0, p.numel(), p, 0, g


BY_WRAPPER: dict[str, Callable[[Any, dict[Any, str]], Iterator[Run]]] = {
    "DeepSpeedZeroOptimizer": _partitioned,
    "BF16_Optimizer": _bf16,
    "DeepSpeedZeroOptimizer_Stage3": _zero3,
    "FP16_UnfusedOptimizer": _unfused,
    "FP16_Optimizer": _fused,
}
