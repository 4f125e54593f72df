"""The canonical state of megatron-core's own stack, gathered and filled by its own ranges and
attributes: nothing of the package's layouts."""

import re
from typing import Any

import torch
import torch.distributed as dist

from tests.engines.canonical import agreed, bits, differences, everywhere, provenance, split


def numbered(engine: Any) -> dict[Any, str]:
    """Parameters by the names that a model of one rank has."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * (4 // ranks)
    out = {}
    for bare in engine.stack.bare:
        for name, param in bare.named_parameters():
            name = one_by_one(in_model(bare, name))
            name = re.sub(
                r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + first}", name
            )
            if name == "output_layer.weight" and getattr(param, "shared", False):
                name = "embedding.word_embeddings.weight"
            out[param] = name
    return out


def in_model(bare: Any, name: str) -> str:
    """A chunk's name with the number that the layer has in the whole model."""
    layers = [layer.layer_number - 1 for layer in bare.decoder.layers]
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{layers[int(m[1])]}", name)


def one_by_one(name: str) -> str:
    """The name in a SequentialMLP of a parameter in a TEGroupedMLP."""
    return re.sub(
        r"experts\.(linear_fc.)\.weight(\d+)", r"experts.local_experts.\2.\1.weight", name
    )


def rank_folder(engine: Any) -> str:
    """What Megatron-LM's older files call the folder of this rank."""
    from megatron.core import parallel_state as groups

    name = f"mp_rank_{groups.get_tensor_model_parallel_rank():02d}"
    if engine.setup.pp > 1:
        name += f"_{groups.get_pipeline_model_parallel_rank():03d}"
    if engine.setup.ep > 1:
        name += f"_{groups.get_expert_model_parallel_rank():03d}"
    return name


def biases(engine: Any) -> dict[str, torch.Tensor]:
    """The biases of the routers on this rank, which are buffers."""
    return {
        in_model(bare, name): value
        for bare in engine.stack.bare
        for name, value in bare.named_buffers()
        if name.endswith("expert_bias")
    }


def cut(param: Any, name: str) -> tuple[int, int, int, int]:
    """(dim, stride, ranks, rank) by megatron-core's own attributes; one rank for what is whole."""
    from megatron.core import parallel_state

    if not getattr(param, "tensor_model_parallel", False):
        return 0, 1, 1, 0
    kind = "expert_tensor_parallel" if ".experts." in name else "tensor_model_parallel"
    size = getattr(parallel_state, f"get_{kind}_world_size")()
    rank = getattr(parallel_state, f"get_{kind}_rank")()
    return param.partition_dim, param.partition_stride, size, rank


def whole_shape(param: Any, name: str) -> torch.Size:
    dim, _, size, _ = cut(param, name)
    return torch.Size([n * size if d == dim else n for d, n in enumerate(param.shape)])


def share(param: Any, name: str, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor."""
    dim, stride, size, rank = cut(param, name)
    if size == 1:
        return whole
    return torch.cat([part.chunk(size, dim)[rank] for part in split(whole, dim, stride, size)], dim)


def held(engine: Any) -> list[tuple[Any, int, int, torch.Tensor, dict, dict]]:
    """(parameter, first, last, master, its state, its group) of all that this rank steps."""
    out = []
    for opt in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        base = opt.optimizer
        for g, group in enumerate(base.param_groups):
            if hasattr(opt, "gbuf_ranges"):
                pairs = [
                    *zip(
                        opt.model_float16_groups[g],
                        opt.shard_fp32_from_float16_groups[g],
                        strict=True,
                    )
                ]
                pairs += [*zip(opt.model_fp32_groups[g], opt.shard_fp32_groups[g], strict=True)]
            elif hasattr(opt, "float16_groups"):
                pairs = [*zip(opt.float16_groups[g], opt.fp32_from_float16_groups[g], strict=True)]
                pairs += [(p, p) for p in opt.fp32_from_fp32_groups[g]]
            else:
                pairs = [(p, p) for p in group["params"]]
            for param, master in pairs:
                low, high = 0, param.numel()
                if hasattr(opt, "gbuf_ranges"):
                    own = opt._get_model_param_range_map(param)["param"]
                    low, high = own.start, own.end
                out.append((param, low, high, master, base.state.get(master, {}), group))
    return out


HYPER = (
    *("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr", "start_wd", "end_wd"),
    *("optimizer", "amsgrad"),
)


def canonical(engine: Any, settled: bool = True) -> dict[str, Any]:
    """As `tests.engines.canonical.canonical` has it of a DeepSpeed engine. Collective. Not
    `settled`: weights are on their way between the ranks, which may disagree."""
    gathered = everywhere((_stepped_here(engine), _weights_here(engine)))
    full: dict[tuple[str, str], torch.Tensor] = {}
    scalars: dict[Any, Any] = {}
    hyper: dict[str, Any] = {}
    trained: dict[str, torch.Tensor] = {}
    for own, seen in gathered:
        for name, shape, index, flat, found, settings in own:
            for key, value in flat.items():
                empty = torch.full(shape, float("nan"))
                _put(full.setdefault((name, key), empty), index, value, f"{key} of {name}")
            for key, value in found.items():
                agreed(scalars, (name, key), value)
            agreed(hyper, name, settings)
        for name, shape, index, value in seen:
            empty = torch.full(shape, float("nan"), dtype=value.dtype)
            what = f"the weight {name}" if settled else ""
            _put(trained.setdefault(name, empty), index, value, what)
    for (name, key), value in full.items():
        if value.isnan().any():
            raise AssertionError(f"nobody has all of {key} of {name}")
    handle = engine.handle
    return {
        "full": full,
        "scalars": scalars,
        "hyper": hyper,
        "weights": trained,
        "values": _values(engine),
        "scheduler": engine.scheduler.state_dict(),
        "counters": (handle.iteration, handle.consumed_samples, handle.skipped_iterations),
        "scale": loss_scale(engine),
    }


def _values(engine: Any) -> dict[str, torch.Tensor]:
    """The routers' biases of all ranks."""
    out: dict[str, torch.Tensor] = {}
    for own in everywhere({name: value.clone() for name, value in biases(engine).items()}):
        for name, value in own.items():
            _put(out.setdefault(name, value.clone()), torch.arange(len(value)), value, name)
    return out


def _stepped_here(engine: Any) -> list[tuple[Any, ...]]:
    """Of each run of elements that this rank steps: name and shape of the parameter, the elements'
    numbers in it, masters and moments, counts, hyper-parameters."""
    names = numbered(engine)
    out = []
    for param, low, high, master, state, group in held(engine):
        name = names[param]
        shape = whole_shape(param, name)
        index = share(param, name, torch.arange(shape.numel()).view(shape)).reshape(-1)[low:high]
        tensors = {"fp32": master, **{k: v for k, v in state.items() if v.dim()}}
        flat = {k: v.detach().reshape(-1).clone() for k, v in tensors.items()}
        counts = {k: float(v) for k, v in state.items() if not v.dim()}
        counts |= {k: float(v) for k, v in group.items() if k == "step" and state}
        hyper = {k: group[k] for k in HYPER if k in group}
        out.append((name, shape, index, flat, counts, hyper))
    return out


def _weights_here(engine: Any) -> list[tuple[Any, ...]]:
    """Of each parameter on this rank: name, whole shape, the elements' numbers in it, values."""
    out = []
    for param, name in numbered(engine).items():
        shape = whole_shape(param, name)
        index = share(param, name, torch.arange(shape.numel()).view(shape)).reshape(-1)
        out.append((name, shape, index, param.detach().reshape(-1).clone()))
    return out


def _put(whole: torch.Tensor, index: torch.Tensor, value: torch.Tensor, what: str) -> None:
    """Elements into a whole tensor; `what` several ranks have must be the same ("": may differ)."""
    flat = whole.view(-1)
    old = flat[index]
    there = ~old.isnan()
    if what and not torch.equal(bits(old[there]), bits(value[there])):
        raise AssertionError(f"ranks disagree on {what}")
    flat[index] = value


def loss_scale(engine: Any) -> dict[str, Any]:
    scaler = getattr(engine.optimizer.chained_optimizers[0], "grad_scaler", None)
    if scaler is None:
        return {}
    state = scaler.state_dict()
    return {key: float(value) for key, value in state.items()}


@torch.no_grad()
def fill(engine: Any) -> None:
    """Overwrites every master and every moment of this rank with provenance values, then the
    weights."""
    names = numbered(engine)
    every = sorted({name for rank in everywhere([*names.values()]) for name in rank})
    numbers = {name: number for number, name in enumerate(every)}
    for param, low, high, master, state, _ in held(engine):
        name = names[param]
        for key in ("fp32", *(k for k in state if state[k].dim())):
            whole = provenance(numbers[name], key, whole_shape(param, name))
            values = share(param, name, whole).reshape(-1)[low:high]
            (master if key == "fp32" else state[key]).view(-1).copy_(values)
    for name, value in biases(engine).items():
        value.copy_(provenance(len(every) + int(name.split(".")[2]), "fp32", value.shape))
    for opt in engine.optimizer.chained_optimizers:
        if hasattr(opt, "_copy_main_params_to_model_params"):
            opt._copy_main_params_to_model_params()
    if engine.setup.distributed:
        for chunk in engine.stack.chunks:
            chunk.start_param_sync(force_sync=True)


def compare(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    """What differs, bitwise; hyper-parameters and schedules where both engines have them."""
    same_schedule = want["scheduler"].keys() == have["scheduler"].keys()
    parts = ("scheduler",) if not same_schedule else ()
    want, have = ({k: {} if k in parts else v for k, v in one.items()} for one in (want, have))
    dtypes = {v.dtype for v in want["weights"].values()} == {
        v.dtype for v in have["weights"].values()
    }
    if want["scale"].keys() != have["scale"].keys():
        want, have = {**want, "scale": {}}, {**have, "scale": {}}
    return differences(want, have, same_dtype=dtypes, known_keys=True)


@torch.no_grad()
def plant_fault(engine: Any, fault: str) -> None:
    """One thing that is wrong on rank 0, after a load; a bias on all that have it."""
    if fault == "one bias":
        for name, value in biases(engine).items():
            value[1] += 1.0 * (".0." in name)
    if dist.get_rank():
        return
    names = numbered(engine)
    param, _, _, master, state, group = next(
        one for one in held(engine) if names[one[0]].endswith("linear_fc1.weight")
    )
    if fault == "one bit":
        master.view(torch.int32).view(-1)[3] ^= 1
    elif fault == "two elements swapped":
        flat = state["exp_avg"].view(-1)
        flat[:2] = flat[:2].flip(0)
    elif fault == "one step":
        state["step"] += 1
    elif fault == "one group's weight decay":
        group["weight_decay"] += 1e-9
    elif fault == "one weight":
        param.view(-1)[0] += 1
