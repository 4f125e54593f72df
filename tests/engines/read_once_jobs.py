"""Jobs that load what several ranks hold alike."""

from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.reshard import files, read_once
from tests.engines import kinds
from tests.engines.model import Setup, make_engine


def resume(setup: Any, folder: str, window_bytes: int, **options: Any) -> dict[str, Any]:
    """As `kinds.resume`, with windows of another size, and the windows that this rank read."""
    stock, fill_window, read = read_once.WINDOW_BYTES, files.SharedFiles.fill_window, [0]

    def counted(source: Any, plan: Any, *args: Any) -> None:
        read[0] += 1
        fill_window(source, plan, *args)

    read_once.WINDOW_BYTES, files.SharedFiles.fill_window = window_bytes, counted
    try:
        return kinds.resume(setup, folder, **options) | {"windows": read[0]}
    finally:
        read_once.WINDOW_BYTES, files.SharedFiles.fill_window = stock, fill_window


def fails(setup: Setup, folder: str, rank: int, at: int) -> dict[str, Any]:
    """A load in which one rank can't read its window number `at`."""
    engine = make_engine(setup)
    stock, fill_window, read = read_once.WINDOW_BYTES, files.SharedFiles.fill_window, [0]

    def failing(source: Any, plan: Any, *args: Any) -> None:
        read[0] += 1
        if dist.get_rank() == rank and read[0] == at:
            raise DamagedFileError("only here", file="a file")
        fill_window(source, plan, *args)

    read_once.WINDOW_BYTES, files.SharedFiles.fill_window = 1024, failing
    out: dict[str, Any] = {"message": "", "refuses": False}
    try:
        ucp.load(engine, folder, tag="trained", read="once")
    except ucp.UcpError as error:
        out["message"] = str(error)
    finally:
        read_once.WINDOW_BYTES, files.SharedFiles.fill_window = stock, fill_window
    try:
        engine.step()
    except ucp.UcpError as error:
        out["refuses"] = type(error).__name__ == "EngineUnusableError"
    engine.destroy()
    return out
