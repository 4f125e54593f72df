"""What ranks do in the tests of long waits: one of them is late."""

import logging
import time
from unittest import mock

import torch.distributed as dist

from megatron_ucp.reshard import agree, waits


def late(which: int, seconds: float) -> list[str]:
    """What this rank says of the wait for another one."""
    said: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Keeps(), logging.getLogger("megatron_ucp")
    logger.addHandler(handler)
    try:
        with mock.patch.object(waits, "LONG_S", 0.5):
            dist.barrier()
            if dist.get_rank() == which:
                time.sleep(seconds)
            with agree.together():
                pass
    finally:
        logger.removeHandler(handler)
    return said
