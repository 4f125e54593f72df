"""The default process group of a test's ranks; a job may take it down and make another one."""

import functools
from datetime import timedelta
from pathlib import Path
from typing import Any

GPU = Path("/dev/nvidiactl")


@functools.cache
def gloo_with_one_loop() -> type:
    """gloo, with one thread that waits for the sockets of all process groups of this process. gloo
    gives each group its own, which wakes a hundred times a second: with the dozens of groups of
    DeepSpeed and megatron-core on several ranks that took a quarter of two cores."""
    from torch.distributed import distributed_c10d

    stock: Any = distributed_c10d.ProcessGroupGloo
    device = stock.create_default_device()

    class OneLoop(stock):
        # `_` is what newer versions of torch say besides: `enable_reconfigure` from 2.14 on, which
        # is False unless a program asks for groups whose members change
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options = stock._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    return OneLoop


def choose_communication(gloo: bool, rank: int, world: int, path: str, timeout: timedelta) -> None:
    """What the process groups of this job are."""
    from torch.distributed import distributed_c10d

    from tests.mailboxes import Mailboxes, MailboxGroup

    module: Any = distributed_c10d
    module.ProcessGroupGloo = gloo_with_one_loop()  # before another one stands there
    if not gloo and not GPU.exists():
        MailboxGroup.mailboxes = Mailboxes(rank, world, path, timeout)
        module.ProcessGroupGloo = MailboxGroup


def connect(gloo: bool, rank: int, world: int, store: str, timeout_s: float) -> None:
    """The default process group of so many ranks, which meet at a file."""
    import deepspeed

    # later than the one who waits for the job gives up: a rank that hangs shows where, and does not
    # leave its collective at the very moment when it is asked
    timeout = timedelta(seconds=timeout_s + 10)
    choose_communication(gloo, rank, world, store, timeout)
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        timeout=timeout,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
