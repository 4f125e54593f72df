"""A machine without a GPU: there is nothing to wait for, and nowhere to move a tensor."""

import contextlib
from typing import Any

import torch

from . import MEGATRON_CORE, Patch


class NoStream:
    """In the place of streams and events: every method returns it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


def nothing(*_: Any, **__: Any) -> None: ...


def change() -> None:
    cuda: Any = torch.cuda
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        setattr(cuda, name, NoStream)
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache"):
        setattr(cuda, name, nothing)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = nothing


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core: torch.cuda.Stream, stream, synchronize, Tensor.cuda, record_stream",
    why="interleaved schedules, bucketed gradients and dist_checkpointing wait for CUDA streams "
    "and move tensors with .cuda(), which raise without a GPU: no checkpoint is written",
    until="upstream asks torch.accelerator",
    change=change,
)
