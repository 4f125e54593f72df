"""What the ranks do in `benchmarks.agreement`: attach, save, save beside training and load, of
which everything is counted that a rank asks other ranks and the file system for."""

import builtins
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.background import SideGroup
from megatron_ucp.reshard.messages import DefaultRanks, Ranks
from tests.engines.model import Setup, make_engine, train

AGREEMENTS = ("lowest", "agreed", "delivered")


def counts(zero: int, folder: str) -> dict[str, dict[str, int]]:
    """Of this rank, by operation."""
    setup, out = Setup(zero), Path(folder)
    engine = make_engine(setup, attach=False)
    found: dict[str, dict[str, int]] = {}
    with counted(found, "attach"):
        ucp.attach(engine)
    train(engine, 1)
    with counted(found, "save"):
        engine.save_checkpoint(str(out / "one"))
    beside = make_engine(setup, attach=False)
    ucp.attach(beside, save="background")
    train(beside, 1)
    beside.save_checkpoint(str(out / "two"))  # which connects the ranks
    ucp.wait(beside)
    train(beside, 1)
    with counted(found, "background save"):
        beside.save_checkpoint(str(out / "two"))
        ucp.wait(beside)
    with counted(found, "load"):
        ucp.load(engine, out / "one")
    return found


@contextmanager
def counted(found: dict[str, dict[str, int]], what: str) -> Iterator[None]:
    """Counts what is done inside, on this rank."""
    count: Counter[str] = Counter()
    stocks = {name: getattr(os, name) for name in ("stat", "lstat", "listdir", "scandir", "open")}

    def counting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            count[name] += 1
            return stock(*args, **kwargs)

        return called

    def moving(stock: Callable[..., Any]) -> Callable[..., Any]:
        def moved(self: Any, sent: Any, sizes: Any) -> Any:
            count["bytes"] += sum(sizes.values())
            count["messages"] += len(sizes)
            return stock(self, sent, sizes)

        return moved

    of_disk: dict[str, Any] = {name: counting(name, one) for name, one in stocks.items()}
    of_ranks: dict[str, Any] = {name: counting(name, getattr(Ranks, name)) for name in AGREEMENTS}
    dist.barrier()
    with (
        mock.patch.multiple(os, **of_disk),
        mock.patch.object(builtins, "open", counting("open", builtins.open)),
        mock.patch.object(DefaultRanks, "move", moving(DefaultRanks.move)),
        mock.patch.object(SideGroup, "move", moving(SideGroup.move)),
        mock.patch.multiple(Ranks, **of_ranks),
    ):
        yield
    found[what] = {
        "agreements": sum(count[name] for name in AGREEMENTS),
        "messages received": count["messages"],
        "bytes received": count["bytes"],
        "opens": count["open"],
        "stats": count["stat"] + count["lstat"],
        "listings": count["listdir"] + count["scandir"],
    }
