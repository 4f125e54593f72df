"""What the ranks do in the tests of Muon."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed import optimizer
from megatron_ucp.reshard import fingerprint, load
from tests.engines.canonical import canonical, differences, everywhere
from tests.engines.kinds import oracle_of, refusal_of
from tests.engines.masters import matrices_of
from tests.engines.model import Setup, make_engine


def cast(setup: Setup, folder: str, **options: Any) -> tuple[list[str], list[str]]:
    """Differences after a load into an engine that keeps the momentum in another dtype, whose
    elements must be those of the checkpoint in it; and the notes of the load."""
    engine = make_engine(setup)
    want = oracle_of(folder)["states"]["filled"]
    notes = ucp.load(engine, folder, tag="filled", **options).notes
    have = canonical(engine)
    for key, value in want["full"].items():
        if key[1] == "momentum_buffer":
            assert value.dtype != have["full"][key].dtype
            want["full"][key] = value.to(have["full"][key].dtype)
    found = differences(want, have)
    engine.destroy()
    return found, [*notes]


def damaged_copy(setup: Setup, folder: str, compares: bool) -> tuple[str, int]:
    """What a load says, and of how many copies, where a bit of a matrix is another one in every
    partition but the first that keeps it. `compares`: with copies compared."""
    engine = make_engine(setup)
    stock, flipped, said = fingerprint.sums_of, list[str](), "nothing"

    def sums(manifest: Any, wants: Any, read: Any, *args: Any, **more: Any) -> Any:
        flipped.extend(_flip_copies(manifest, wants, read))
        return stock(manifest, wants, read, *args, **{**more, "copies": compares})

    with mock.patch.object(load, "sums_of", sums):
        said = refusal_of(lambda: ucp.load(engine, folder, tag="filled"), "nothing")
    engine.destroy()
    return said, sum(everywhere(len(flipped)))


def _flip_copies(manifest: Any, wants: Any, read: Any) -> Iterator[str]:
    for slot, state in wants:
        buffer = manifest.buffers[slot.buffer].of(state)
        for one in buffer.fragments(slot.part) if buffer.rule == "uncut" else ():
            member = buffer.members[one.member]
            if buffer.owners(member, 0, 1)[0] != slot.part:
                read(slot, one.offset, one.offset + 1).view(torch.int32)[0] ^= 1
                yield member.param


def faulty(setup: Setup, folder: str, fault: str) -> dict[str, Any]:
    """What a comparison says of a load in which something went wrong, as `resume` says it."""
    engine = make_engine(setup)
    want = oracle_of(folder)["states"]["filled"]
    found = {"before": {"filled": differences(want, canonical(engine))}}
    asked = mock.patch.object(optimizer, "uncut_states", return_value=())
    try:
        with asked if fault == "as a partition" else contextlib.nullcontext():
            ucp.load(engine, folder, tag="filled")
        if fault in ("one element", "one copy"):
            ((master, _),) = matrices_of(engine)
            momentum = engine.optimizer.optimizer.state[master]["momentum_buffer"]
            # the first matrix of the first rank is whole there, that of the last one is split
            at_fault = 0 if fault == "one element" else dist.get_world_size() - 1
            momentum[0] += dist.get_rank() == at_fault
        seen = differences(want, canonical(engine))
    except (AssertionError, RuntimeError, ucp.UcpError) as error:
        seen = [f"{type(error).__name__}: {error}"]
    finally:
        engine.destroy()
    return found | {"differences": {"filled": seen}}
