"""One fate, and values that become one along a tree: any number of ranks, each of which may fail
or die at any step."""

import math
import random
import time
from typing import Any

import pytest

from megatron_ucp.errors import RankError, UcpError, UsageError
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.messages import BrokenError
from tests.reshard.thread_ranks import ThreadRanks, run

WORLDS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 33]


@pytest.mark.parametrize("world", WORLDS)
def test_all_ranks_get_the_same(world: int) -> None:
    """Numbers, values in the order of ranks, and values for one rank, of every size."""

    def work(ranks: ThreadRanks) -> Any:
        own = ranks.rank
        lowest = ranks.lowest(own, -own, 7)
        with agree.gathering(ranks) as block:
            block.value = {"rank": own, "long": "x" * 400 * own}
        summed = agree.merging(list.__add__, sum, ranks=ranks)
        with summed:
            summed.value = [own]
        given = {(own * 3 + 1) % world: ("to", own), (own + 2) % world: b"b" * own * 1000}
        came = agree.delivered(given, ranks)
        every = agree.collect(lambda: own % 2, ranks)
        first = agree.of_first(lambda: f"of {own}", ranks)
        flags = agree.all_of(own < world, ranks), agree.any_of(own == world - 1, ranks)
        return lowest, block.values, summed.result, came, every, first, flags

    found, _ = run(world, work)
    for rank, (lowest, values, summed, came, every, first, flags) in enumerate(found):
        assert lowest == [0, 1 - world, 7]
        assert values == [{"rank": one, "long": "x" * 400 * one} for one in range(world)]
        assert summed == sum(range(world)) and first == "of 0" and flags == (True, True)
        assert every == [one % 2 for one in range(world)]
        want: dict[int, Any] = {}
        for one in range(world):
            given = {(one * 3 + 1) % world: ("to", one), (one + 2) % world: b"b" * one * 1000}
            if rank in given:
                want[one] = given[rank]
        assert came == want


def test_what_a_rank_receives_grows_with_the_logarithm() -> None:
    """A fate is eight bytes from each neighbour in the tree; equal values go once; and the control:
    values that differ do not."""
    for world in (4, 64, 512):
        steps = math.ceil(math.log2(world))

        def fates(ranks: ThreadRanks) -> None:
            for _ in range(10):
                with agree.together(ranks):
                    pass

        _, network = run(world, fates)
        assert max(map(sum, network.received.values())) <= 10 * 8 * steps
        most = {}
        for kind in ("same", "other"):

            def values(ranks: ThreadRanks, kind: str = kind) -> None:
                with agree.gathering(ranks) as block:
                    block.value = random.Random(kind if kind == "same" else ranks.rank).randbytes(
                        99
                    )

            _, network = run(world, values)
            most[kind] = max(map(sum, network.received.values()))
        assert most["same"] <= 512 * steps < most["other"] or world == 4
    assert most["other"] > 99 * 512


class Planted(UcpError):
    """An error of the test."""


def a_life(ranks: ThreadRanks, seed: int) -> str:
    """Some agreements in a row, as a load has them, of which ranks fail at some."""
    plan = random.Random(seed)
    for step in range(plan.randint(1, 8)):
        kind = plan.choice(["fate", "values", "merge", "first", "delivered"])
        failing = {rank for rank in range(ranks.world) if plan.random() < 0.05}
        own = ranks.rank in failing
        if kind == "delivered":
            agree.delivered({(ranks.rank + step) % ranks.world: step}, ranks)
            continue
        if kind == "first":
            agree.of_first(lambda: _or_fail(0 in failing, step), ranks)  # noqa: B023
            continue
        block: Any = {
            "fate": lambda: agree.together(ranks),
            "values": lambda: agree.gathering(ranks),
            "merge": lambda: agree.merging(lambda a, b: a + b, ranks=ranks),
        }[kind]()
        with block:
            block.value = _or_fail(own, step)
    return "done"


def _or_fail(fails: bool, step: int) -> int:
    if fails:
        raise Planted(f"planted at step {step}")
    return step


def test_random_failures_are_one_fate() -> None:
    """500 plans: all ranks end, with the same error, or none of them has one."""
    failed = 0
    for seed in range(500):
        world = random.Random(~seed).choice([2, 3, 4, 6, 9])
        started = time.monotonic()
        found, _ = run(world, lambda ranks, seed=seed: a_life(ranks, seed))
        assert time.monotonic() - started < 5
        kinds = {str(one).partition(" (on rank")[0].partition("\n")[0] for one in found}
        assert len(kinds) == 1, (seed, found)
        assert found[0] == "done" or all(isinstance(one, Planted) for one in found)
        failed += found[0] != "done"
    assert 100 < failed < 450


@pytest.mark.parametrize("world", [2, 3, 4, 8, 13])
def test_a_rank_that_dies_is_known_to_all_at_once(world: int) -> None:
    """Whichever rank it is, at whichever step: the others raise, and nobody waits for a timeout."""
    for dead in range(world):
        for at in range(3):

            def work(ranks: ThreadRanks, dead: int = dead, at: int = at) -> str:
                steps = [
                    lambda: ranks.lowest(1),
                    lambda: agree.collect(lambda: ranks.rank, ranks),
                    lambda: agree.delivered({0: 1}, ranks),
                ]
                for step in range(6):
                    if ranks.rank == dead and step == at:
                        ranks.network.dies(dead)
                        return "dead"
                    steps[step % 3]()
                return "never told"

            started = time.monotonic()
            found, _ = run(world, work)
            assert time.monotonic() - started < 5
            assert found[dead] == "dead"
            for rank, one in enumerate(found):
                assert rank == dead or isinstance(one, BrokenError), (rank, one)
                assert rank == dead or agree.is_of_ranks(one)


def test_a_defect_while_values_are_merged_ends_all() -> None:
    """It goes on as it is on its own rank, and is a RankError on the others."""

    def bad(one: int, other: int) -> int:
        if other == 3:
            raise ZeroDivisionError("a defect")
        return one + other

    def work(ranks: ThreadRanks) -> None:
        with agree.merging(bad, ranks=ranks) as block:
            block.value = ranks.rank

    found, _ = run(4, work)
    assert isinstance(found[2], ZeroDivisionError)  # which joins the value of rank 3 with its own
    assert all(isinstance(found[rank], RankError) for rank in (0, 1, 3))


def test_a_defect_of_one_rank_goes_on_as_it_is() -> None:
    def work(ranks: ThreadRanks) -> None:
        with agree.together(ranks):
            if ranks.rank == 1:
                raise KeyError("a defect")
            if ranks.rank == 2:
                raise UsageError("wrong use")

    found, _ = run(3, work)
    assert isinstance(found[1], KeyError)
    assert isinstance(found[0], RankError) and isinstance(found[2], RankError)


def test_an_error_between_messages_leaves_the_agreement_around_them_too() -> None:
    """Whose first message would be taken for the one that is missing: gloo ends a process that
    receives another size than it waits for."""

    def work(ranks: ThreadRanks) -> None:
        sends = ranks.move

        def fails_once(*_: Any) -> Any:
            ranks.move = sends  # type: ignore[method-assign]
            raise MemoryError

        if ranks.rank == 1:
            ranks.move = fails_once  # type: ignore[method-assign]
        try:
            with agree.together(ranks):
                agree.gather(ranks.rank, ranks)
        finally:
            if ranks.rank == 1:  # its process ends
                ranks.network.dies(1)

    found, _ = run(3, work)
    assert [type(one) for one in found] == [BrokenError, MemoryError, BrokenError]
