"""What ranks do for `test_transfer`."""

from pathlib import Path
from typing import Any

import torch

from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import agree
from tests.reshard.pairs import Toy, filled, resized, toys


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
