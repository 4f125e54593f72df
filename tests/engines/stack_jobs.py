"""What the ranks do in the tests of megatron-core's own stack: build, train, fill, gather.

The gather knows megatron-core's own ranges and attributes, and nothing of the package's layouts.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.megatron import models
from megatron_ucp.engines.megatron.chunks import Buffers, Stages, build, run_batch
from tests.engines.canonical import agreed, bits, differences, everywhere, provenance, split
from tests.ranks import allow_fp16_on_cpu

SEQUENCE, BATCH, VOCAB = 8, 4, 48
SAMPLES = 10_000  # of the schedule's decay


@dataclass(frozen=True)
class Mcore:
    """A tiny model in megatron-core's own stack on a mesh. Weights are drawn large: small ones
    hide a wrong cut. `eps` large: an element whose gradient is 0 but for rounding would move by
    the learning rate, either way."""

    family: str = "llama"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    dtype: str = "fp32"
    tied: bool = False
    layers: int = 4
    layout: str | None = None
    first: int | None = None
    last: int | None = None
    distributed: bool = True
    overlap: bool = False
    gather: bool = False
    bucket: int | None = None
    pad: bool = False
    clip: float = 1.0
    decoupled_lr: float | None = None
    eps: float = 1e-4
    seed: int = 1
    style: str = "linear"

    @property
    def model(self) -> models.ModelConfig:
        from megatron_ucp.engines.megatron.experts import Experts

        moe = self.family == "mixtral"
        return models.ModelConfig(
            self.family,
            layers=self.layers,
            hidden=16,
            head_dim=4,
            ffn=24,
            heads=4,
            groups=2,
            vocab=VOCAB,
            true_vocab=VOCAB,
            positions=SEQUENCE,
            tied=self.tied,
            init_std=0.15,
            dtype=self.dtype,
            seed=self.seed,
            sequence_parallel=moe and self.tp > 1,
            experts=Experts(4, 8, 2) if moe else None,
        )


@dataclass
class Engine:
    """A stack with what trains it."""

    setup: Mcore
    stack: Any
    optimizer: Any
    scheduler: Any
    handle: Any


def make(setup: Mcore) -> Engine:
    """With megatron-core's own schedule, attached."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    if setup.dtype == "fp16":
        allow_fp16_on_cpu()
    models.start(setup.tp, 7, setup.pp, setup.ep, setup.etp, vpp=setup.vpp, deepspeed=False)
    stages = Stages(setup.pp, setup.vpp, setup.layout, setup.first, setup.last)
    buffers = Buffers(setup.distributed, setup.overlap, setup.gather, setup.bucket, setup.pad)
    stack = build(setup.model, stages, buffers)
    config = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        min_lr=0.0,
        weight_decay=0.1,
        adam_eps=setup.eps,
        clip_grad=setup.clip,
        decoupled_lr=setup.decoupled_lr,
        decoupled_min_lr=0.0 if setup.decoupled_lr else None,
        bf16=setup.dtype == "bf16",
        fp16=setup.dtype == "fp16",
        params_dtype=stack.transformer.params_dtype,
        initial_loss_scale=2.0**8,
        loss_scale_window=3,
        use_distributed_optimizer=setup.distributed,
        overlap_param_gather=setup.gather,
    )
    optimizer = get_megatron_optimizer(config, stack.chunks)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=3e-3,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=SAMPLES,
        lr_decay_style=setup.style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=SAMPLES,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
    )
    handle = ucp.attach_megatron(stack.chunks, optimizer, scheduler, family=setup.family)
    return Engine(setup, stack, optimizer, scheduler, handle)


def close(engine: Engine) -> None:
    models.stop()


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Steps on batches that depend on the step number alone, one sample in a micro batch; the mean
    loss over all ranks."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    world = parallel_state.get_data_parallel_world_size()
    losses = []
    for step in range(first, first + steps):
        drawn = torch.randint(
            40, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1000 + step)
        )
        mine = drawn.chunk(world)[rank]
        batch = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in mine.split(1)]
        losses.append(run_batch(engine.stack, batch, engine.optimizer))
        stepped, *_ = engine.optimizer.step()
        if stepped:
            engine.scheduler.step(BATCH)
        else:
            engine.handle.skipped_iterations += 1
        engine.handle.iteration += 1
        engine.handle.consumed_samples += BATCH
    return losses


# ------------------------------------------------ the canonical state, by megatron-core's own means


def numbered(engine: Engine) -> dict[Any, str]:
    """Parameters by the names that a model of one rank has."""
    import re

    from megatron.core import parallel_state

    ranks = parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * (4 // ranks)
    out = {}
    for bare in engine.stack.bare:
        layers = [layer.layer_number - 1 for layer in bare.decoder.layers]
        for name, param in bare.named_parameters():
            name = re.sub(
                r"^decoder\.layers\.(\d+)",
                lambda m, layers=layers: f"decoder.layers.{layers[int(m[1])]}",
                name,
            )
            name = re.sub(
                r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + first}", name
            )
            if name == "output_layer.weight" and getattr(param, "shared", False):
                name = "embedding.word_embeddings.weight"
            out[param] = name
    return out


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


def held(engine: Engine) -> list[tuple[Any, int, int, torch.Tensor, dict, dict]]:
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


HYPER = ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr", "amsgrad")


def canonical(engine: Engine, settled: bool = True) -> dict[str, Any]:
    """As `tests.engines.canonical.canonical` has it of a DeepSpeed engine. Collective. Not
    `settled`: weights are on their way between the ranks, which may disagree."""
    names = numbered(engine)
    pieces = []
    for param, low, high, master, state, group in held(engine):
        name = names[param]
        shape = whole_shape(param, name)
        index = share(param, name, torch.arange(shape.numel()).view(shape)).reshape(-1)[low:high]
        tensors = {"fp32": master, **{k: v for k, v in state.items() if v.dim()}}
        flat = {k: v.detach().reshape(-1).clone() for k, v in tensors.items()}
        scalars = {k: float(v) for k, v in state.items() if not v.dim()}
        hyper = {k: group[k] for k in HYPER if k in group}
        pieces.append((name, shape, index, flat, scalars, hyper))
    weights = {
        name: (whole_shape(p, name), cut(p, name), p.detach().clone()) for p, name in names.items()
    }
    full: dict[tuple[str, str], torch.Tensor] = {}
    scalars: dict[Any, Any] = {}
    hyper: dict[str, Any] = {}
    trained: dict[str, torch.Tensor] = {}
    for own, seen in everywhere((pieces, weights)):
        for name, shape, index, flat, found, settings in own:
            for key, value in flat.items():
                empty = torch.full((shape.numel(),), float("nan"))
                known = full.setdefault((name, key), empty)
                old = known[index]
                there = ~old.isnan()
                if not torch.equal(bits(old[there]), bits(value[there])):
                    raise AssertionError(f"ranks disagree on {key} of {name}")
                known[index] = value
            for key, value in found.items():
                agreed(scalars, (name, key), value)
            agreed(hyper, name, settings)
        for name, (shape, place, value) in seen.items():
            _place(trained, name, shape, place, value, settled)
    shapes = {name: shape for own, _ in everywhere((pieces, weights)) for name, shape, *_ in own}
    for (name, key), value in full.items():
        if value.isnan().any():
            raise AssertionError(f"nobody has all of {key} of {name}")
        full[name, key] = value.view(shapes[name])
    handle = engine.handle
    counters = (handle.iteration, handle.consumed_samples, handle.skipped_iterations)
    return {
        "full": full,
        "scalars": scalars,
        "hyper": hyper,
        "weights": trained,
        "values": {},
        "scheduler": engine.scheduler.state_dict(),
        "counters": counters,
        "scale": loss_scale(engine),
    }


def _place(
    known: dict[str, torch.Tensor],
    name: str,
    shape: torch.Size,
    place: tuple[int, int, int, int],
    value: torch.Tensor,
    settled: bool,
) -> None:
    """Puts a rank's part of a weight into the whole; copies must be the same."""
    dim, stride, size, rank = place
    index = torch.arange(shape.numel()).view(shape)
    if size > 1:
        parts = split(index, dim, stride, size)
        index = torch.cat([part.chunk(size, dim)[rank] for part in parts], dim)
    whole = known.setdefault(name, torch.full(shape, float("nan"), dtype=value.dtype))
    flat = whole.view(-1)
    old, new = flat[index.reshape(-1)], value.reshape(-1)
    there = ~old.isnan()
    if settled and not torch.equal(bits(old[there]), bits(new[there])):
        raise AssertionError(f"ranks disagree on the weight {name}")
    flat[index.reshape(-1)] = new


def loss_scale(engine: Engine) -> dict[str, Any]:
    scaler = getattr(engine.optimizer.chained_optimizers[0], "grad_scaler", None)
    if scaler is None:
        return {}
    state = scaler.state_dict()
    return {key: float(value) for key, value in state.items()}


@torch.no_grad()
def fill(engine: Engine) -> None:
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
    for opt in engine.optimizer.chained_optimizers:
        if hasattr(opt, "_copy_main_params_to_model_params"):
            opt._copy_main_params_to_model_params()
    if engine.setup.distributed:
        for chunk in engine.stack.chunks:
            chunk.start_param_sync(force_sync=True)


# ------------------------------------------------ jobs


def losses(setup: Mcore, steps: int = 6) -> list[float]:
    engine = make(setup)
    found = train(engine, steps)
    close(engine)
    return found


def arguments(engine: Engine) -> argparse.Namespace:
    """Those of Megatron-LM's flags that say something of the files."""
    setup = engine.setup
    mesh = engine.handle.mesh
    return argparse.Namespace(
        tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp,
        virtual_pipeline_model_parallel_size=setup.vpp if setup.vpp > 1 else None,
        pipeline_model_parallel_layout=setup.layout,
        decoder_first_pipeline_num_layers=setup.first,
        decoder_last_pipeline_num_layers=setup.last,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        expert_model_parallel_size=setup.ep,
        expert_tensor_parallel_size=mesh.etp,
        context_parallel_size=1,
        data_parallel_size=mesh.dp,
        world_size=mesh.world,
        use_distributed_optimizer=setup.distributed,
        overlap_grad_reduce=setup.overlap,
        overlap_param_gather=setup.gather,
        ddp_bucket_size=setup.bucket,
        ddp_pad_buckets_for_high_nccl_busbw=setup.pad,
        accumulate_allreduce_grads_in_fp32=True,
        num_distributed_optimizer_instances=1,
        num_layers=setup.layers,
        num_experts=4 if setup.family == "mixtral" else None,
        untie_embeddings_and_output_weights=not setup.tied,
        swiglu=setup.family != "gpt",
        add_bias_linear=setup.family == "gpt",
        bf16=setup.dtype == "bf16",
        fp16=setup.dtype == "fp16",
        decoupled_lr=setup.decoupled_lr,
        loss_scale_window=3,
        hysteresis=2,
        consumed_train_samples=engine.handle.consumed_samples,
        iteration=0,
    )


def stock_save(engine: Engine, folder: Path, sharding: str = "fully_reshardable") -> None:
    """megatron-core's own distributed checkpoint, as Megatron-LM makes it."""
    from megatron.core import dist_checkpointing

    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if engine.setup.distributed:
        content["distrib_optim_sharding_type"] = sharding
        for chunk in engine.stack.chunks:
            chunk.start_param_sync(force_sync=True)
    state = sharded(engine, content, loading=False)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        {
            **state,
            "args": arguments(engine),
            "iteration": engine.handle.iteration,
            "checkpoint_version": 3.0,
            "opt_param_scheduler": engine.scheduler.state_dict(),
        },
        str(folder),
        content_metadata=content,
    )


def sharded(engine: Engine, content: dict[str, Any], loading: bool) -> dict[str, Any]:
    """The state dict of which megatron-core's checkpoints are made."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**content, "dp_cp_group": group}
    several = len(engine.stack.bare) > 1
    state: dict[str, Any] = {
        f"model{n}" if several else "model": bare.sharded_state_dict(metadata=metadata)
        for n, bare in enumerate(engine.stack.bare)
    }
    state["optimizer"] = engine.optimizer.sharded_state_dict(
        state, is_loading=loading, metadata=metadata
    )
    return state


def save(
    setup: Mcore,
    folder: str,
    steps: int = 3,
    more: int = 20,
    sharding: str = "fully_reshardable",
) -> None:
    """Trains, saves the tag `trained`, goes on; then fills with provenance values and saves
    `filled`. Canonical states, those of three steps later, and losses beside them."""
    engine = make(setup)
    train(engine, steps)
    stock_save(engine, Path(folder) / "trained", sharding)
    states = {"trained": canonical(engine)}
    losses = train(engine, 3, first=steps)
    after = canonical(engine, settled=not setup.gather)
    losses += train(engine, more - 3, first=steps + 3)
    fill(engine)
    stock_save(engine, Path(folder) / "filled", sharding)
    states["filled"] = canonical(engine)
    close(engine)
    if dist.get_rank() == 0:
        oracle = {"states": states, "losses": losses, "steps": steps, "after": after}
        torch.save(oracle, Path(folder) / "oracle.pt")


def resume(
    setup: Mcore,
    folder: str,
    more: int = 0,
    tags: tuple[str, ...] = ("filled", "trained"),
    plant: str = "",
    three: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Loads each tag into a fresh engine that has trained, and compares; trains on after the last
    one. `three` steps on the source's mesh must end in the source's bits."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)
    engine = make(setup)
    train(engine, 1, first=99)
    before = canonical(engine, settled=not setup.gather)
    found: dict[str, Any] = {"differences": {}, "before": {}, "notes": {}}
    for tag in tags:
        want = oracle["states"][tag]
        found["notes"][tag] = ucp.load(engine.handle, folder, tag=tag, **options).notes
        if plant:
            plant_fault(engine, plant)
        found["before"][tag] = compare(want, before)
        found["differences"][tag] = compare(want, canonical(engine))
    if more:
        again = train(engine, more, first=oracle["steps"])
        pairs = zip(again, oracle["losses"][:more], strict=True)
        found["loss"] = max(abs(a - b) for a, b in pairs)
    if three:  # of the same mesh
        train(engine, 3, first=oracle["steps"])
        found["after"] = compare(oracle["after"], canonical(engine, settled=not setup.gather))
    close(engine)
    return found


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
def plant_fault(engine: Engine, fault: str) -> None:
    """One thing that is wrong on rank 0, after a load."""
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


def other(setup: Mcore, **changes: Any) -> Mcore:
    return replace(setup, **changes)
