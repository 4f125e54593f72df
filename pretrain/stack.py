"""megatron-core's own stack as the training loop uses it (--engine megatron)."""

import argparse
from typing import Any

import megatron_ucp as ucp
from pretrain import elastic
from pretrain.engine import chunks_of
from pretrain.mcore import chunks, models
from pretrain.schedule import Settings


class StackEngine:
    """Chunks, optimizer and schedule; `handle` is what ucp.load and ucp.save take."""

    def __init__(
        self, args: argparse.Namespace, config: models.ModelConfig, settings: Settings
    ) -> None:
        from megatron.core.optimizer import get_megatron_optimizer

        self.stack = chunks.build(config, _stages(args), _buffers(args))
        self.optimizer: Any = get_megatron_optimizer(
            _optimizer_config(args, config), self.stack.chunks
        )
        self.lr_scheduler = _scheduler(self.optimizer, args, settings)
        self.handle = ucp.attach_megatron(
            self.stack.chunks,
            self.optimizer,
            self.lr_scheduler,
            family=args.model_family,
            save="background" if args.async_save else "direct",
            **elastic.of_saves(args),
            **elastic.of_memory(args),
        )

    @property
    def module(self) -> Any:
        """The first bare chunk of this rank."""
        return self.stack.bare[0]

    def destroy(self) -> None:
        """Waits for the last save; the process groups are `models.stop`'s."""
        ucp.wait(self.handle)


def _stages(args: argparse.Namespace) -> chunks.Stages:
    return chunks.Stages(
        args.pipeline_model_parallel_size,
        chunks_of(args),
        args.pipeline_model_parallel_layout,
    )


def _buffers(args: argparse.Namespace) -> chunks.Buffers:
    return chunks.Buffers(
        distributed=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        bucket=args.ddp_bucket_size,
    )


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


def _scheduler(optimizer: Any, args: argparse.Namespace, settings: Settings) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.init_lr,
        max_lr=settings.max_lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=settings.lr_decay_steps,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=settings.lr_decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=settings.wsd_decay_steps,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
