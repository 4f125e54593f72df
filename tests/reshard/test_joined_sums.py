"""Sums of the fingerprint, joined over any tree of ranks, are those that all ranks have together;
copies that differ are seen wherever they meet."""

import random
from functools import reduce
from typing import Any

from megatron_ucp.core.box import Box
from megatron_ucp.reshard.fingerprint import JoinedSums, Sums, joined_sums
from tests.reshard.thread_ranks import run

BOXES = [Box((0, 0), (4, 8)), Box((4, 0), (8, 8))]


def ranks_of(seed: int) -> tuple[list[Sums], dict[Any, int]]:
    """Ranks that hold partitions of two shares, some of them alike, in any order; and the XOR of
    each share."""
    plan = random.Random(seed)
    partitions, copies = plan.randint(1, 9), plan.randint(1, 3)
    ranks: list[Sums] = []
    want: dict[Any, int] = {}
    for share, box in enumerate(BOXES):
        crcs = [plan.getrandbits(32) for _ in range(partitions)]
        for crc in crcs:
            want[box] = want.get(box, 0) ^ crc
        for _ in range(copies):
            holder: tuple[int, Any] = (share, ())
            ranks += [
                {("w", "master", "float32", box, holder, part): crc}
                for part, crc in enumerate(crcs)
            ]
    plan.shuffle(ranks)
    return ranks, want


def found_by(ranks: list[Sums]) -> JoinedSums:
    """What rank 0 has in the end."""
    found, _ = run(len(ranks), lambda own: joined_sums(ranks[own.rank], own))
    assert isinstance(found[0], JoinedSums), found
    return found[0]


def test_any_order_gives_the_sum_of_all() -> None:
    """Also where replicas meet so that their sums overlap."""
    overlaps = 0
    for seed in range(200):
        ranks, want = ranks_of(seed)
        found = found_by(ranks)
        assert {box: sum_ for (*_, box), sum_ in found.shares().items()} == want
        assert not found.apart
        overlaps += reduce(JoinedSums.join, map(JoinedSums, ranks)).overlaps
    assert overlaps > 20, "no case took the second way"


def test_a_copy_that_differs_is_apart() -> None:
    """Whichever one, and in whatever order: never a sum as if all were well."""
    seen = 0
    for seed in range(200):
        ranks, want = ranks_of(seed)
        chosen = random.Random(seed).randrange(len(ranks))
        (key,) = ranks[chosen]
        has_copy = sum(key in one for one in ranks) > 1
        ranks[chosen] = {key: ranks[chosen][key] ^ 1}
        found = found_by(ranks)
        shares = {box: sum_ for (*_, box), sum_ in found.shares().items()}
        if has_copy:
            seen += 1
            assert found.apart == {"w"}
        else:
            assert shares[key[3]] == want[key[3]] ^ 1 and not found.apart
    assert seen > 50
