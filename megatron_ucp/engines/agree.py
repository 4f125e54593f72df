"""One fate for all ranks: a failure on one rank is raised on every rank, and nobody waits for ever."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from megatron_ucp.errors import DamagedFileError, RankError, UcpError

T = TypeVar("T")


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) without torch.distributed."""
    import torch.distributed as dist
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T) -> list[T]:
    """The value of every rank, by rank. Collective."""
    import torch.distributed as dist
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


@contextmanager
def together() -> Iterator[None]:
    """Every rank leaves this block without an error, or every rank raises the error of the lowest failing rank.

    An error that is no UcpError (a defect, an interrupt) goes on unchanged on its own rank; the others get a RankError.
    """
    error: UcpError | None = None
    finished = False
    try:
        yield
        finished = True
    except UcpError as caught:
        error = caught
    except OSError as caught:
        error = DamagedFileError("the operating system refused to read or write", file=caught.filename,
                                 found=f"{type(caught).__name__}: {os.strerror(caught.errno) if caught.errno else caught}",
                                 fix="check the disk, its permissions and the path on every rank")
        error.__cause__ = caught
    finally:
        if not finished and error is None:
            gather(RankError("another rank failed with an error that is no checkpoint error; its own output shows it"))
    errors = gather(error)
    for rank, first in enumerate(errors):
        if first is not None:
            if rank != world()[0]:
                first.problem += f" (on rank {rank})"
            elif error is not None:
                raise error
            raise first
