"""Options that differ between ranks, in megatron-core's own stack. In a file of its own: after a
job of it on two ranks one of AutoEP on four trains otherwise."""

from pathlib import Path

import pytest

from tests.engines import alike_jobs
from tests.engines.test_options_differ import require_said
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


def test_megatrons_own_stack(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, alike_jobs.stack, str(tmp_path))
    assert first == second
    for name in (
        "load_optimizer_states",
        "load_module_only",
        "path",
        "save durable",
        "save rng",
        "save keep_latest",
    ):
        require_said(first, name)
    assert first["equal"]
