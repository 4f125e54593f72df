"""The guarantees of a transfer, for every pair of a source and a sink; and that memory goes to
memory bit for bit."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.core.flat import alone
from megatron_ucp.core.layout import Shard
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.names import VALUE, Keeper
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.kept_moves import KeptMoves, SharedMemories
from megatron_ucp.reshard.transfer import transfer
from tests.engines.store_jobs import in_store
from tests.object_server import ObjectServer, Remote
from tests.ranks import RankPool
from tests.reshard import guarantees
from tests.reshard.guarantees import GUARANTEES
from tests.reshard.pairs import PAIRS, Toy, ToySink, filled, resized, toys


def resize(folder: str) -> dict[str, Any]:
    """From tp=2,dp=2 to dp=4 at ZeRO-3; every slot against one that is filled from files. Then once
    more with a value that rank 0 changed."""
    found = toys(Path(folder), large=False)
    resized(found, Path(folder))
    with open_checkpoint(found.checkpoint) as checkpoint:
        wanted = filled(checkpoint, Toy.on(found.taken.manifest)).held
    differ = [slot for slot, value in wanted.items() if not same(value, found.taken.held[slot])]
    if agree.world()[0] == 0:
        next(iter(found.given.held.values()))[0] += 1
    found.taken = Toy.on(found.taken.manifest)
    resized(found, Path(folder))
    changed = [slot for slot, value in wanted.items() if not same(value, found.taken.held[slot])]
    planted = sum(map(len, agree.gather(changed))) == 1
    elems = sum(value.numel() for value in wanted.values())
    return {"slots": len(wanted), "differ": differ, "planted": planted, "elems": elems}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _cut(dim: int) -> Toy:
    """This rank's half of a matrix of two columns, cut along a dim."""
    spec = ParamSpec("w", (6, 2), "float32", layout=Shard("tp", dim))
    buffer = alone("w", 6, ((VALUE, "float32"),), axes=("tp",))
    return Toy.on(Manifest(Keeper.PAPER, ucp.Mesh(tp=2), (spec,), (buffer,)))


def columns() -> dict[str, Any]:
    """Halves of rows become columns, of which other ranks send every second element; once more
    after a transfer in which a rank could not plan. What this rank has, and what was raised."""
    rank, given, raised = agree.world()[0], _cut(0), ""
    next(iter(given.held.values())).copy_(torch.arange(6.0) + 6 * rank)
    source = SharedMemories("memory", given)

    def fails(*_: Any) -> Any:
        if rank == 1:
            raise MemoryError("no room for the plan")
        return planned(*_)

    planned = KeptMoves._plan
    try:
        with mock.patch.object(KeptMoves, "_plan", fails):
            transfer(source, ToySink(_cut(1)))
    except (MemoryError, ucp.UcpError) as error:
        raised = type(error).__name__
    taken = _cut(1)
    transfer(source, ToySink(taken))
    return {"values": next(iter(taken.held.values())).tolist(), "raised": raised}


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
    found = ranks.run(4, resize, str(tmp_path))
    for rank in found:
        assert rank["slots"] >= 3 and rank["differ"] == [], "each slot as files fill it"
        assert rank["planted"], "a value that another rank changed arrives changed"
    assert sum(rank["elems"] for rank in found) > 10_000


def test_columns_and_a_plan_that_failed(ranks: RankPool) -> None:
    found = ranks.run(2, columns)
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
