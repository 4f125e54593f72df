"""One global batch through an engine: trained, or evaluated. With and without pipeline stages."""

import argparse
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_ucp.engines.megatron import models
from pretrain.data import Batches

Pair = tuple[torch.Tensor, torch.Tensor]  # inputs and labels, (micro, sequence) each


class Steps(Protocol):
    """`consumed` samples came before the global batch. Both return its mean loss, on every rank;
    collective."""

    def train(self, batches: Batches, consumed: int) -> float: ...

    def evaluate(self, batches: Batches, consumed: int) -> float: ...


def make_steps(engine: Any, args: argparse.Namespace, device: torch.device) -> Steps:
    return (Staged if args.pipeline_model_parallel_size > 1 else Whole)(engine, args, device)


def pairs(batches: Batches, consumed: int, count: int, device: torch.device) -> Iterator[Pair]:
    """This rank's micro batches; labels are the tokens shifted by one. Read one by one, as they are
    asked for."""
    for step in range(count):
        tokens = batches.get(consumed, step).to(device)  # [micro, sequence + 1]
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Whole:
    """Every rank runs all layers: forward, backward and step for each micro batch."""

    def __init__(self, engine: Any, args: argparse.Namespace, device: torch.device) -> None:
        self._engine, self._args, self._device = engine, args, device

    def train(self, batches: Batches, consumed: int) -> float:
        self._engine.train()
        total = self._zero()
        for inputs, labels in self._pairs(batches, consumed):
            loss = models.loss(self._engine, inputs, labels)
            self._engine.backward(loss)
            self._engine.step(lr_kwargs={"increment": self._args.global_batch_size})
            total += loss.detach().double()
        return self._mean(total)

    @torch.no_grad()
    def evaluate(self, batches: Batches, consumed: int) -> float:
        self._engine.eval()
        total = self._zero()
        for inputs, labels in self._pairs(batches, consumed):
            total += models.loss(self._engine, inputs, labels).double()
        return self._mean(total)

    def _pairs(self, batches: Batches, consumed: int) -> Iterator[Pair]:
        return pairs(batches, consumed, self._args.gradient_accumulation, self._device)

    def _zero(self) -> torch.Tensor:
        # in float64: the rounding of the sum must not show as a difference between meshes
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _mean(self, total: torch.Tensor) -> float:
        """Of a per-rank sum over the micro batches: the mean over the global batch."""
        dist.all_reduce(total, group=models.mpu().get_data_parallel_group())
        return float(total) / (self._args.gradient_accumulation * self._args.data_parallel_size)


class Staged:
    """DeepSpeed's pipeline runs the micro batches through the stages. Only the first and the last
    stage ask for data. The schedule counts samples there too: DeepSpeed hands it the global
    batch's."""

    def __init__(self, engine: Any, args: argparse.Namespace, device: torch.device) -> None:
        self._engine, self._count, self._device = engine, args.gradient_accumulation, device

    def train(self, batches: Batches, consumed: int) -> float:
        return float(self._engine.train_batch(pairs(batches, consumed, self._count, self._device)))

    def evaluate(self, batches: Batches, consumed: int) -> float:
        return float(self._engine.eval_batch(pairs(batches, consumed, self._count, self._device)))
