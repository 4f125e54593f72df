"""The canonical state of a live engine, gathered without the package: DeepSpeed's own accessors, or
plain arithmetic.

Also provenance values: 32-bit patterns of a bijective hash of (tensor, state, index), so that no
swap, shift or permutation can go unseen.
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.masters import base_of as base_of
from tests.engines.masters import (
    expert_group,
    matrices_of,
    name_of_buffer,
    named,
    runs_of,
    wrapper_of,
)
from tests.engines.masters import names as names

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


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: torch makes a whole archive of each, and a state has hundreds."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.device.type != "cpu":
            return NotImplemented
        # not contiguous(): what has one element may keep a stride of its own
        plain = obj.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        raw = plain.view(torch.uint8).numpy().tobytes()
        return _unpickled, (obj.dtype, tuple(obj.shape), raw)


def _unpickled(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes) -> torch.Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    held = io.BytesIO()
    _Pickler(held).dump(value)
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, held.getvalue())
    return [pickle.loads(one) for one in out]


def shapes(engine: Any) -> dict[str, torch.Size]:
    return {n: torch.Size(getattr(p, "ds_shape", p.shape)) for n, p in named(engine).items()}


def fill(engine: Any) -> None:
    """Overwrites every master and every element-wise state of this rank with provenance values,
    then the weights."""
    every = {name for rank in everywhere(list(shapes(engine))) for name in rank}
    numbers = {name: number for number, name in enumerate(sorted(every))}
    state, params, local = base_of(engine).state, named(engine), shapes(engine)
    whole = matrices_of(engine)
    apart = {id(master) for master, _ in whole}

    def values_of(name: str, key: str) -> torch.Tensor:
        return share(engine, params[name], numbers[name], key, local[name]).reshape(-1)

    for name, first, count, master, offset, _ in runs_of(engine):
        for key in ("fp32", *(k for k in STATES if k in state.get(master, {}))):
            if key == "momentum_buffer" and id(master) in apart:
                continue
            flat = master.data if key == "fp32" else state[master][key]
            values = values_of(name, key)
            flat.view(-1)[offset : offset + count] = values[first : first + count]
    for master, runs in whole:
        for name, count, offset in runs:
            values = values_of(name, "momentum_buffer")
            state[master]["momentum_buffer"][offset : offset + count] = values
    write_weights(engine)


def share(engine: Any, param: Any, number: int, key: str, local: torch.Size) -> torch.Tensor:
    """This rank's share of a whole tensor of provenance values, cut by megatron-core's own
    attributes."""
    (size, rank), cut = place_of(engine, param), cut_of(param)
    if size == 1 or cut is None:
        return provenance(number, key, local)
    dim, parts = cut
    whole = provenance(
        number, key, torch.Size([n * size if d == dim else n for d, n in enumerate(local)])
    )
    return torch.cat([part.chunk(size, dim)[rank] for part in split(whole, dim, parts, size)], dim)


def write_weights(engine: Any) -> None:
    """Training copies from masters, by DeepSpeed's own means or by hand."""
    opt, kind = engine.optimizer, wrapper_of(engine)
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


HYPER = (
    "lr",
    "weight_decay",
    "betas",
    "eps",
    "momentum",
    "initial_lr",
    "amsgrad",
    "alpha",
    "lr_decay",
    "use_muon",
    "ns_method",
    *("k", "r", "warmup_steps", "weight_sum", "lr_max", "train_mode", "scheduled_lr"),  # z's
)
# a scheduler's lists with an entry for each parameter group
PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas")


def canonical(engine: Any) -> dict[str, Any]:
    """Every element of every master and state, steps, hyper-parameters per parameter, weights,
    buffers, frozen, scheduler.

    Collective; the same dict on every rank. Raises where the stages that hold a tied parameter
    disagree.
    """
    schedule = engine.lr_scheduler.state_dict()
    params = named(engine)
    met = {
        n: (shape, cut_of(params[n]), *place_of(engine, params[n]))
        for n, shape in shapes(engine).items()
    }
    pieces, numbers = _held_here(engine, schedule)
    gathered = everywhere((stage_of(engine), met, pieces, numbers))
    scalars: dict[tuple[str, str], float] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for *_, found in gathered:
        for name, counters, settings in found:
            for key, value in counters.items():
                agreed(scalars, (name, key), value)
            agreed(hyper, name, settings)
    return {
        "full": _unstacked(_joined(engine, gathered)),
        "scalars": _of_each_layer(scalars),
        "hyper": _of_each_layer(hyper),
        "weights": _unstacked(weights(engine)),
        "values": values(engine),
        "scheduler": {k: v for k, v in schedule.items() if k not in PER_GROUP},
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "scale": loss_scale(engine),
    }


def _unstacked(tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Every expert by its number in the whole layer, where a rank has some of them in one tensor
    ("NAME@EXPERT_RANK"; see masters)."""
    out: dict[Any, torch.Tensor] = {}
    for key, tensor in tensors.items():
        name, *rest = key if isinstance(key, tuple) else (key,)
        stack, stacked, rank = name.partition("@")
        for k, one in enumerate(tensor if stacked else [tensor]):
            whole = f"{stack} of expert {int(rank) * len(tensor) + k}" if stacked else name
            out[(whole, *rest) if rest else whole] = one
    return out


def _of_each_layer(values: dict[Any, Any]) -> dict[Any, Any]:
    """Numbers and settings of stacked experts, which must be the same on every expert rank."""
    out: dict[Any, Any] = {}
    for key, value in values.items():
        name, *rest = key if isinstance(key, tuple) else (key,)
        stack = name.partition("@")[0]
        agreed(out, (stack, *rest) if rest else stack, value)
    return out


def _held_here(engine: Any, schedule: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Of this rank: (parameter, state, first element, elements), and (parameter, scalar states,
    hyper-parameters)."""
    pieces, numbers = _matrices_here(engine), []
    state, whole = base_of(engine).state, {id(master) for master, _ in matrices_of(engine)}
    for name, first, count, master, offset, g in runs_of(engine):
        held = state.get(master, {})
        tensors = {k: v for k, v in held.items() if isinstance(v, torch.Tensor) and v.dim()}
        for key, flat in {"fp32": master.data, **tensors}.items():
            if key == "momentum_buffer" and id(master) in whole:
                continue
            elements = flat.detach().view(-1)[offset : offset + count]
            pieces.append((name, key, first, elements.clone().cpu()))
        numbers_of = (int, float, torch.Tensor)  # a list is nothing that a manifest could describe
        kept = {k: v for k, v in held.items() if k not in tensors and isinstance(v, numbers_of)}
        counters = {k: float(v) for k, v in kept.items()}
        numbers.append((name, counters, _settings(engine, g, schedule)))
    return pieces, numbers


def _matrices_here(engine: Any) -> list[Any]:
    """Momentum that lies as whole matrices, as `_held_here` gives it."""
    state, pieces = base_of(engine).state, []
    for master, runs in matrices_of(engine):
        flat = state.get(master, {}).get("momentum_buffer")
        for name, count, offset in runs if flat is not None else ():
            elements = flat[offset : offset + count].clone()
            pieces.append((name, "momentum_buffer", 0, elements))
    return pieces


def _settings(engine: Any, group: int, schedule: dict[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a group, and what a scheduler keeps of it."""
    groups = base_of(engine).param_groups
    number = min(group, len(groups) - 1)
    own = {key: value for key, value in groups[number].items() if key in HYPER}
    plain = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}
    return plain | {key: schedule[key][number] for key in PER_GROUP if key in schedule}


def _joined(engine: Any, gathered: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    """Whole tensors from the pieces of all ranks."""
    known = {n: what for _, met, *_ in gathered for n, what in met.items()}
    full: dict[tuple[str, str, int, int], torch.Tensor] = {}
    for stage, met, found, _ in gathered:
        for name, key, first, values in found:
            empty = torch.full(known[name][0], float("nan")).reshape(-1)
            if key == "momentum_buffer":
                empty = empty.to(values.dtype)
            flat = full.setdefault((name, key, stage, met[name][3]), empty)
            check_copy(flat[first : first + len(values)], values, name, key)
            flat[first : first + len(values)] = values
    out: dict[tuple[str, str], torch.Tensor] = {}
    for name, key, stage, index in full:
        shape, cut, size, _ = known[name]
        if index == 0:
            ranks = range(size)
            whole = join([full[name, key, stage, t].reshape(shape) for t in ranks], cut)
            if not torch.equal(bits(out.setdefault((name, key), whole)), bits(whole)):
                raise AssertionError(f"the stages disagree on {key} of {name}")
    return out


def check_copy(there: torch.Tensor, values: torch.Tensor, name: str, key: str) -> None:
    """Of a matrix of Muon's that is split several ranks have the momentum: all must have the same.
    `there` is what others said, NaN where nobody did."""
    held = ~there.isnan()
    if key == "momentum_buffer" and not torch.equal(bits(there[held]), bits(values[held])):
        raise AssertionError(f"ranks have different copies of {key} of {name}")


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

    params, zero3 = named(engine), engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=zero3):
        own = {
            n: (p.detach().clone().cpu(), cut_of(p), *place_of(engine, p))
            for n, p in params.items()
        }
        held = everywhere((stage_of(engine), own))
    by_place = {
        (name, stage, index): (value, cut, size)
        for stage, found in reversed(held)
        for name, (value, cut, size, index) in found.items()
    }
    out: dict[str, torch.Tensor] = {}
    for name, stage, index in sorted(by_place):
        if index == 0:
            _, cut, size = by_place[name, stage, 0]
            whole = join([by_place[name, stage, t][0] for t in range(size)], cut)
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


def place_of(engine: Any, param: Any) -> tuple[int, int]:
    """Among how many ranks a parameter is cut, and which of them this one is."""
    if expert_group(param) is None:
        return tensor_size(engine), tensor_rank(engine)
    from deepspeed.utils import groups

    copies = dist.get_world_size(groups._get_expert_data_parallel_group(param.group_name))
    ranks = dist.get_world_size(groups._get_expert_parallel_group(param.group_name))
    size = dist.get_world_size() // (int(getattr(engine, "num_stages", 1)) * copies * ranks)
    return size, dist.get_rank() % size


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
    """The module's buffers that are saved."""
    saved = set(engine._get_buffer_names())
    held = engine.module.named_buffers()
    own = {name_of_buffer(engine, n): b.detach().clone() for n, b in held if n in saved}
    if not hasattr(engine, "num_stages") and not any("_experts." in name for name in own):
        return own
    return {name: value for rank in everywhere(own) for name, value in rank.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    one = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
    return one.view(torch.uint8)


def differences(
    want: dict[str, Any], have: dict[str, Any], same_dtype: bool = True, known_keys: bool = False
) -> list[str]:
    """What differs, bitwise. `same_dtype` also compares training copies; otherwise they must be
    casts of the masters.

    `known_keys` compares only hyper-parameters that both optimizers have."""
    out = []
    if known_keys:
        want, have = _with_common_keys(want, have)
    for part in ("full", "values", *(["weights"] if same_dtype else [])):
        out += _different_tensors(part, want[part], have[part])
    for (name, key), master in have["full"].items():
        weight = have["weights"][name] if key == "fp32" else None
        if weight is not None and not torch.equal(bits(master.to(weight.dtype)), bits(weight)):
            out.append(f"the weight of {name} is no cast of its master")
    for part in ("scalars", "hyper", "scheduler", "counters", *(["scale"] if same_dtype else [])):
        if want[part] != have[part]:
            out.append(f"{part}: {want[part]} became {have[part]}")
    return out


def _with_common_keys(
    want: dict[str, Any], have: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both sides with the hyper-parameters that both have."""
    one, other = want["hyper"], have["hyper"]

    def common(hyper: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {
            name: {k: v for k, v in held.items() if k in one[name] and k in other[name]}
            for name, held in hyper.items()
        }

    return {**want, "hyper": common(one)}, {**have, "hyper": common(other)}


def _different_tensors(part: str, want: dict[Any, Any], have: dict[Any, Any]) -> list[str]:
    out = []
    if want.keys() != have.keys() or (part == "full" and not want):
        out.append(f"{part}: keys {sorted(map(str, want.keys() ^ have.keys()))}")
    for key in want.keys() & have.keys():
        one, other = want[key], have[key]
        if one.dtype != other.dtype or not torch.equal(bits(one), bits(other)):
            out.append(f"{part} {key}")
    return out
