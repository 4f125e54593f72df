"""One global batch through an engine: trained, or evaluated. With and without pipeline stages."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pretrain.data import Batches
from pretrain.engine import MEGATRON
from pretrain.mcore import models
from pretrain.mcore.chunks import run_batch

Pair = tuple[torch.Tensor, torch.Tensor]  # inputs and labels, (micro, sequence) each


@dataclass(frozen=True)
class Last:
    """Of a step: the rate for the next one, the loss scale, the norm of the gradients before
    clipping (None where nobody computes it), and whether it was applied: an overflow is a skipped
    iteration."""

    lr: float
    scale: float
    norm: float | None
    applied: bool


class Steps(Protocol):
    """`consumed` samples came before the global batch. Both return its mean loss, on every rank;
    collective."""

    def train(self, batches: Batches, consumed: int) -> float: ...

    def evaluate(self, batches: Batches, consumed: int) -> float: ...

    def last(self) -> Last:
        """Of the last step."""
        ...


def make_steps(engine: Any, args: argparse.Namespace, device: torch.device) -> Steps:
    if args.engine == MEGATRON:
        return Chunked(engine, args, device)
    return (Staged if args.pipeline_model_parallel_size > 1 else Whole)(engine, args, device)


def pairs(batches: Batches, consumed: int, count: int, device: torch.device) -> Iterator[Pair]:
    """This rank's micro batches; labels are the tokens shifted by one. Read one by one, as they are
    asked for."""
    for step in range(count):
        tokens = batches.get(consumed, step).to(device)  # [micro, sequence + 1]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class OfDeepSpeed:
    """What DeepSpeed says of its last step."""

    _engine: Any
    _args: argparse.Namespace

    def last(self) -> Last:
        engine, fp16 = self._engine, self._args.fp16
        norm = engine.get_global_grad_norm()
        optimizer = engine.optimizer
        scale = getattr(optimizer, "cur_scale", None) or getattr(optimizer, "loss_scale", 1.0)
        return Last(
            engine.optimizer.param_groups[0]["lr"],
            float(scale) if fp16 else 1.0,
            None if norm is None or math.isnan(norm) else float(norm),
            not (fp16 and bool(getattr(optimizer, "overflow", False))),
        )


class Whole(OfDeepSpeed):
    """Every rank runs all layers: forward, backward and step for each micro batch. Ranks may share
    sequences: `_sharing` of them, of which this one's run begins at token `_first`."""

    def __init__(self, engine: Any, args: argparse.Namespace, device: torch.device) -> None:
        self._engine, self._args, self._device = engine, args, device
        self._sharing = args.ds_sequence_parallel_size
        # over how many ranks DeepSpeed sums gradients: those of a sequence, but at ZeRO-3, whose
        # reduce-scatter takes the mean over all ranks
        self._summed = self._sharing if args.zero_stage < 3 else 1
        self._first = dist.get_rank() % self._sharing * (args.seq_length // self._sharing)

    def train(self, batches: Batches, consumed: int) -> float:
        self._engine.train()
        total = self._zero()
        for inputs, labels in self._pairs(batches, consumed):
            loss = models.loss(self._engine, inputs, labels, first=self._first)
            self._engine.backward(loss / self._summed)
            self._engine.step(lr_kwargs={"increment": self._args.global_batch_size})
            total += loss.detach().double()
        return self._mean(total)

    @torch.no_grad()
    def evaluate(self, batches: Batches, consumed: int) -> float:
        self._engine.eval()
        total = self._zero()
        for inputs, labels in self._pairs(batches, consumed):
            total += models.loss(self._engine, inputs, labels, first=self._first).double()
        return self._mean(total)

    def _pairs(self, batches: Batches, consumed: int) -> Iterator[Pair]:
        """Of each sequence what this rank has."""
        run = slice(self._first, self._first + self._args.seq_length // self._sharing)
        for pair in pairs(batches, consumed, self._args.gradient_accumulation, self._device):
            inputs, labels = (one[:, run].contiguous() for one in pair)
            yield inputs, labels

    def _zero(self) -> torch.Tensor:
        # in float64: the rounding of the sum must not show as a difference between meshes
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _mean(self, total: torch.Tensor) -> float:
        """Of a per-rank sum over the micro batches: the mean over the global batch."""
        dist.all_reduce(total, group=models.mpu().get_data_parallel_group())
        ranks = self._args.data_parallel_size * self._sharing
        return float(total) / (self._args.gradient_accumulation * ranks)


class Staged(OfDeepSpeed):
    """DeepSpeed's pipeline runs the micro batches through the stages. Only the first and the last
    stage ask for data. The schedule counts samples there too: DeepSpeed hands it the global
    batch's."""

    def __init__(self, engine: Any, args: argparse.Namespace, device: torch.device) -> None:
        self._engine, self._args, self._device = engine, args, device
        self._count = args.gradient_accumulation

    def train(self, batches: Batches, consumed: int) -> float:
        return float(self._engine.train_batch(pairs(batches, consumed, self._count, self._device)))

    def evaluate(self, batches: Batches, consumed: int) -> float:
        return float(self._engine.eval_batch(pairs(batches, consumed, self._count, self._device)))


class Chunked:
    """megatron-core's own schedules run the micro batches through the chunks of its pipeline."""

    def __init__(self, engine: Any, args: argparse.Namespace, device: torch.device) -> None:
        self._engine, self._args, self._device = engine, args, device
        self._norm: float | None = None
        self._applied = True

    def train(self, batches: Batches, consumed: int) -> float:
        engine = self._engine
        for chunk in engine.stack.chunks:
            chunk.train()
        loss = run_batch(engine.stack, self._batch(batches, consumed), engine.optimizer)
        self._applied, norm, _ = engine.optimizer.step()
        self._norm = None if norm is None else float(norm)
        if self._applied:
            engine.lr_scheduler.step(self._args.global_batch_size)
        else:
            engine.handle.skipped_iterations += 1
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Batches, consumed: int) -> float:
        for chunk in self._engine.stack.chunks:
            chunk.eval()
        return run_batch(self._engine.stack, self._batch(batches, consumed))

    def last(self) -> Last:
        scale = float(self._engine.optimizer.get_loss_scale())
        lr = self._engine.optimizer.param_groups[0]["lr"]
        return Last(lr, scale, self._norm, self._applied)

    def _batch(self, batches: Batches, consumed: int) -> list[Pair]:
        return list(pairs(batches, consumed, self._args.gradient_accumulation, self._device))
