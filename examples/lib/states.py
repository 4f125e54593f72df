"""The whole optimizer state of a live megatron-core engine, to check what a load restored:
data-parallel pieces are gathered by DeepSpeed's own accessors, tensor-parallel shards joined by the
attributes that megatron-core sets on its parameters, pipeline stages by the positions of their
layers, experts by the numbers that follow from a rank's place.

Nothing here uses megatron_ucp: a check by the code that it checks would show nothing.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

MOMENTS = ("exp_avg", "exp_avg_sq")
EXPERT = re.compile(r"(.*local_experts\.)(\d+)(\..*)")
# keys of a parameter group that hold no hyper-parameter: DeepSpeed tells experts apart by them
LABELS = ("params", "name", "moe")
States = dict[str, Any]


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer, inside DeepSpeed's wrapper or alone (ZeRO-0 in fp32)."""
    return (
        engine.optimizer
        if isinstance(engine.optimizer, torch.optim.Optimizer)
        else engine.optimizer.optimizer
    )


def masters(engine: Any) -> list[tuple[int, torch.Tensor]]:
    """(group, master) for the tensors that this rank's optimizer steps; from ZeRO-1 on flat pieces
    of many parameters."""
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        return [
            (wrapper.sub_group_to_group_id[i], m)
            for i, m in enumerate(wrapper.fp32_partitioned_groups_flat)
        ]
    if stage:
        return list(enumerate(wrapper.single_partition_of_fp32_groups))
    return [(g, p) for g, group in enumerate(wrapper.param_groups) for p in group["params"]]


def gather(engine: Any) -> States:
    """Every fp32 master, moment and weight in full, each parameter's steps and hyper-parameters,
    scheduler, counters.

    Collective; every rank returns what its own data-parallel group holds, of all pipeline stages.
    Moments and steps are left out before the first step, when there are none.
    """
    stage, base = engine.zero_optimization_stage(), base_optimizer(engine)
    if stage in (1, 2) and base.state:
        # DeepSpeed links moments to parameters after the first group's first step, and never again:
        # the accessor then misses those of other groups, and of every group after a load. Link them
        # now.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found: States = {}
    pipe = stages(engine) > 1
    group_of, steps = groups_of(engine), steps_of_groups(engine)
    for raw, param in engine.module.named_parameters():
        name, number = canonical(engine, raw), group_of[param]
        for key, shard in held_for(engine, param).items():
            found[f"{key} of {name}"] = join(name, param, shards(name, shard.detach().clone()))
        found[f"hyper-parameters of {name}"] = {
            k: v for k, v in base.param_groups[number].items() if k not in LABELS
        }
        found[f"steps of {name}"] = steps[number]
    found["scheduler"] = engine.lr_scheduler.state_dict()
    found["counters"] = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    if has_experts(engine):
        found = of_all(parallel_state().get_expert_model_parallel_group(), found, "expert rank")
    return of_all(engine.grid.get_pipe_parallel_group(), found, "stage") if pipe else found


def gather_plain(
    engine: Any, scheduler: Any, whole: Callable[[str, torch.Tensor], torch.Tensor]
) -> States:
    """The same of a model without megatron-core. `whole` gives the tensor of a parameter's name
    that a rank's share belongs to. Collective."""
    stage, base = engine.zero_optimization_stage(), base_optimizer(engine)
    if stage in (1, 2) and base.state:
        engine.optimizer._hp_optimizer_states_linked = False  # as above
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found, groups = States(), groups_of(engine)
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
                found[f"weight of {name}"] = whole(name, param.detach().clone())
            continue
        for key, share in held_for(engine, param).items():
            found[f"{key} of {name}"] = whole(name, share.detach().clone())
        settings = base.param_groups[groups[param]]
        found[f"hyper-parameters of {name}"] = {
            k: v for k, v in settings.items() if k not in LABELS
        }
    found["steps"] = sorted({float(held["step"]) for held in base.state.values()})
    found["scheduler"] = scheduler.state_dict()
    found["counters"] = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    return found


def differing(want: States, have: States) -> list[str]:
    """What differs, or is on one side alone."""
    return [name for name in want | have if not equal(want.get(name), have.get(name))]


def compare_plain(path: Path, found: States) -> dict[str, Any]:
    """What differs from the states in the file, and how many elements were compared."""
    want = torch.load(path, weights_only=False)
    return {
        "different": differing(want, found),
        "compared": sum(v.numel() for v in want.values() if isinstance(v, torch.Tensor)),
    }


def held_for(engine: Any, param: Any) -> States:
    """Master, moments and weight of this rank's shard of a parameter, whatever the ZeRO stage."""
    stage, base = engine.zero_optimization_stage(), base_optimizer(engine)
    held: States = {"master": safe_get_full_fp32_param(param) if stage else param}
    for key in MOMENTS if base.state else ():
        held[key] = safe_get_full_optimizer_state(param, key) if stage else base.state[param][key]
    with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
        held["weight"] = param.detach().clone()
    return held


def groups_of(engine: Any) -> dict[Any, int]:
    """The number of the group that steps each parameter."""
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        return {
            p: wrapper.sub_group_to_group_id[i]
            for i, group in enumerate(wrapper.fp16_groups)
            for p in group
        }
    groups = wrapper.bit16_groups if stage else [group["params"] for group in wrapper.param_groups]
    return {p: number for number, group in enumerate(groups) for p in group}


def steps_of_groups(engine: Any) -> dict[int, list[float]]:
    """The steps that each group's states have counted on all ranks of the data-parallel group: one
    number, if all is well."""
    state = base_optimizer(engine).state
    mine = {
        number: {float(state[m]["step"]) for g, m in masters(engine) if g == number and state}
        for number in range(len(base_optimizer(engine).param_groups))
    }
    group = (
        parallel_state().get_data_parallel_group()
        if stages(engine) == 1
        else engine.grid.get_data_parallel_group()
    )
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, mine, group=group)
    return {number: sorted(set().union(*(each[number] for each in ranks))) for number in mine}


def parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state


def stages(engine: Any) -> int:
    return engine.grid.get_pipe_parallel_world_size() if hasattr(engine, "grid") else 1


def has_experts(engine: Any) -> bool:
    return bool(engine.module.config.num_moe_experts)


def canonical(engine: Any, name: str) -> str:
    """A parameter's name in the model of one rank: with an expert's number in the whole layer, and
    without a pipeline. There names begin with the layer's position: 0 is the embedding, the
    transformer layers follow, then the final norm and the head."""
    expert = EXPERT.fullmatch(name)
    if expert:
        state = parallel_state()
        each = engine.module.config.num_moe_experts // state.get_expert_model_parallel_world_size()
        number = state.get_expert_model_parallel_rank() * each + int(expert[2])
        name = f"{expert[1]}{number}{expert[3]}"
    if not hasattr(engine, "grid"):
        return name
    first, _, rest = name.partition(".")
    if first == "tied_modules":
        return "embedding." + rest.partition(".")[2]
    layers = len(engine.module._layer_specs) - 3
    position = int(first)
    if position == 0:
        return f"embedding.{rest}"
    if position <= layers:
        return f"decoder.layers.{position - 1}.{rest}"
    return f"decoder.final_layernorm.{rest}" if position == layers + 1 else f"output_layer.{rest}"


def of_all(group: Any, found: States, what: str) -> States:
    """What the ranks of a group hold together; one thing that two of them hold differently shows as
    an entry of its own."""
    each: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(each, found, group=group)
    out: States = {}
    for number, held in enumerate(each):
        for key, value in held.items():
            if not equal(out.setdefault(key, value), value):
                out[f"{key}, on {what} {number}"] = value
    return out


def shards(name: str, mine: torch.Tensor) -> list[torch.Tensor]:
    """The shards of one tensor on all ranks of the tensor-parallel group, in their order; experts
    have a group of their own."""
    state = parallel_state()
    group = (
        state.get_expert_tensor_parallel_group()
        if EXPERT.fullmatch(name)
        else state.get_tensor_model_parallel_group()
    )
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, mine.contiguous(), group=group)
    return out


def join(name: str, param: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole tensor; with one more dim, so that it equals nothing, where copies differ."""
    if not getattr(param, "tensor_model_parallel", False):  # norms: every rank has a copy
        return parts[0] if all(equal(parts[0], part) for part in parts) else torch.stack(parts)
    if name.endswith("linear_fc1.weight"):
        # SwiGLU: a rank holds its rows of the gate above its rows of the up projection; whole, all
        # of the gate comes first
        halves = [part.chunk(2) for part in parts]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    # linear_qkv too: its rows go by group (queries, one key, one value) and are cut evenly, also in
    # the middle of a group where there are fewer groups than ranks
    return torch.cat(parts, dim=param.partition_dim)


def save(path: Path, found: States) -> None:
    if dist.get_rank() == 0:
        torch.save(found, path)


def compare(path: Path, found: States, fresh: States) -> dict[str, Any]:
    """What differs on any rank from the states in the file, bit by bit; `fresh` are those before
    the load, which have to differ. Collective."""
    want = torch.load(path, weights_only=True)
    different = set(want.keys() ^ found.keys())
    different |= {key for key in want.keys() & found.keys() if not equal(want[key], found[key])}
    different |= {
        f"{key}: the same before the load"
        for key in fresh
        if key.startswith("master of") and equal(want.get(key), fresh[key])
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, different)
    sizes = {key: value.numel() for key, value in want.items() if isinstance(value, torch.Tensor)}
    return {
        "different": sorted(set().union(*ranks)),
        "compared": sum(sizes.values()),
        "parameters": sum(size for key, size in sizes.items() if key.startswith("master of")),
    }


def equal(a: Any, b: Any) -> bool:
    """Equal bits for tensors, so that 0.0 and -0.0 differ; equal values for the rest."""
    if not isinstance(a, torch.Tensor):
        return a == b
    return (
        a.dtype == b.dtype == torch.float32
        and a.shape == b.shape
        and torch.equal(a.view(torch.int32), b.view(torch.int32))
    )


def plant_fault(engine: Any) -> None:
    """Flips the lowest bit of one master's first element on the last rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        masters(engine)[0][1].data.view(-1).view(torch.int32)[0] ^= 1


def plant_in_moment(engine: Any) -> None:
    """Flips the lowest bit of one element of the first rank's first moment."""
    if dist.get_rank() == 0:
        held = next(iter(base_optimizer(engine).state.values()))["exp_avg"]
        held.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def total(number: int) -> int:
    """The sum over all ranks."""
    value = torch.tensor(number)
    dist.all_reduce(value)
    return int(value)
