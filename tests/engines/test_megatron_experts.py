"""Experts that ranks cut otherwise than attention, while no expert parallelism spreads them: our
models then have an optimizer of their own for them. Layers of which a list says that all have
experts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families.settings import FREQUENCY, as_one, every_of
from tests.engines import kinds, megatron_jobs
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check
from tests.engines.test_megatron_pairs import MOE
from tests.ranks import Job

RESUME, STOCK = kinds.resume, megatron_jobs.stock_load
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
    sources: Sources, kind: str, job: Job, world: int, target: Mcore
) -> None:
    folder = sources.get(2, Mcore(**ALONE), more=3, kind=kind)
    options: dict[str, Any] = {"tags": ("filled", "trained")}
    check(sources.ranks.run(world, job, target, folder, **options))


@pytest.mark.parametrize("kind", ["dp_reshardable", "legacy"])
def test_from_buckets_they_are_refused_by_name(sources: Sources, kind: str) -> None:
    folder = Path(sources.get(2, Mcore(**ALONE), more=3, kind=kind))
    with pytest.raises(UnsupportedError, match="cut otherwise than the rest") as found:
        ucp.describe(folder / "trained")
    assert "etp=1" in str(found.value)


LISTED: dict[str, Any] = {"listed": True, **MOE}


@pytest.mark.parametrize(
    ("setup", "kind", "job", "world", "target"),
    [
        (Mcore(ep=2, **LISTED), "ours", STOCK, 4, Mcore(ep=4, **LISTED)),
        (Mcore(ep=2, **LISTED), "ours", RESUME, 1, Mcore(**MOE)),
        (Mcore(**LISTED), "fully_reshardable", RESUME, 2, Mcore(ep=2, **LISTED)),
        (
            Mcore(every=2, layers=4, family="mixtral"),
            "ours",
            RESUME,
            1,
            Mcore(every=2, layers=4, family="mixtral", listed=True),
        ),
    ],
)
def test_a_list_of_layers_is_a_number(
    sources: Sources, setup: Mcore, kind: str, job: Job, world: int, target: Mcore
) -> None:
    """Stock asks for keys of each layer then, though all of them are alike."""
    folder = sources.get(2, setup, more=3, kind=kind)
    options: dict[str, Any] = {"tags": ("filled", "trained")}
    check(sources.ranks.run(world, job, target, folder, **options))


def test_lists_that_numbers_say() -> None:
    numbers = [every_of(one) for one in (3, [1, 1], [True, 0, 1], [1, 0, 0], (1, 0, 0, 1, 0))]
    assert numbers == [3, 1, 2, 3, 3]
    for odd in ([0, 1, 1], [1, 1, 0], [], "1", None):
        with pytest.raises((TypeError, ValueError)):
            every_of(odd)
        assert as_one(FREQUENCY, odd) == odd
    assert as_one("moe_router_topk", [1]) == [1]


def test_a_converted_folder_has_the_keys_that_its_run_asks_for(
    sources: Sources, tmp_path: Path
) -> None:
    setup = Mcore(ep=2, **LISTED)
    folder = Path(sources.get(2, setup, more=3, kind="ours"))
    back = tmp_path / "trained" / "iter_0000003"
    ucp.convert(folder / "trained", back, to="torch_dist", target=ucp.Mesh(ep=2, dp=2))
    shutil.copy(folder / "oracle.pt", tmp_path)
    check(sources.ranks.run(2, STOCK, setup, str(tmp_path), ("trained",)))
