"""Sums of the fingerprint, joined over any tree of ranks, are those that all ranks have together;
copies that differ are seen wherever they meet."""

import random
import time
from functools import partial, reduce
from typing import Any

import pytest
import torch

from megatron_ucp.core.box import Box
from megatron_ucp.core.flat import alone
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.reshard import fingerprint, threads
from megatron_ucp.reshard.execute import bytes_of
from megatron_ucp.reshard.threads import in_threads
from tests.reshard.thread_ranks import run

BOXES = [Box((0, 0), (4, 8)), Box((4, 0), (8, 8))]


def ranks_of(seed: int) -> tuple[list[fingerprint.Sums], dict[Any, int]]:
    """Ranks that hold partitions of two shares, some of them alike, in any order; and the XOR of
    each share."""
    plan = random.Random(seed)
    partitions, copies = plan.randint(1, 9), plan.randint(1, 3)
    ranks: list[fingerprint.Sums] = []
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


def found_by(ranks: list[fingerprint.Sums]) -> fingerprint.JoinedSums:
    """What rank 0 has in the end."""
    found, _ = run(len(ranks), lambda own: fingerprint.joined_sums(ranks[own.rank], own))
    assert isinstance(found[0], fingerprint.JoinedSums), found
    return found[0]


def test_any_order_gives_the_sum_of_all() -> None:
    """Also where replicas meet so that their sums overlap."""
    overlaps = 0
    for seed in range(200):
        ranks, want = ranks_of(seed)
        found = found_by(ranks)
        assert {box: sum_ for (*_, box), sum_ in found.shares().items()} == want
        assert not found.apart
        overlaps += reduce(fingerprint.JoinedSums.join, map(fingerprint.JoinedSums, ranks)).overlaps
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


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_give_what_one_gives(threads: int) -> None:
    for count in range(7):
        assert in_threads(lambda item: item * item, range(count), threads) == [
            item * item for item in range(count)
        ]


def test_an_error_in_a_thread_is_raised() -> None:
    for failing in range(4):
        with pytest.raises(ValueError, match=f"item {failing}"):
            in_threads(partial(_fails, failing), range(4), 2)


def test_an_error_waits_for_the_other_threads() -> None:
    """They may still write into memory that the caller lets go of."""
    ended: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            raise ValueError("item 0")
        time.sleep(0.05)
        ended.append(item)

    with pytest.raises(ValueError, match="item 0"):
        in_threads(work, range(4), 2)
    assert ended == [1, 3]


def _fails(failing: int, item: int) -> int:
    if item == failing:
        raise ValueError(f"item {item}")
    return item


def test_sums_of_large_memory_are_those_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    params = tuple(ParamSpec(f"p{n}", (7 + n, 5), "float32", "trainable") for n in range(5))
    states = (("fp32", "float32"), ("exp_avg", "float32"))
    buffers = tuple(alone(one.name, one.elems, states, 0) for one in params)
    manifest = Manifest(Keeper.ZERO_0, Mesh(), params, buffers, (ParamGroup({}),))
    memory = {
        Slot(number, (), 0, state): torch.rand(params[number].elems)
        for number in range(5)
        for state, _ in states
    }
    want = fingerprint.sums_of_memory(manifest, memory)
    monkeypatch.setattr(threads, "LARGE_BYTES", 0)
    monkeypatch.setattr(threads, "threads_of_rank", lambda: 3)
    assert fingerprint.sums_of_memory(manifest, memory) == want and len(want) == 10
    memory[Slot(4, (), 0, "fp32")][0] += 1
    assert fingerprint.sums_of_memory(manifest, memory) != want


def test_what_is_stored_in_another_order_is_not_summed_by_its_bytes() -> None:
    params = (
        ParamSpec("turned", (6, 5), "float32", "trainable", order=(1, 0)),
        ParamSpec("plain", (6, 5), "float32", "trainable"),
    )
    buffers = tuple(alone(one.name, one.elems, (("fp32", "float32"),), 0) for one in params)
    manifest = Manifest(Keeper.ZERO_0, Mesh(), params, buffers, (ParamGroup({}),))
    memory = {Slot(number, (), 0, "fp32"): torch.rand(30) for number in range(2)}
    parts = fingerprint.parts_of_memory(manifest, memory)
    known = fingerprint.known_sums(parts)
    for one in memory.values():
        known.crc32(bytes_of(one), one.data_ptr())
    assert fingerprint.sums_of_parts(parts, known) == fingerprint.sums_of_memory(manifest, memory)
    for one in memory.values():  # where the sum is known nobody looks
        one[0] += 1
    unlike = fingerprint.sums_of_memory(manifest, memory)
    kept = fingerprint.sums_of_parts(parts, known)
    assert [key[0] for key in kept if kept[key] != unlike[key]] == ["plain"]
