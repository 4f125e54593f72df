"""ZeRO-3 over gloo: DeepSpeed waits for every parameter that it gathers, not for the last one
alone."""

import functools
from typing import Any

from . import Patch

GATHERS = ("all_gather", "all_gather_into_tensor")


class _Noted:
    """`deepspeed.comm` whose gathers leave their handles in a list."""

    def __init__(self, comm: Any, handles: list[Any]) -> None:
        self._comm, self._handles = comm, handles

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in GATHERS:
            return found

        def gather(*args: Any, **kwargs: Any) -> Any:
            handle = found(*args, **kwargs)
            if handle is not None:
                self._handles.append(handle)
            return handle

        return gather


def change() -> None:
    from deepspeed.runtime.zero import partition_parameters as module

    stock = module.Init._allgather_params_coalesced

    @functools.wraps(stock)
    def waited(self: Any, *args: Any, **kwargs: Any) -> Any:
        comm, handles = module.dist, []
        module.dist = _Noted(comm, handles)
        try:
            # what it leaves are views of what is gathered into: they may be filled afterwards
            return stock(self, *args, **kwargs)
        finally:
            module.dist = comm
            for handle in handles:
                handle.wait()

    module.Init._allgather_params_coalesced = waited


PATCH = Patch(
    package="deepspeed",
    versions=tuple(f"0.19.{number}" for number in range(8)),
    mended=("0.19.8",),
    only_without_gpu=True,
    upstream="deepspeed.runtime.zero.partition_parameters.Init._allgather_params_coalesced",
    why="it waits for the last of its gathers; with gloo the others may still be on their way, and "
    "whole weights are read that are not there yet",
    until="DeepSpeed before 0.19.8 is no longer supported: it waits for all of them",
    change=change,
)
