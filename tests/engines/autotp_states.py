"""The canonical state of an engine that AutoTP cut, put together without the package: each rank's
shapes, and arithmetic by hand for fused weights."""

from typing import Any

import torch

from tests.engines.canonical import PER_GROUP as PER_GROUP
from tests.engines.canonical import (
    STATES,
    agreed,
    bits,
    check_copy,
    everywhere,
    loss_scale,
    provenance,
    write_weights,
)
from tests.engines.canonical import _held_here as held_here
from tests.engines.canonical import values as values_of
from tests.engines.masters import base_of, matrices_of, named, runs_of


def tensor_place(engine: Any) -> tuple[int, int]:
    """(Tensor-parallel size, rank), from DeepSpeed's own groups."""
    if engine.autotp_size() < 2:
        return 1, 0
    from deepspeed.utils import groups

    size = groups.get_tensor_model_parallel_world_size()
    return size, groups.get_tensor_model_parallel_rank()


def shapes_here(engine: Any) -> dict[str, torch.Size]:
    return {n: torch.Size(getattr(p, "ds_shape", p.shape)) for n, p in named(engine).items()}


def cut(name: str, whole: torch.Tensor, shares: list[torch.Size]) -> list[torch.Tensor]:
    """What each rank has of a whole tensor, by the shapes of their shares alone: a run of the dim
    that differs, one rank after the other; of gate and up in one tensor a run of each."""
    if all(share == whole.shape for share in shares):
        return [whole] * len(shares)
    (dim,) = (d for d, n in enumerate(whole.shape) if shares[0][d] < n)
    parts = 2 if name.endswith("gate_up_proj.weight") else 1
    widths = [share[dim] // parts for share in shares]
    by_part = [part.split(widths, dim) for part in whole.chunk(parts, dim)]
    return [torch.cat(own, dim) for own in zip(*by_part, strict=True)]


def join(name: str, parts: list[torch.Tensor], whole: torch.Size) -> torch.Tensor:
    """The inverse of `cut`: each rank's elements at the numbers that `cut` gives it."""
    numbers = torch.arange(whole.numel()).reshape(whole)
    out = torch.full((whole.numel(),), float("nan"), dtype=parts[0].dtype)
    seen = torch.zeros(whole.numel(), dtype=torch.bool)
    for part, at in zip(parts, cut(name, numbers, [p.shape for p in parts]), strict=True):
        at, values = at.reshape(-1), part.reshape(-1)
        again = seen[at]
        if not torch.equal(bits(out[at][again]), bits(values[again])):
            raise AssertionError(f"copies of {name} differ")
        out[at], seen[at] = values, True
    if not seen.all():
        raise AssertionError(f"nobody holds some elements of {name}")
    return out.reshape(whole)


def fill(engine: Any) -> None:
    """Overwrites every master and every element-wise state of this rank with its share of
    provenance values of the whole tensor, then the weights."""
    _, rank = tensor_place(engine)
    shares, state = shares_of(engine), base_of(engine).state
    numbers = {name: number for number, name in enumerate(sorted(shares))}
    matrices = matrices_of(engine)
    apart = {id(master) for master, _ in matrices}

    def own_of(name: str, key: str) -> torch.Tensor:
        whole = provenance(numbers[name], key, engine.plain_shapes[name])
        return cut(name, whole, shares[name])[rank].reshape(-1)

    for name, first, count, master, offset, _ in runs_of(engine):
        for key in ("fp32", *(k for k in STATES if k in state.get(master, {}))):
            if key == "momentum_buffer" and id(master) in apart:
                continue
            flat = master.data if key == "fp32" else state[master][key]
            flat.view(-1)[offset : offset + count] = own_of(name, key)[first : first + count]
    for master, runs in matrices:
        for name, count, offset in runs:
            momentum = state[master]["momentum_buffer"]
            momentum[offset : offset + count] = own_of(name, "momentum_buffer")
    write_weights(engine)


def shares_of(engine: Any) -> dict[str, list[torch.Size]]:
    """The shape of each tensor-parallel rank's share of every parameter."""
    size, rank = tensor_place(engine)
    found: dict[str, list[Any]] = {}
    for place, shapes in everywhere((rank, shapes_here(engine))):
        for name, shape in shapes.items():
            found.setdefault(name, [None] * size)[place] = shape
    return found


def canonical(engine: Any) -> dict[str, Any]:
    """As `tests.engines.canonical.canonical`, which knows megatron-core's attributes alone."""
    schedule = engine.lr_scheduler.state_dict()
    pieces, numbers = held_here(engine, schedule)
    _, rank = tensor_place(engine)
    shares = shares_of(engine)
    scalars: dict[tuple[str, str], float] = {}
    hyper: dict[str, dict[str, Any]] = {}
    local: dict[tuple[str, str, int], torch.Tensor] = {}
    for place, found, said in everywhere((rank, pieces, numbers)):
        for name, counters, settings in said:
            if not shares[name][place].numel():
                continue  # stage 0 keeps a step of nothing
            agreed(hyper, name, settings)
            for key, value in counters.items():
                agreed(scalars, (name, key), value)
        for name, key, first, elements in found:
            size, dtype = shares[name][place].numel(), elements.dtype
            empty = torch.full((size,), float("nan"), dtype=dtype)
            flat = local.setdefault((name, key, place), empty)[first : first + len(elements)]
            check_copy(flat, elements, name, key)
            flat.copy_(elements)
    full = joined(local, shares, engine.plain_shapes)
    return {
        "full": full,
        "scalars": scalars,
        "hyper": hyper,
        "weights": weights(engine),
        "values": values_of(engine),
        "scheduler": {k: v for k, v in schedule.items() if k not in PER_GROUP},
        "counters": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "scale": loss_scale(engine),
    }


def joined(
    local: dict[tuple[str, str, int], torch.Tensor],
    shares: dict[str, list[torch.Size]],
    plain: dict[str, torch.Size],
) -> dict[tuple[str, str], torch.Tensor]:
    """Whole tensors from the flat shares of all ranks; a rank may have nothing of one."""
    full: dict[tuple[str, str], torch.Tensor] = {}
    for name, key, dtype in {(name, key, flat.dtype) for (name, key, _), flat in local.items()}:
        ranks, nothing = enumerate(shares[name]), torch.zeros(0, dtype=dtype)
        parts = [local.get((name, key, r), nothing).reshape(shape) for r, shape in ranks]
        full[name, key] = join(name, parts, plain[name])
    return full


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """The training copies of all ranks, put together."""
    import deepspeed

    params, zero3 = named(engine), engine.zero_optimization_stage() == 3
    size, rank = tensor_place(engine)
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=zero3):
        own = {n: p.detach().clone().cpu() for n, p in params.items()}
    by_rank: list[dict[str, torch.Tensor]] = [{}] * size
    for place, found in everywhere((rank, own)):
        by_rank[place] = found
    return {
        name: join(name, [held[name] for held in by_rank], engine.plain_shapes[name])
        for name in own
    }
