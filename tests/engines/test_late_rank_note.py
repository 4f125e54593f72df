"""Who waits long for other ranks says for whom, once; and nobody who does not."""

import logging
import time
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ucp.reshard import agree, waits
from tests.ranks import RankPool


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


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("which", [0, 2])
def test_one_rank_says_which_one_is_late(which: int) -> None:
    pool = RankPool(3, gloo=True)
    try:
        found = pool.run(3, late, which, 4.0)
    finally:
        pool.close()
    (said,) = [one for rank in found for one in rank]
    assert f"1 of 3 ranks have not come to it: rank {which}" in said
    assert "late of tests.engines.test_late_rank_note, line" in said
    assert not found[which]


def test_a_short_wait_is_not_told() -> None:
    pool = RankPool(3, gloo=True)
    try:
        assert pool.run(3, late, 1, 0.0) == [[], [], []]
    finally:
        pool.close()
