"""One fate for all ranks: a failure on one rank is raised on every rank, and nobody waits for ever."""

import os
from collections.abc import Callable
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


class together:
    """Every rank leaves this block without an error, or every rank raises the error of the lowest failing rank. Collective.

    An error that is no UcpError (a defect, an interrupt) goes on unchanged on its own rank; the others get a RankError.
    `value`, set in the block, is in `values` of all ranks after it, by rank.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.values: list[Any] = []

    def __enter__(self) -> "together":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        told = _as_ucp_error(error)
        found = gather((told, self.value if told is None else None))
        if error is not None and error is not told and not isinstance(error, OSError):
            return  # goes on as it is
        for rank, (first, _) in enumerate(found):
            if first is not None and rank == world()[0]:
                raise (told or first)
            if first is not None:
                first.problem += f" (on rank {rank})"
                raise first
        self.values = [value for _, value in found]


def _as_ucp_error(error: BaseException | None) -> UcpError | None:
    if error is None or isinstance(error, UcpError):
        return error
    if isinstance(error, OSError):
        told = DamagedFileError("the operating system refused to read or write", file=error.filename,
                                found=f"{type(error).__name__}: {os.strerror(error.errno) if error.errno else error}",
                                fix="check the disk, its permissions and the path on every rank")
        told.__cause__ = error
        return told
    return RankError("another rank failed with an error that is no checkpoint error; its own output shows it")


def collect(make: Callable[[], T]) -> list[T]:
    """What `make` returns on every rank, by rank; an error is raised as by `together`. One collective."""
    with together() as block:
        block.value = make()
    return block.values
