"""What the ranks do in the tests of the training program."""

import contextlib
import io
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from megatron_ucp.errors import UcpError


def run(argv: list[str]) -> dict[str, Any]:
    """One run of the program: what it returned, and what this rank printed on either stream; or
    the error that it ended with."""
    from pretrain.training import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            result = main(argv)
        except UcpError as error:
            return {"error": type(error).__name__, "text": str(error)}
    return {
        "first": result.first,
        "iteration": result.position.iteration,
        "consumed": result.position.consumed,
        "losses": result.losses,
        "evaluations": result.evaluations,
        "stopped_by": result.stopped_by,
        "again": result.again,
        "said": said.getvalue(),
    }


def run_without_fp16(argv: list[str]) -> dict[str, Any]:
    """As `run`, on a device that has no kernels for fp16."""
    from unittest import mock

    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    with mock.patch.object(kind, "is_fp16_supported", lambda self: False):
        return run(argv)


def run_with_sigterm(argv: list[str], rank: int, iteration: int) -> dict[str, Any]:
    """As `run`; one rank gets a SIGTERM while that iteration runs."""
    from pretrain import training

    iterate = training.Run._iterate

    def iterate_and_signal(self: Any) -> float:
        if dist.get_rank() == rank and self.result.position.iteration + 1 == iteration:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(self)

    training.Run._iterate = iterate_and_signal  # type: ignore[method-assign]
    try:
        return run(argv)
    finally:
        training.Run._iterate = iterate  # type: ignore[method-assign]


def run_shifted(argv: list[str]) -> dict[str, Any]:
    """As `run`; after the load the position in the data is one sample further."""
    from unittest import mock

    from pretrain import checkpoint

    load = checkpoint.load

    def shifted(*args: Any) -> Any:
        position, report = load(*args)
        position.consumed += 1
        return position, report

    with mock.patch.object(checkpoint, "load", shifted):
        return run(argv)


def states(argv: list[str], train: bool = False) -> dict[str, Any]:
    """Masters and moments of a run after its load, or at its end (`train`), whole, by the tests'
    own gather; what was said."""
    from pretrain.training import Run
    from tests.engines.canonical import canonical

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        one = Run(argv)
        if train:
            one.train()
    found = canonical(one.engine)
    one.close()
    return {"full": found["full"], "scalars": found["scalars"], "said": said.getvalue()}


@contextlib.contextmanager
def stock_engines() -> Iterator[None]:
    """Inside, the program's engines are DeepSpeed's own: this package never touches them."""
    import deepspeed

    from pretrain import setup

    def initialize(family: str, **kwargs: Any) -> Any:
        return deepspeed.initialize(**kwargs)

    ours = setup.ucp.initialize
    setup.ucp.initialize = initialize  # type: ignore[method-assign]
    try:
        yield
    finally:
        setup.ucp.initialize = ours  # type: ignore[method-assign]


def save_with_stock(argv: list[str], folder: str, iterations: int) -> list[float]:
    """Trains the same model with an engine that this package never touched, and saves by
    DeepSpeed's own call."""
    from pretrain.training import Run

    with stock_engines():
        one = Run(argv)
    losses = [one._iterate() for _ in range(iterations)]
    one.engine.save_checkpoint(folder, tag=f"global_step{iterations}")
    one.close()
    return losses


def random_numbers(argv: list[str]) -> dict[str, Any]:
    """Numbers from each generator right after a run's set-up and load."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from pretrain.training import Run

    one = Run(argv)
    tracker: Any = get_cuda_rng_tracker()
    with tracker.fork():
        inside = torch.rand(1).item()
    drawn = {
        "torch": torch.rand(1).item(),
        "tracker": inside,
        "numpy": float(np.random.rand()),
        "python": random.random(),
    }
    one.close()
    return drawn


def run_unplaced(argv: list[str]) -> dict[str, Any]:
    """As `run`; where ranks share sequences, each one's positions begin at 0."""
    from unittest import mock

    from pretrain.mcore import ulysses

    with mock.patch.object(ulysses, "_place"):
        return run(argv)
