"""The partitions that a load of megatron-core's stack fills, over its pieces of masters and
moments. Without ranks."""

import itertools
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from megatron_ucp.core.flat import FlatBuffer, Member, aligned_starts
from megatron_ucp.core.names import MASTER
from megatron_ucp.engines.megatron.optimizer import LiveBucket, Stepped
from megatron_ucp.errors import PlanError

FLAT = FlatBuffer(
    (Member("a", 0, 5, 0), Member("b", 6, 4, 0)), 12, 1, "whole", ((MASTER, "float32"),)
)


@pytest.fixture
def pieces() -> dict[int, Stepped]:
    """Two parameters as megatron-core holds them: each master in memory of its own."""
    optimizer = SimpleNamespace(state=defaultdict(dict), param_groups=[{}])
    inner = SimpleNamespace(optimizer=optimizer)
    out: dict[int, Stepped] = {}
    for number, member in enumerate(FLAT.members):
        master = torch.arange(member.size, dtype=torch.float32) + 10 * (number + 1)
        param = torch.nn.Parameter(master.clone())
        out[number] = Stepped(inner, 0, param, master, 0, member.size)
    return out


def loaded(pieces: dict[int, Stepped]) -> LiveBucket:
    """A bucket as each load makes one anew, with room for a moment."""
    bucket = LiveBucket(FLAT, 0, pieces, None)
    bucket.join(MASTER)
    bucket.allocate(["exp_avg"], "float32")
    return bucket


def test_to_look_at_the_pieces_moves_nothing(pieces: dict[int, Stepped]) -> None:
    """What an export of the live weights reads."""
    bucket = LiveBucket(FLAT, 0, pieces, None)
    before = [piece.master.data_ptr() for piece in pieces.values()]
    found = bucket.read(MASTER, 7, 9)
    assert found.tolist() == [21.0, 22.0]
    assert found.data_ptr() == pieces[1].master.data_ptr() + found.itemsize
    for first, last in ((4, 6), (9, 12)):  # over the end of a member, and into the padding
        with pytest.raises(PlanError):
            bucket.read(MASTER, first, last)
    with pytest.raises(PlanError):
        bucket.tensor(MASTER)
    assert [piece.master.data_ptr() for piece in pieces.values()] == before


def many(part: int) -> tuple[FlatBuffer, dict[int, Stepped]]:
    """A bucket of many pieces, some of one element, some with gaps behind them, and this
    partition's, the last one first."""
    sizes = [1, 4, 2, 7, 1, 3] * 20
    starts, length = aligned_starts(sizes, 3)
    places = enumerate(zip(starts, sizes, strict=True))
    members = tuple(Member(f"p{n}", at, size, 0) for n, (at, size) in places)
    flat = FlatBuffer(members, length + length % 2, 2, "whole", ((MASTER, "float32"),))
    inner = SimpleNamespace(optimizer=SimpleNamespace(state=defaultdict(dict), param_groups=[{}]))
    held: dict[int, Stepped] = {}
    for one in reversed([*flat.fragments(part)]):
        master = torch.arange(one.low, one.high, dtype=torch.float32) + 100 * one.member
        own = torch.nn.Parameter(master), master, one.low, one.high
        held[one.member] = Stepped(inner, 0, *own)
    return flat, held


@pytest.mark.parametrize("part", [0, 1])
def test_every_run_of_every_piece_is_found_whatever_their_order(part: int) -> None:
    """What a search through all of them finds."""
    flat, held = many(part)
    bucket = LiveBucket(flat, part, held, None)
    for one in flat.fragments(part):
        size, whole = one.high - one.low, held[one.member].master
        for first, last in itertools.combinations(range(size + 1), 2):
            found = bucket.read(MASTER, one.offset + first, one.offset + last)
            assert torch.equal(found, whole[first:last])
        with pytest.raises(PlanError):
            bucket.read(MASTER, one.offset, one.offset + size + 1)


def test_the_next_load_finds_the_partitions_again(pieces: dict[int, Stepped]) -> None:
    first = loaded(pieces)
    for state in (MASTER, "exp_avg"):
        first.tensor(state).copy_(torch.arange(12.0))
    again = loaded(pieces)
    for state in (MASTER, "exp_avg"):
        assert again.tensor(state).data_ptr() == first.tensor(state).data_ptr()
        assert torch.equal(again.tensor(state), torch.arange(12.0))
        assert torch.equal(pieces[1].tensor(state), torch.arange(6.0, 10.0))


def test_pieces_that_were_moved_get_a_new_partition(pieces: dict[int, Stepped]) -> None:
    first = loaded(pieces)
    first.tensor("exp_avg").copy_(torch.arange(12.0))
    moved = pieces[1].held["exp_avg"] = pieces[1].held["exp_avg"].clone()
    again = loaded(pieces).tensor("exp_avg")
    assert again.data_ptr() not in (first.tensor("exp_avg").data_ptr(), moved.data_ptr())
    assert torch.equal(again[6:10], torch.arange(6.0, 10.0))
    again.zero_()
    assert not pieces[0].held["exp_avg"].any() and not pieces[1].held["exp_avg"].any()


def test_pieces_at_each_others_places_get_a_new_partition(pieces: dict[int, Stepped]) -> None:
    home = torch.arange(12.0)
    pieces[0].held["exp_avg"], pieces[1].held["exp_avg"] = home[4:9], home[0:4]
    again = loaded(pieces).tensor("exp_avg")
    assert again.data_ptr() != home.data_ptr()
    assert torch.equal(again[:5], torch.arange(4.0, 9.0))
    assert torch.equal(again[6:10], torch.arange(4.0))
