"""What the program says: Megatron's lines on standard output, TensorBoard, one JSON object per
iteration."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist


def say(text: str) -> None:
    """One line, from the last rank, as Megatron does."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        print(text, flush=True)  # the only print of the program


def complain(text: str) -> None:
    """An error of the whole run, from rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stderr.write(f"pretrain_gpt: {text}\n")
        sys.stderr.flush()


def iteration_line(
    iteration: int,
    train_iters: int,
    samples: int,
    elapsed_ms: float,
    lr: float,
    batch: int,
    loss: float | None,
    scale: float,
    norm: float | None,
    skipped: int,
    nans: int,
    auxiliary: Mapping[str, float] | None = None,
) -> str:
    """Megatron's own line. The loss is left out where there is none, the norm where DeepSpeed
    computes none. `auxiliary` are losses of experts."""
    parts = [
        f" iteration {iteration:8d}/{train_iters:8d}",
        f"consumed samples: {samples:12d}",
        f"elapsed time per iteration (ms): {elapsed_ms:.1f}",
        f"learning rate: {lr:.6E}",
        f"global batch size: {batch:5d}",
    ]
    parts += [f"lm loss: {loss:.6E}"] if loss is not None and not math.isnan(loss) else []
    parts += [f"{name}: {value:.6E}" for name, value in (auxiliary or {}).items()]
    parts += [f"loss scale: {scale:.1f}"] + ([f"grad norm: {norm:.3f}"] if norm is not None else [])
    return " | ".join(
        [
            *parts,
            f"number of skipped iterations: {skipped:3d}",
            f"number of nan iterations: {nans:3d} |",
        ]
    )


def evaluation_line(iteration: int, loss: float) -> str:
    return (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} | lm loss PPL: "
        f"{math.exp(min(20, loss)):.6E} | "
    )


class Progress:
    """Collects iterations between two lines, and writes them out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self._first = args, True
        self._losses: list[float] = []
        self._skipped = self._nans = self._count = 0
        self._since = time.perf_counter()
        writes = dist.get_rank() == dist.get_world_size() - 1
        self._board: Any = None
        if args.tensorboard_dir and writes:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(args.tensorboard_dir)
        self._json = None
        if args.log_json and writes:
            Path(args.log_json).parent.mkdir(parents=True, exist_ok=True)
            self._json = open(args.log_json, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def iteration(
        self,
        iteration: int,
        samples: int,
        loss: float,
        lr: float,
        scale: float,
        norm: float | None,
        applied: bool,
        auxiliary: Mapping[str, float] | None = None,
    ) -> None:
        """After an iteration: a line every --log-interval, and after the first one. `auxiliary` are
        the iteration's losses of experts."""
        auxiliary = auxiliary or {}
        self._count += 1
        self._skipped += not applied
        self._nans += math.isnan(loss)
        if applied:
            self._losses.append(loss)
        for name, value in (
            ("lm loss", loss),
            ("learning-rate", lr),
            ("grad-norm", norm),
            ("loss-scale", scale),
            *auxiliary.items(),
        ):
            self._draw(name, value, iteration, samples)
        self._write_json(
            iteration=iteration,
            consumed_samples=samples,
            lm_loss=loss,
            learning_rate=lr,
            grad_norm=norm,
            loss_scale=scale,
            skipped=not applied,
            time=time.time(),
            **auxiliary,
        )
        if iteration % self.args.log_interval and not self._first:
            return
        mean = sum(self._losses) / len(self._losses) if self._losses else None
        elapsed_ms = (time.perf_counter() - self._since) * 1000 / self._count
        say(
            iteration_line(
                iteration,
                self.args.train_iters,
                samples,
                elapsed_ms,
                lr,
                self.args.global_batch_size,
                mean,
                scale,
                norm,
                self._skipped,
                self._nans,
                auxiliary,
            )
        )
        self._first, self._losses, self._skipped, self._nans, self._count = False, [], 0, 0, 0
        self._since = time.perf_counter()

    def start(self, **entry: Any) -> None:
        """Of an elastic run: what this start found, and where it goes on."""
        self._write_json(**entry, time=time.time())

    def _write_json(self, **entry: Any) -> None:
        if self._json is not None:
            self._json.write(json.dumps(entry) + "\n")
            self._json.flush()

    def _draw(self, name: str, value: float | None, iteration: int, samples: int) -> None:
        """Two curves on TensorBoard under Megatron's names: by iteration, and by consumed
        samples."""
        if self._board is not None and value is not None:
            self._board.add_scalar(name, value, iteration)
            self._board.add_scalar(f"{name} vs samples", value, samples)

    def evaluation(self, iteration: int, samples: int, loss: float, seconds: float) -> None:
        line = evaluation_line(iteration, loss)
        for text in ("-" * len(line), line, "-" * len(line)):
            say(text)
        self._draw("lm loss validation", loss, iteration, samples)
        if self._json is not None:
            self._json.write(json.dumps({"iteration": iteration, "validation_loss": loss}) + "\n")
        self._since += seconds  # not part of an iteration

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        if self._json is not None:
            self._json.close()
