"""Jobs that load what several ranks hold alike."""

from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.reshard import files, read_once
from tests.engines import jobs
from tests.engines.model import Setup, make_engine


def resume(setup: Setup, folder: str, window_bytes: int, **options: Any) -> dict[str, Any]:
    """As `jobs.resume`, with windows of another size, and the windows that this rank read."""
    return _counted(jobs.resume, setup, folder, window_bytes, **options)


def _counted(
    job: Any, setup: Any, folder: str, window_bytes: int, **options: Any
) -> dict[str, Any]:
    stock, fill_window, read = read_once.WINDOW_BYTES, files.SharedFiles.fill_window, [0]

    def counted(source: Any, plan: Any, *args: Any) -> None:
        read[0] += 1
        fill_window(source, plan, *args)

    read_once.WINDOW_BYTES, files.SharedFiles.fill_window = window_bytes, counted
    try:
        return job(setup, folder, **options) | {"windows": read[0]}
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


def stack_resume(setup: Any, folder: str, **options: Any) -> dict[str, Any]:
    """As `stack_jobs.resume`, with small windows, and those that this rank read."""
    from tests.engines import stack_jobs

    return _counted(stack_jobs.resume, setup, folder, 256, **options)
