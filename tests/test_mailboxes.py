"""The process group of the tests against gloo itself."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
MANY = 100_000  # elements: more bytes than a connection takes at once


# ------------------------------------------------ jobs, run by the ranks


def numbers(count: int) -> Any:
    """Whole numbers, which sum to the same in any order; others on each rank."""
    import torch
    import torch.distributed as dist

    return torch.arange(count, dtype=torch.float32) % 13 + 100 * dist.get_rank()


def operations(count: int) -> dict[str, Any]:
    """The result of each operation of a group of all, and of one that leaves rank 0 out."""
    import torch.distributed as dist

    world = dist.get_world_size()
    without = dist.new_group(list(range(1, world)))
    found = {f"all {name}": value for name, value in results(dist.group.WORLD, count).items()}
    if dist.get_rank():
        found |= {f"few {name}": value for name, value in results(without, count).items()}
    return found


def results(group: Any, count: int) -> dict[str, Any]:
    import torch.distributed as dist

    mine, found = numbers(count), dict[str, Any]()
    for function in (of_all, exchanged, with_one):
        for name, value in function(group, mine).items():
            values = value if isinstance(value, list) else [value]
            found[name] = [each.tolist()[:50] + each.tolist()[-50:] for each in values]
    objects: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(objects, {"rank": dist.get_rank(group)}, group)
    return found | {"objects": objects}


def of_all(group: Any, mine: Any) -> dict[str, Any]:
    """What every rank has the same of afterwards."""
    import torch
    import torch.distributed as dist

    size, found = dist.get_world_size(group), dict[str, Any]()
    for operation in ("SUM", "MAX", "MIN", "PRODUCT"):
        found[operation] = mine.clone()
        dist.all_reduce(found[operation], getattr(dist.ReduceOp, operation), group)
    found["list"] = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found["list"], mine, group)
    found["whole"] = torch.empty(size * len(mine))
    dist.all_gather_into_tensor(found["whole"], mine, group)
    return found


def exchanged(group: Any, mine: Any) -> dict[str, Any]:
    """What each rank has something else of."""
    import torch
    import torch.distributed as dist

    me, size = dist.get_rank(group), dist.get_world_size(group)
    several = torch.cat([mine + each for each in range(size)])
    sums, equal = torch.empty_like(mine), torch.empty_like(several)
    dist.reduce_scatter_tensor(sums, several, group=group)
    dist.all_to_all_single(equal, several, group=group)
    rows = [each + 1 for each in range(size)]  # rank r gets r + 1 of everybody
    uneven = torch.empty(size * (me + 1))
    dist.all_to_all_single(uneven, mine[: sum(rows)], [me + 1] * size, rows, group)
    return {"sums": sums, "equal": equal, "uneven": uneven, "around": around(group, mine)}


def with_one(group: Any, mine: Any) -> dict[str, Any]:
    """What goes to the last rank or comes from it."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    root = dist.get_global_rank(group, size - 1)
    is_root = dist.get_rank() == root
    found = {"broadcast": mine.clone(), "scatter": torch.empty_like(mine)}
    dist.broadcast(found["broadcast"], root, group)
    parts = [mine + each for each in range(size)] if is_root else None
    dist.scatter(found["scatter"], parts, root, group)
    total = mine.clone()
    dist.reduce(total, root, group=group)
    gathered = [torch.empty_like(mine) for _ in range(size)] if is_root else None
    dist.gather(mine, gathered, root, group)
    return found | ({"reduce": total, "gather": gathered} if is_root else {})


def around(group: Any, mine: Any) -> Any:
    """Everybody sends to the next before it receives."""
    import torch
    import torch.distributed as dist

    me, size = dist.get_rank(group), dist.get_world_size(group)
    value = torch.empty_like(mine)
    works = [
        dist.isend(mine, group=group, group_dst=(me + 1) % size),
        dist.irecv(value, group=group, group_src=(me - 1) % size),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return value


def in_another_order() -> list[float]:
    """Operations that are begun in one order by one rank and in the other by the next."""
    import torch
    import torch.distributed as dist

    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    order = (0, 1) if dist.get_rank() else (1, 0)
    values = [torch.full((2,), 1.0 + dist.get_rank()), torch.full((2,), 10.0 + dist.get_rank())]
    works = [dist.all_reduce(values[each], group=groups[each], async_op=True) for each in order]
    for work in works:
        assert work is not None
        work.wait()
    return [value[0].item() for value in values]


def refused(what: str) -> None:
    import torch
    import torch.distributed as dist

    rank, value = dist.get_rank(), torch.ones(2)
    if what == "average":
        dist.all_reduce(value, dist.ReduceOp.AVG)
    elif what == "shapes":
        dist.all_gather([torch.empty(2), torch.empty(3)], value)
    elif what == "operations":
        dist.all_reduce(value) if rank else dist.broadcast(value, 1)
    elif what == "sizes":
        dist.all_reduce(torch.ones(2 + rank))
    elif rank:  # it is gone, and rank 0 waits for it
        raise KeyError("planted fault")
    else:
        dist.all_reduce(value)


# ------------------------------------------------ tests


@pytest.fixture(scope="module")
def gloo() -> Iterator[RankPool]:
    """Ranks that communicate as every user's do."""
    pool = RankPool(size=3, gloo=True)
    yield pool
    pool.close()


@pytest.mark.parametrize("count", [40, MANY])
def test_every_operation_is_that_of_gloo(ranks: RankPool, gloo: RankPool, count: int) -> None:
    ours, theirs = (pool.run(3, operations, count) for pool in (ranks, gloo))
    assert [len(found) for found in ours] == [13, 26, 30]
    assert ours == theirs


def test_operations_may_begin_in_another_order(ranks: RankPool) -> None:
    assert ranks.run(2, in_another_order) == [[3.0, 21.0]] * 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("average", "gloo has no"),
        ("shapes", "one shape only"),
        ("operations", "rank 1 does b'allreduce' where this rank does b'broadcast'"),
        ("sizes", "a rank sent 12 bytes for (2,) of torch.float32, which are 8"),
        ("rank", "rank 1 is gone"),
    ],
)
def test_what_must_fail_does(ranks: RankPool, what: str, said: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        ranks.run(2, refused, what, timeout_s=3.0)
    assert said in str(caught.value)
