"""What the ranks do in the tests of megatron-core's own stack: build, train, save, load."""

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from pretrain.mcore import models
from pretrain.mcore.chunks import Buffers, Stages, build, run_batch
from tests.engines import fused_adam, megatron_states
from tests.engines.grouped_experts import grouped_experts
from tests.engines.kinds import KINDS, Kind, oracle_of
from tests.engines.megatron_states import canonical, compare, fill, rank_folder
from tests.engines.model import tokens_of
from tests.ranks import allow_fp16_on_cpu

SEQUENCE, BATCH, VOCAB = 8, 4, 48
SAMPLES = 10_000  # of the schedule's decay
# The groups differ in what the schedule moves between, and in nothing that the next step uses.
OVERRIDES: dict[str, dict[str, Any]] = {
    "rates": {"min_lr": 2e-3},
    "decay": {"start_wd": 0.05, "end_wd": 0.05},
    "other": {"min_lr": 2e-3, "start_wd": 0.02, "end_wd": 0.02},
}
COUNTS = ("iteration", "consumed_samples", "skipped_iterations", "floating_point_operations")
CONTENT = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
}


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
    micro: int = 1  # samples in a micro batch
    dropout: float = 0.0
    every: int = 1  # which layers have experts
    shared: int = 0  # width of an expert that sees every token
    bias: bool = False  # routers have a bias, which is a buffer
    listed: bool = False  # a list says which layers have experts
    fused: bool = False  # layers have their parameters as those of Transformer Engine do
    heads: int = 4  # with 2 groups; others without
    rotary_base: float = 10000
    adam: str = "torch"  # or a stand-in of `fused_adam`
    grouped: bool = False  # the experts of a rank are one module
    overrides: str = ""  # groups of some matrices have other rates: "rates", "decay"; see OVERRIDES

    @property
    def experts(self) -> Any:
        from pretrain.mcore.experts import Experts

        score: Any = "sigmoid" if self.bias else "softmax"
        return Experts(
            4, 8, 2, shared_ffn=self.shared, every=self.every, score=score, bias=self.bias
        )

    @property
    def model(self) -> models.ModelConfig:
        moe = self.family in ("mixtral", "qwen3_moe")
        return models.ModelConfig(
            self.family,
            layers=self.layers,
            hidden=16,
            head_dim=16 // self.heads,
            ffn=24,
            heads=self.heads,
            groups=2 if self.heads == 4 else self.heads,
            rotary_base=self.rotary_base,
            vocab=VOCAB,
            true_vocab=VOCAB,
            positions=SEQUENCE,
            tied=self.tied,
            init_std=0.15,
            dtype=self.dtype,
            seed=self.seed,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
            sequence_parallel=moe and self.tp > 1,
            experts=self.experts if moe else None,
        )


@dataclass
class Engine:
    """A stack with what trains it."""

    setup: Mcore
    stack: Any
    optimizer: Any
    scheduler: Any
    handle: Any

    def save_checkpoint(self, folder: str) -> None:
        """As an engine of DeepSpeed does it."""
        ucp.save(self.handle, folder, arguments=arguments(self))

    def load_checkpoint(self, folder: str) -> None:
        """As an engine of DeepSpeed does it."""
        ucp.load(self.handle, folder)


def make(setup: Mcore, attach: bool = True) -> Engine:
    """With megatron-core's own schedule."""
    if setup.dtype == "fp16":
        allow_fp16_on_cpu()
    models.start(setup.tp, 7, setup.pp, setup.ep, setup.etp, vpp=setup.vpp, deepspeed=False)
    return built(setup, attach)


def built(setup: Mcore, attach: bool = True) -> Engine:
    """In the process groups that are there."""
    stages = Stages(setup.pp, setup.vpp, setup.layout, setup.first, setup.last)
    buffers = Buffers(setup.distributed, setup.overlap, setup.gather, setup.bucket, setup.pad)
    with fused_adam.fused_norms(setup.fused), grouped_experts(setup.grouped):
        stack = build(setup.model, stages, buffers)
    for bare in stack.bare if setup.listed else ():
        bare.config.moe_layer_freq = [int(not n % setup.every) for n in range(setup.layers)]
    optimizer, scheduler = make_optimizer(setup, stack)
    engine = Engine(setup, stack, optimizer, scheduler, None)
    return attached(engine) if attach else engine


def attached(engine: Engine, **options: Any) -> Engine:
    """With a handle of this package, which is as far as the one that it has."""
    parts, before = (engine.stack.chunks, engine.optimizer, engine.scheduler), engine.handle
    engine.handle = ucp.attach_megatron(*parts, family=engine.setup.family, **options)
    for name in COUNTS if before else ():
        setattr(engine.handle, name, getattr(before, name))
    return engine


def make_optimizer(setup: Mcore, stack: Any, use_checkpoint: bool = False) -> tuple[Any, Any]:
    """megatron-core's own optimizer and schedule; `use_checkpoint`: its settings win."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

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
    fused_adam.use(setup.adam)
    optimizer = get_megatron_optimizer(config, stack.chunks, overrides_of(config, setup.overrides))
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
        use_checkpoint_opt_param_scheduler=use_checkpoint,
    )
    return optimizer, scheduler


def overrides_of(config: Any, name: str) -> Any:
    """Those of Megatron-LM, and others for the second matrix of each MLP."""
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride

    if not name:
        return None
    own = ParamKey(name="*.linear_fc2.weight")
    return {**get_standard_config_overrides(config), own: ParamGroupOverride(**OVERRIDES[name])}


def close(engine: Engine) -> None:
    fused_adam.use("torch")
    models.stop()


def train(engine: Engine, steps: int, first: int = 0) -> list[float]:
    """Steps on batches that depend on the step number alone; the mean loss over all ranks."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    world = parallel_state.get_data_parallel_world_size()
    losses = []
    for step in range(first, first + steps):
        mine = tokens_of(step, (BATCH, SEQUENCE + 1), 40).chunk(world)[rank]
        batch = [
            (one[:, :-1].contiguous(), one[:, 1:].contiguous())
            for one in mine.split(engine.setup.micro)
        ]
        losses.append(run_batch(engine.stack, batch, engine.optimizer))
        stepped, *_ = engine.optimizer.step()
        if stepped:
            engine.scheduler.step(BATCH)
        else:
            engine.handle.skipped_iterations += 1
        engine.handle.iteration += 1
        engine.handle.consumed_samples += BATCH
    return losses


# ------------------------------------------------ jobs


def losses(setup: Mcore, steps: int = 6) -> list[float]:
    engine = make(setup)
    found = train(engine, steps)
    close(engine)
    return found


def settle(engine: Engine) -> None:
    """Weights that are on their way between the ranks arrive."""
    if engine.setup.gather:
        for chunk in engine.stack.chunks:
            chunk.start_param_sync(force_sync=True)


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
        num_experts=4 if setup.model.experts else None,
        moe_layer_freq=engine.stack.bare[0].config.moe_layer_freq,
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

    content: dict[str, Any] = dict(CONTENT)
    if not engine.setup.distributed:
        del content["distrib_optim_sharding_type"]
    else:
        content["distrib_optim_sharding_type"] = sharding
        for chunk in engine.stack.chunks:
            chunk.start_param_sync(force_sync=True)
    state = sharded(engine, content, loading=False)
    if engine.setup.dropout:
        state["rng_state"] = random_entry(engine.setup)
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


def legacy_save(engine: Engine, folder: Path) -> None:
    """A folder for each model-parallel rank, as Megatron-LM's `--ckpt-format torch` makes them."""
    from megatron.core import parallel_state as groups

    for chunk in engine.stack.chunks if engine.setup.distributed else ():
        chunk.start_param_sync(force_sync=True)
    name = rank_folder(engine)
    (folder / name).mkdir(parents=True, exist_ok=True)
    tree: dict[str, Any] = {
        "args": arguments(engine),
        "checkpoint_version": 3.0,
        "iteration": engine.handle.iteration,
        "optimizer": engine.optimizer.state_dict(),
        "opt_param_scheduler": engine.scheduler.state_dict(),
        "rng_state": [random_states()],
        "num_floating_point_operations_so_far": engine.handle.floating_point_operations,
    }
    several = len(engine.stack.bare) > 1
    for n, bare in enumerate(engine.stack.bare):
        tree[f"model{n}" if several else "model"] = bare.state_dict_for_save_checkpoint()
    if groups.get_expert_data_parallel_rank() == 0:
        torch.save(tree, folder / name / "model_optim_rng.pt")
    if engine.setup.distributed:
        engine.optimizer.save_parameter_state(str(folder / name / "distrib_optim.pt"))
    dist.barrier()


def random_states() -> dict[str, Any]:
    """The generators of this rank, as Megatron-LM names them."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tracker.get_states(),
    }


def random_entry(setup: Mcore) -> Any:
    """The generators of this rank, in the entry that Megatron-LM makes of them: one for each
    data-parallel rank only where there are experts."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    saved = random_states()
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if setup.ep == 1:
        return ShardedObject("rng_state", [saved], (setup.pp, setup.tp), place, replica_id=rank)
    world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    sizes = (setup.pp, setup.tp, world)
    return ShardedObject("rng_state", [saved], sizes, (*place, rank))


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


def write(engine: Engine, folder: Path, kind: str) -> None:
    """By this package ("ours"), or by stock in one of its kinds."""
    if kind == "ours":
        ucp.save(engine.handle, folder, arguments=arguments(engine))
    elif kind == "legacy":
        legacy_save(engine, folder)
    else:
        stock_save(engine, folder, kind)


def plant(engine: Engine, fault: str) -> None:
    """One bit of the largest master of rank 0, whatever that has; else as `plant_fault`."""
    if fault != "one bit":
        megatron_states.plant_fault(engine, fault)
    elif dist.get_rank() == 0:
        masters = [master for _, _, _, master, _, _ in megatron_states.held(engine)]
        max(masters, key=lambda one: one.numel()).data.view(torch.int32).view(-1)[0] ^= 1


def write_tag(engine: Engine, folder: Path, tag: str, kind: str = "fully_reshardable") -> None:
    write(engine, folder / tag, kind)


KINDS[Mcore] = Kind(
    make,
    train,
    plant,
    close,
    handle=lambda engine: engine.handle,
    fill=fill,
    canonical=canonical,
    differences=compare,
    settle=settle,
    write=write_tag,
    attach=lambda engine, _, **options: attached(engine, **options),
    trains_on=True,
    stale_steps=1,
)


def name_as_transformer_engine(engine: Engine) -> None:
    """Gives the norms before experts the keys that they have in its layers."""
    for layer in (layer for bare in engine.stack.bare for layer in bare.decoder.layers):
        known = layer.submodules_config.sharded_state_dict_keys_map
        kept = {key: value for key, value in known.items() if not key.startswith("pre_mlp_")}
        if hasattr(layer.mlp, "experts"):
            layer.submodules_config = replace(
                layer.submodules_config, sharded_state_dict_keys_map=kept
            )


def stock_load(
    setup: Mcore, folder: str, tags: tuple[str, ...], other_keys: bool = False, more: int = 0
) -> dict[str, Any]:
    """What ucp.save wrote, by megatron-core's own load into an engine that has trained. `more`
    steps after the last tag."""
    from megatron.core import dist_checkpointing

    oracle = oracle_of(folder)
    engine = make(setup)
    if other_keys:
        name_as_transformer_engine(engine)
    train(engine, 1, first=99)
    settle(engine)
    before = canonical(engine)
    found: dict[str, Any] = {"differences": {}, "before": {}}
    for tag in tags:
        want = oracle["states"][tag]
        iteration = next(Path(folder, tag).glob("iter_*"))
        state = sharded(engine, dict(CONTENT), loading=True)
        loaded: Any = dist_checkpointing.load(state, str(iteration))
        several = len(engine.stack.bare) > 1
        for number, bare in enumerate(engine.stack.bare):
            bare.load_state_dict(loaded[f"model{number}" if several else "model"])
        engine.optimizer.load_state_dict(loaded["optimizer"])
        for part in ("scheduler", "counters"):  # of the training program
            want = {**want, part: None}
        found["before"][tag] = compare({**want, "scheduler": {}}, before)
        have = {**canonical(engine), "scheduler": {}, "counters": None}
        found["differences"][tag] = compare({**want, "scheduler": {}}, have)
    if more:
        losses = train(engine, more, first=oracle["steps"])
        pairs = zip(losses, oracle["losses"][:more], strict=True)
        found["loss"] = max(abs(a - b) for a, b in pairs)
    close(engine)
    return found
