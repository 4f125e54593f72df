"""The guarantees of a transfer, for every pair of a source and a sink; and that memory goes to
memory bit for bit."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ucp.reshard.kept_moves import KeptMoves
from tests.engines.store_jobs import in_store
from tests.object_server import ObjectServer, Remote
from tests.ranks import RankPool
from tests.reshard import guarantees, transfer_jobs
from tests.reshard.guarantees import GUARANTEES
from tests.reshard.pairs import PAIRS

CASES = [(n, g) for n, pair in PAIRS.items() for g, (_, is_of) in GUARANTEES.items() if is_of(pair)]


def test_every_pair_has_the_guarantees_that_it_can_have() -> None:
    """A table that is filled by a mistake would pass all the same."""
    assert len(PAIRS) == 11 and len(GUARANTEES) == 10 and len(CASES) == 73
    assert len(STORED) == 31


@pytest.mark.parametrize(("pair", "guarantee"), [one for one in CASES if not PAIRS[one[0]].world])
def test_a_pair(pair: str, guarantee: str, tmp_path: Path) -> None:
    GUARANTEES[guarantee][0](PAIRS[pair], tmp_path)


STORED = [(n, g) for n, g in CASES if PAIRS[n].reads == "files" and g in guarantees.AT_A_STORE]


@pytest.mark.parametrize(("pair", "guarantee"), [one for one in STORED if not PAIRS[one[0]].world])
def test_a_pair_in_a_store(
    pair: str, guarantee: str, tmp_path: Path, object_server: ObjectServer
) -> None:
    """From a store, and into one."""
    guarantees.on_rank(guarantee, pair, str(tmp_path), object_server)
    assert object_server.count("GET")


@pytest.mark.parametrize(("pair", "guarantee"), [one for one in STORED if PAIRS[one[0]].world])
def test_a_pair_on_ranks_in_a_store(
    pair: str, guarantee: str, tmp_path: Path, ranks: RankPool, object_server: ObjectServer
) -> None:
    job, args = guarantees.on_rank, (guarantee, pair, str(tmp_path), Remote(object_server.control))
    ranks.run(PAIRS[pair].world, in_store, object_server.environment(), job, *args, timeout_s=120)
    assert object_server.count("GET")


@pytest.mark.parametrize(("pair", "guarantee"), [one for one in CASES if PAIRS[one[0]].world])
def test_a_pair_on_ranks(pair: str, guarantee: str, tmp_path: Path, ranks: RankPool) -> None:
    job = guarantees.on_rank
    ranks.run(PAIRS[pair].world, job, guarantee, pair, str(tmp_path), timeout_s=120)


def test_memory_to_memory(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(4, transfer_jobs.resize, str(tmp_path))
    for rank in found:
        assert rank["slots"] >= 3 and rank["differ"] == [], "each slot as files fill it"
        assert rank["planted"], "a value that another rank changed arrives changed"
    assert sum(rank["elems"] for rank in found) > 10_000


def test_columns_and_a_plan_that_failed(ranks: RankPool) -> None:
    found = ranks.run(2, transfer_jobs.columns)
    assert [rank["raised"] for rank in found] == ["RankError", "MemoryError"]
    assert [rank["values"] for rank in found] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


def test_a_round_takes_no_more_than_its_bound_from_any_number_of_givers() -> None:
    """Every piece once, those of a giver in their order, and in each round no more than `most`."""
    plan = random.Random(3)
    for givers in (1, 2, 7, 600, 3000):
        moves = object.__new__(KeptMoves)
        moves.rank, moves.world = plan.randrange(givers + 1), givers + 1
        sizes: dict[int, int] = {}
        most, others = 4096, dict[int, list[Any]]()
        for number in range(3 * givers):
            piece = SimpleNamespace(asked=number)
            sizes[number] = plan.choice((8, most // 8, plan.randint(1, most // 4)))
            others.setdefault(plan.randrange(givers), []).append(piece)
        moves._size = sizes.__getitem__  # type: ignore[method-assign,assignment]
        moves._order = lambda taken: 0  # type: ignore[method-assign]
        rounds = [*moves._rounds(others, most)]
        for row in rounds:
            assert 0 < sum(sizes[one.asked] for rows in row.values() for one in rows) <= most
        for giver, rows in others.items():
            assert [one for row in rounds for one in row.get(giver, ())] == rows
        assert len(rounds) <= 3 * -(-sum(sizes.values()) // most) + 3, "rounds are nearly full"
