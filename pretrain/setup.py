"""From arguments to an engine: process groups, model, optimizer, schedule, DeepSpeed config."""

import argparse
import math
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import megatron_ucp as ucp
from megatron_ucp.errors import UsageError
from pretrain import elastic
from pretrain.engine import DEEPSPEED, MEGATRON, chunks_of
from pretrain.experts import experts_of
from pretrain.mcore import chunks, models, pipeline, ulysses

NEVER = 10**9  # DeepSpeed prints lines of its own every so many steps


def start_distributed(patience: timedelta, engine: str = DEEPSPEED) -> None:
    """torch.distributed from the launcher's environment; without a launcher, one rank. Does nothing
    where it runs already. `patience` is how long a rank waits for others."""
    if dist.is_initialized():
        return
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    if "RANK" not in os.environ:
        os.environ.update(alone)
    if engine == MEGATRON:
        _start_plainly(patience)
        return
    import deepspeed

    deepspeed.utils.logger.setLevel("WARNING")
    accelerator = _accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = (
        "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()
    )
    if (
        os.environ["WORLD_SIZE"] == "1"
    ):  # a store in this process: port 0 can't be found by others, and needs not be
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=patience)


def _start_plainly(timeout: timedelta) -> None:
    """Without DeepSpeed."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = HashStore() if os.environ["WORLD_SIZE"] == "1" else None
    place = {"store": store, "rank": 0, "world_size": 1} if store else {}
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timeout, **place)


def bound_waits(patience: timedelta) -> None:
    """Every process group that there is waits for other ranks so long at most: DeepSpeed and
    megatron-core make theirs with 30 minutes, whatever the default group has."""
    if dist.get_world_size() == 1:
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(patience, group)


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def device(engine: str = DEEPSPEED) -> torch.device:
    if engine == MEGATRON:
        gpu = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return torch.device(_accelerator().current_device_name())


def start_groups(args: argparse.Namespace) -> None:
    """megatron-core's process groups for the run's mesh."""
    models.start(
        args.tensor_model_parallel_size,
        args.seed,
        args.pipeline_model_parallel_size,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
        vpp=chunks_of(args),
        deepspeed=args.engine == DEEPSPEED,
        sp=args.ds_sequence_parallel_size,
    )


def model_config(args: argparse.Namespace, vocab: int, padded: int) -> models.ModelConfig:
    return models.ModelConfig(
        args.model_family,
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups,
        vocab=padded,
        true_vocab=vocab,
        positions=args.max_position_embeddings,
        head_dim=args.kv_channels,
        tied=not args.untie_embeddings_and_output_weights,
        norm_eps=args.norm_epsilon,
        rotary_base=args.rotary_base,
        rope_factor=args.rope_scaling_factor if args.use_rope_scaling else 0.0,
        interpolation=args.rotary_seq_len_interpolation_factor or 0.0,
        tanh_gelu=args.openai_gelu,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
        init_std=args.init_method_std,
        sequence_parallel=args.sequence_parallel,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        seed=args.seed,
        experts=experts_of(args),
    )


def deepspeed_config(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say, and the rest of --deepspeed_config."""
    config = {
        **args.ds_config,
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "train_batch_size": args.global_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation,
        "gradient_clipping": args.clip_grad,
    }
    config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": args.zero_stage}
    keep: dict[str, Any] = {} if args.keep_latest is None else {"keep_latest": args.keep_latest}
    if args.async_save:
        keep["save"] = "background"
    config["universal_checkpoint"] = {
        **elastic.save_options(args),
        **elastic.memory_options(args),
        **config.get("universal_checkpoint", {}),
        "enabled": True,
        "rng": not args.no_save_rng,
        "durable": not args.no_durable,
        **keep,
    }
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", NEVER)
    if args.bf16:
        config["bf16"] = {**config.get("bf16", {}), "enabled": True}
    if args.fp16:
        config["fp16"] = {
            "loss_scale": args.loss_scale or 0.0,
            "initial_scale_power": round(math.log2(args.initial_loss_scale)),
            "min_loss_scale": args.min_loss_scale,
            "loss_scale_window": args.loss_scale_window,
            "hysteresis": args.hysteresis,
            **config.get("fp16", {}),
            "enabled": True,
        }
    return config


def make_engine(args: argparse.Namespace, vocab: int, padded: int) -> Any:
    """A DeepSpeed engine whose saves carry a manifest, or megatron-core's own stack. Collective;
    `models.start` came before."""
    if args.engine == MEGATRON:
        return StackEngine(args, model_config(args, vocab, padded))
    if args.fp16 and not _accelerator().is_fp16_supported():
        raise UsageError(
            "--fp16 does not run on this device",
            expected="a GPU",
            found=_accelerator().device_name(),
            fix="use --bf16",
        )
    config, pp = model_config(args, vocab, padded), args.pipeline_model_parallel_size
    # a pipeline brings its own groups to DeepSpeed
    model, mpu = (
        (pipeline.build_pipeline(config, pp, args.pipeline_partition_method), None)
        if pp > 1
        else (models.build(config), models.mpu())
    )
    if args.ds_sequence_parallel_size > 1:
        model, mpu = ulysses.share_sequences(model), ulysses.mpu()
    groups = models.param_groups(model, args.lr, args.weight_decay)
    decays = [group["params"][0].dim() > 1 for group in groups]
    optimizer = torch.optim.AdamW(
        groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps
    )
    engine, *_ = ucp.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler_of(optimizer, args, decays),
        config=deepspeed_config(args),
        mpu=mpu,
        dist_init_required=False,
        family=args.model_family,
    )
    return engine


def scheduler_of(
    optimizer: Any, args: argparse.Namespace, decays: Sequence[bool] | None = None
) -> Any:
    """megatron-core's schedule, whose steps are samples: another global batch or mesh does not move
    it. `decays` says which groups have weight decay, where they don't say it themselves."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    class Schedule(OptimizerParamScheduler):
        def step(self, increment: int) -> None:
            super().step(increment)
            for group, has_decay in zip(self.optimizer.param_groups, decays or (), strict=False):
                group["weight_decay"] *= has_decay

    return Schedule(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_steps,
        lr_decay_steps=args.lr_decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.lr_decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=args.lr_wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


# ---- megatron-core's own stack (--engine megatron)


class StackEngine:
    """Chunks, optimizer and schedule; `handle` is what ucp.load and ucp.save take."""

    def __init__(self, args: argparse.Namespace, config: models.ModelConfig) -> None:
        from megatron.core.optimizer import get_megatron_optimizer

        stages = chunks.Stages(
            args.pipeline_model_parallel_size,
            chunks_of(args),
            args.pipeline_model_parallel_layout,
        )
        buffers = chunks.Buffers(
            distributed=args.use_distributed_optimizer,
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            bucket=args.ddp_bucket_size,
        )
        self.stack = chunks.build(config, stages, buffers)
        self.optimizer: Any = get_megatron_optimizer(
            _optimizer_config(args, config), self.stack.chunks
        )
        self.lr_scheduler = scheduler_of(self.optimizer, args)
        self.handle = ucp.attach_megatron(
            self.stack.chunks,
            self.optimizer,
            self.lr_scheduler,
            family=args.model_family,
            save="background" if args.async_save else "direct",
            **elastic.save_options(args),
            **elastic.memory_options(args),
        )

    @property
    def module(self) -> Any:
        """The first bare chunk of this rank."""
        return self.stack.bare[0]

    def destroy(self) -> None:
        """Waits for the last save; the process groups are `models.stop`'s."""
        ucp.wait(self.handle)


def _optimizer_config(args: argparse.Namespace, config: models.ModelConfig) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.bf16 or False,
        fp16=args.fp16 or False,
        params_dtype=chunks.TRAINED_IN[config.dtype],
        loss_scale=args.loss_scale,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
