"""What ranks do for `test_transfer`."""

from pathlib import Path
from typing import Any
from unittest import mock

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
from tests.reshard.pairs import Toy, ToySink, filled, resized, toys


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
