"""What the ranks do in the tests of holds that let go of the engine's memory."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import megatron_ucp as ucp
from megatron_ucp.reshard import execute, kept_moves
from tests.engines.kinds import kind_of, refusal_of
from tests.engines.resize_jobs import compared, look

_OVERWRITTEN = 0xA5


@contextmanager
def small_pages() -> Iterator[None]:
    """Pages of a few bytes, which are overwritten instead of let go of: what is read afterwards
    would be seen."""
    with (
        mock.patch.object(execute, "_MADVISE", _overwrite),
        mock.patch.object(execute, "PAGESIZE", 16),
    ):
        yield


def _overwrite(start: Any, size: Any, advice: int) -> None:
    ctypes.memset(start, _OVERWRITTEN, size.value)


def released(source: Any, target: Any, hold: dict[str, Any], window: int) -> dict[str, Any]:
    """As `pair`, of a hold that lets go of the engine's memory as it is used up. What moves at once
    has `window` bytes."""
    one, other = kind_of(source), kind_of(target)
    engine = one.make(source)
    one.train(engine, 3)
    want, old = one.settled_state(engine), one.handle(engine)
    lender = old.ucp.present()
    with small_pages(), mock.patch.object(kept_moves, "round_bytes", lambda world: window):
        held = ucp.hold(old, **hold, release=True)
    found: dict[str, Any] = {"left": _left(lender)}
    found["then"] = [
        refusal_of(partial(one.train, engine, 1), "nothing"),
        refusal_of(partial(ucp.hold, old), "nothing"),
    ]
    one.close(engine)
    engine = other.make(target)
    other.train(engine, 1, first=99)
    compare = compared(source, target)
    found["before"] = compare(want, other.settled_state(engine))
    ucp.load(other.handle(engine), held)
    look(found, other, engine, want, compare)
    other.close(engine)
    return found


def gone_too_early(setup: Any) -> list[str]:
    """A hold whose memory goes before it is read, and what the engine does then."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    kind.train(engine, 1)
    with small_pages(), mock.patch.object(execute.UsedUp, "read", lambda *_: None):
        said = [refusal_of(partial(ucp.hold, kind.handle(engine), release=True), "nothing")]
    said.append(refusal_of(partial(kind.train, engine, 1), "nothing"))
    kind.close(engine)
    return said


def _left(lender: Any) -> float:
    """How much of an engine's memory is not overwritten, of all of it."""
    views = [one.contiguous().view(torch.uint8) for one in kept_moves._all_of(lender)]
    left = sum(int((one != _OVERWRITTEN).sum()) for one in views)
    return left / sum(one.numel() for one in views)
