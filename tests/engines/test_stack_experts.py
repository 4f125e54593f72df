"""Experts that ranks cut otherwise than attention, while no expert parallelism spreads them: our
models then have an optimizer of their own for them. Layers of which a list says that all have
experts."""

from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from tests.engines.sources import Sources
from tests.engines.stack_jobs import Mcore
from tests.engines.test_stack_loads import check
from tests.engines.test_stack_pairs import MOE, SAVE

RESUME, STOCK = "tests.engines.stack_jobs:resume", "tests.engines.stack_jobs:stock_load"
ALONE: dict[str, Any] = {"tp": 2, "etp": 1, **MOE}


@pytest.mark.parametrize(
    ("kind", "job", "world", "target"),
    [
        ("fully_reshardable", RESUME, 1, Mcore(**MOE)),
        ("fully_reshardable", RESUME, 2, Mcore(ep=2, **MOE)),
        ("ours", STOCK, 2, Mcore(**ALONE)),
    ],
)
def test_their_optimizer_is_found(
    sources: Sources, kind: str, job: str, world: int, target: Mcore
) -> None:
    folder = sources.get(2, Mcore(**ALONE), SAVE, more=3, kind=kind)
    options: dict[str, Any] = {"tags": ("filled", "trained")}
    check(sources.ranks.run(world, job, target, folder, **options), None)


@pytest.mark.parametrize("kind", ["dp_reshardable", "legacy"])
def test_from_buckets_they_are_refused_by_name(sources: Sources, kind: str) -> None:
    folder = Path(sources.get(2, Mcore(**ALONE), SAVE, more=3, kind=kind))
    with pytest.raises(UnsupportedError, match="cut otherwise than the rest") as found:
        ucp.describe(folder / "trained")
    assert "etp=1" in str(found.value)
