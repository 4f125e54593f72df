"""The canonical state of a live engine, gathered without the package: DeepSpeed's own accessors, or
plain arithmetic.

Also provenance values: 32-bit patterns of a bijective hash of (tensor, state, index), so that no
swap, shift or permutation can go unseen.
"""

from typing import Any

import torch
import torch.distributed as dist

STATES = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "sum",
    "square_avg",
    "grad_avg",
    "exp_inf",
    "acc_delta",
)
POSITIVE = {"exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "exp_inf"}


def provenance(number: int, state: str, shape: torch.Size) -> torch.Tensor:
    """Values that differ from those of every other (parameter number, state, index); exponents
    2**-7 to 2**0."""
    count = shape.numel()
    index = torch.arange(count, dtype=torch.int64) + (
        (number * 8 + (STATES.index(state) + 1 if state != "fp32" else 0)) << 15
    )
    if count > 1 << 15 or number >= 1 << 7:
        raise ValueError("too large for a collision-free pattern")
    mixed = (index * 0x2545F4914F6CDD1D) & ((1 << 26) - 1)  # odd factor: a bijection of 26 bits
    bits = (120 << 23) + mixed
    if state not in POSITIVE:
        bits = torch.where(index % 2 == 1, bits - (1 << 31), bits)
    return bits.to(torch.int32).view(torch.float32).reshape(shape)


def names(engine: Any) -> dict[Any, str]:
    return {p: global_name(engine, n) for n, p in engine.module.named_parameters()}


def global_name(engine: Any, name: str) -> str:
    """The name that a GPTModel without pipeline has, where the pipeline's layers are embedding, L
    layers, norm, head."""
    if not hasattr(engine, "num_stages"):
        return name
    head, _, rest = name.partition(".")
    if head == "tied_modules":
        return "embedding." + rest.partition(".")[2]
    layer, layers = int(head), engine.module.config.num_layers
    fixed = {0: "embedding", layers + 1: "decoder.final_layernorm", layers + 2: "output_layer"}
    return f"{fixed.get(layer, f'decoder.layers.{layer - 1}')}.{rest}"


def named(engine: Any) -> dict[str, Any]:
    """This rank's parameters by global name."""
    return {global_name(engine, n): p for n, p in engine.module.named_parameters()}


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def stage(engine: Any) -> str:
    return type(engine.optimizer).__name__


def base_of(engine: Any) -> Any:
    return (
        engine.optimizer
        if isinstance(engine.optimizer, torch.optim.Optimizer)
        else engine.optimizer.optimizer
    )


def _runs(engine: Any) -> list[tuple[str, int, int, torch.Tensor, int, int]]:
    """(parameter, first element, elements, flat master, offset in it, group): what this rank's
    masters hold.

    From the wrappers' own bookkeeping of where gradients go, not from the package's formulas.
    """
    opt, known, out = engine.optimizer, names(engine), []
    kind = stage(engine)
    if kind == "DeepSpeedZeroOptimizer":
        for g, master in enumerate(opt.single_partition_of_fp32_groups):
            flat, low = (
                opt.bit16_groups_flat[g],
                dist.get_rank(opt.real_dp_process_group[g]) * master.numel(),
            )
            for p in opt.bit16_groups[
                g
            ]:  # the model's weights are views of the flat buffer: ask the memory
                start = (p.data_ptr() - flat.data_ptr()) // p.element_size()
                a, b = max(start, low), min(start + p.numel(), low + master.numel())
                if a < b:
                    out.append((known[p], a - start, b - a, master, a - low, g))
    elif kind == "BF16_Optimizer":
        for g, master in enumerate(opt.fp32_groups_flat_partition):
            flat, low = (
                opt.bf16_groups_flat[g],
                dist.get_rank(opt.real_dp_process_group[g]) * master.numel(),
            )
            for p in opt.bf16_groups[g]:
                start = (p.data_ptr() - flat.data_ptr()) // p.element_size()
                a, b = max(start, low), min(start + p.numel(), low + master.numel())
                if a < b:
                    out.append((known[p], a - start, b - a, master, a - low, g))
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        rank = dist.get_rank(opt.dp_process_group)
        for group in opt.fp16_groups:
            for p in group:
                i, offset, width = opt.grad_position[opt.get_param_id(p)][:3]
                first = rank * width
                count = max(0, min(width, p.ds_numel - first))
                if count:
                    out.append(
                        (
                            known[p],
                            first,
                            count,
                            opt.fp32_partitioned_groups_flat[i],
                            offset,
                            opt.sub_group_to_group_id[i],
                        )
                    )
    elif kind == "FP16_UnfusedOptimizer":
        out = [
            (known[p], 0, p.numel(), m, 0, g)
            for g, (ps, ms) in enumerate(zip(opt.fp16_groups, opt.fp32_groups, strict=True))
            for p, m in zip(ps, ms, strict=True)
        ]
    elif kind == "FP16_Optimizer":
        for g, master in enumerate(opt.fp32_groups_flat):
            at = 0
            for p in opt.fp16_groups[g]:
                out.append((known[p], 0, p.numel(), master, at, g))
                at += p.numel()
    else:
        out = [
            (known[p], 0, p.numel(), p, 0, g)
            for g, group in enumerate(opt.param_groups)
            for p in group["params"]
            if p.requires_grad
        ]
    return out


def shapes(engine: Any) -> dict[str, torch.Size]:
    return {n: torch.Size(getattr(p, "ds_shape", p.shape)) for n, p in named(engine).items()}


def fill(engine: Any) -> None:
    """Overwrites every master and every element-wise state of this rank with provenance values,
    then the weights."""
    numbers = {
        n: i
        for i, n in enumerate(
            sorted({n for rank in everywhere(list(shapes(engine))) for n in rank})
        )
    }
    state, params = base_of(engine).state, named(engine)
    for name, first, count, master, offset, _ in _runs(engine):
        for key in ("fp32", *(k for k in STATES if k in state.get(master, {}))):
            values = share(engine, params[name], numbers[name], key, shapes(engine)[name]).reshape(
                -1
            )[first : first + count]
            flat = master.data if key == "fp32" else state[master][key]
            flat.view(-1)[offset : offset + count] = values
    write_weights(engine)


def share(engine: Any, param: Any, number: int, key: str, local: torch.Size) -> torch.Tensor:
    """This rank's share of a whole tensor of provenance values, cut by megatron-core's own
    attributes."""
    size, rank, cut = tensor_size(engine), tensor_rank(engine), cut_of(param)
    if size == 1 or cut is None:
        return provenance(number, key, local)
    dim, parts = cut
    whole = provenance(
        number, key, torch.Size([n * size if d == dim else n for d, n in enumerate(local)])
    )
    return torch.cat([part.chunk(size, dim)[rank] for part in split(whole, dim, parts, size)], dim)


def write_weights(engine: Any) -> None:
    """Training copies from masters, by DeepSpeed's own means or by hand."""
    opt, kind = engine.optimizer, stage(engine)
    if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
        opt.update_lp_params()
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        for flat, master in zip(
            opt.fp16_partitioned_groups_flat, opt.fp32_partitioned_groups_flat, strict=True
        ):
            flat.data.copy_(master.data)
        opt.checkpoint_event_epilogue()
    elif kind == "FP16_UnfusedOptimizer":
        for ps, ms in zip(opt.fp16_groups, opt.fp32_groups, strict=True):
            for p, m in zip(ps, ms, strict=True):
                p.data.copy_(m.data)
    elif kind == "FP16_Optimizer":
        for ps, m in zip(opt.fp16_groups, opt.fp32_groups_flat, strict=True):
            at = 0
            for p in ps:
                p.data.copy_(m.data[at : at + p.numel()].view_as(p))
                at += p.numel()


def canonical(engine: Any) -> dict[str, Any]:
    """Every element of every master and state, steps, hyper-parameters per parameter, weights,
    buffers, frozen, scheduler.

    Collective; the same dict on every rank. Raises where the stages that hold a tied parameter
    disagree.
    """
    state, groups = base_of(engine).state, base_of(engine).param_groups
    schedule = engine.lr_scheduler.state_dict()
    pieces, met = [], {n: (shape, cut_of(named(engine)[n])) for n, shape in shapes(engine).items()}
    for name, first, count, master, offset, g in _runs(engine):
        held = state.get(master, {})
        for key in (
            "fp32",
            *(k for k in held if isinstance(held[k], torch.Tensor) and held[k].dim()),
        ):
            flat = master.data if key == "fp32" else held[key]
            pieces.append(
                (name, key, first, flat.detach().view(-1)[offset : offset + count].clone().cpu())
            )
        number = min(g, len(groups) - 1)
        meta = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in groups[number].items()
            if k
            in (
                "lr",
                "weight_decay",
                "betas",
                "eps",
                "momentum",
                "initial_lr",
                "amsgrad",
                "alpha",
                "lr_decay",
            )
        }
        meta |= {key: schedule[key][number] for key in PER_GROUP if key in schedule}
        pieces.append(
            (
                name,
                None,
                {
                    k: float(v)
                    for k, v in held.items()
                    if not isinstance(v, torch.Tensor) or not v.dim()
                },
                meta,
            )
        )
    gathered = everywhere((stage_of(engine), tensor_rank(engine), met, pieces))
    scalars: dict[tuple[str, str], float] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for _, _, _, found in gathered:
        for name, key, first, meta in found:
            if key is None:
                for k, v in first.items():
                    agreed(scalars, (name, k), v)
                agreed(hyper, name, meta)
    return {
        "full": _joined(engine, gathered),
        "scalars": scalars,
        "hyper": hyper,
        "weights": weights(engine),
        "values": values(engine),
        "scheduler": {k: v for k, v in schedule.items() if k not in PER_GROUP},
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "scale": loss_scale(engine),
    }


def _joined(engine: Any, gathered: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    """Whole tensors from the pieces of all ranks."""
    known = {n: what for _, _, met, _ in gathered for n, what in met.items()}
    full: dict[tuple[str, str, int, int], torch.Tensor] = {}
    for stage, tp, _, found in gathered:
        for name, key, first, values in found:
            if key is not None:
                shape = known[name][0]
                full.setdefault(
                    (name, key, stage, tp), torch.full(shape, float("nan")).reshape(-1)
                )[first : first + len(values)] = values
    out: dict[tuple[str, str], torch.Tensor] = {}
    for name, key, stage, tp in full:
        shape, cut = known[name]
        if tp == 0:
            whole = join(
                [full[name, key, stage, t].reshape(shape) for t in range(tensor_size(engine))], cut
            )
            if not torch.equal(bits(out.setdefault((name, key), whole)), bits(whole)):
                raise AssertionError(f"the stages disagree on {key} of {name}")
    return out


PER_GROUP = (
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
)  # a scheduler's lists with an entry for each parameter group


def agreed(known: dict[Any, Any], key: Any, value: Any) -> None:
    if known.setdefault(key, value) != value:
        raise AssertionError(f"ranks disagree on {key}: {known[key]} and {value}")


def loss_scale(engine: Any) -> dict[str, Any]:
    """What the dynamic loss scale is made of, where every wrapper has it."""
    if not engine.fp16_enabled():
        return {}
    scaler = getattr(engine.optimizer, "loss_scale_config", None) or engine.optimizer.loss_scaler
    return {
        key: getattr(scaler, key)
        for key in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    }


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The training copies, as the forward pass sees them."""
    import deepspeed

    params = named(engine)
    with deepspeed.zero.GatheredParameters(
        list(params.values()), enabled=engine.zero_optimization_stage() == 3
    ):
        held = everywhere(
            (
                stage_of(engine),
                tensor_rank(engine),
                {n: (p.detach().clone().cpu(), cut_of(p)) for n, p in params.items()},
            )
        )
    by_place = {(stage, tp): found for stage, tp, found in reversed(held)}
    out: dict[str, torch.Tensor] = {}
    for stage, tp in sorted(by_place):
        for name, (_, cut) in by_place[stage, tp].items() if tp == 0 else ():
            whole = join([by_place[stage, t][name][0] for t in range(tensor_size(engine))], cut)
            if not torch.equal(bits(out.setdefault(name, whole)), bits(whole)):
                raise AssertionError(f"the stages disagree on the weight {name}")
    return out


def stage_of(engine: Any) -> int:
    return int(getattr(engine, "stage_id", 0))


def tensor_size(engine: Any) -> int:
    if hasattr(engine, "num_stages"):
        return int(engine.grid.get_slice_parallel_world_size())
    return int(engine.mp_world_size) if engine.mpu is not None else 1


def tensor_rank(engine: Any) -> int:
    return engine.mpu.get_tensor_model_parallel_rank() if tensor_size(engine) > 1 else 0


Cut = tuple[int, int | tuple[int, ...]]  # the dim, and a rank's parts: how many, or their sizes


def cut_of(param: Any) -> Cut | None:
    """By megatron-core's own attributes (not by the package's tables); None for a parameter that is
    not cut."""
    if not getattr(param, "tensor_model_parallel", False):
        return None
    sizes = tuple(getattr(param, "partition_sizes", ()))
    return param.partition_dim, sizes or param.partition_stride


def split(
    tensor: torch.Tensor, dim: int, parts: int | tuple[int, ...], ranks: int = 1
) -> tuple[torch.Tensor, ...]:
    """The parts of what one rank has, or of what `ranks` have together."""
    if isinstance(parts, int):
        return tensor.chunk(parts, dim)
    return tensor.split([size * ranks for size in parts], dim)


def join(parts: list[torch.Tensor], cut: Cut | None) -> torch.Tensor:
    """One parameter from its shares."""
    if len(parts) == 1:
        return parts[0]
    if cut is None:
        if not all(torch.equal(bits(parts[0]), bits(p)) for p in parts):
            raise AssertionError("copies of a replicated parameter differ")
        return parts[0]
    dim, fused = cut
    by_rank = [split(part, dim, fused) for part in parts]
    return torch.cat([torch.cat(same, dim) for same in zip(*by_rank, strict=True)], dim)


def values(engine: Any) -> dict[str, torch.Tensor]:
    saved = set(engine._get_buffer_names())
    own = {
        global_name(engine, n): b.detach().clone()
        for n, b in engine.module.named_buffers()
        if n in saved
    }
    return (
        {n: b for rank in everywhere(own) for n, b in rank.items()}
        if hasattr(engine, "num_stages")
        else own
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.contiguous().view(torch.uint8)
        if tensor.dim()
        else tensor.reshape(1).view(torch.uint8)
    )


def differences(
    want: dict[str, Any], have: dict[str, Any], same_dtype: bool = True, known_keys: bool = False
) -> list[str]:
    """What differs, bitwise. `same_dtype` also compares training copies; otherwise they must be
    casts of the masters.

    `known_keys` compares only hyper-parameters that both optimizers have."""
    out = []
    if known_keys:
        hyper = [
            {
                n: {
                    k: v
                    for k, v in side["hyper"][n].items()
                    if k in want["hyper"][n] and k in have["hyper"][n]
                }
                for n in side["hyper"]
            }
            for side in (want, have)
        ]
        want, have = {**want, "hyper": hyper[0]}, {**have, "hyper": hyper[1]}
    for part in ("full", "values", *(["weights"] if same_dtype else [])):
        if want[part].keys() != have[part].keys() or (part == "full" and not want[part]):
            out.append(f"{part}: keys {sorted(map(str, want[part].keys() ^ have[part].keys()))}")
        out += [
            f"{part} {key}"
            for key in want[part].keys() & have[part].keys()
            if want[part][key].dtype != have[part][key].dtype
            or not torch.equal(bits(want[part][key]), bits(have[part][key]))
        ]
    for (name, key), master in have["full"].items():
        if key == "fp32" and not torch.equal(
            bits(master.to(have["weights"][name].dtype)), bits(have["weights"][name])
        ):
            out.append(f"the weight of {name} is no cast of its master")
    for part in ("scalars", "hyper", "scheduler", "counters", *(["scale"] if same_dtype else [])):
        if want[part] != have[part]:
            out.append(f"{part}: {want[part]} became {have[part]}")
    return out
