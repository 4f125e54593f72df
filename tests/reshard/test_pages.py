"""Memory that goes page by page while the rest of it is read."""

import sys
from unittest import mock

import pytest
import torch

from benchmarks.frame import peak
from megatron_ucp.reshard.execute import NEVER, UsedUp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages go on Linux alone")
MB = 2**20
WHOLE, STEP = 64 * MB, 4 * MB


def test_a_copy_needs_no_second_room() -> None:
    """As another process sees it; and what a copy takes whose source stays."""
    grown = [_growth(is_let_go) for is_let_go in (True, False)]
    assert grown[0] < 4 * STEP, "some steps, not all of it"
    assert grown[1] > 0.9 * WHOLE, "the control: the source stays"


def _growth(is_let_go: bool) -> int:
    """Peak bytes that a copy of WHOLE bytes, step by step, takes beside its source."""
    source, found = torch.ones(WHOLE, dtype=torch.uint8), list[int]()
    used_up = UsedUp([source])
    for number, one in enumerate(source.split(STEP)):
        used_up.read(number, one)
    with peak(found, "RssAnon"):
        target = torch.empty(WHOLE, dtype=torch.uint8)
        for number, one in enumerate(source.split(STEP)):
            target[number * STEP :][:STEP] = one
            if is_let_go:
                used_up.let_go(number)
    assert bool((target == 1).all())
    return found[0]


def test_what_goes_when() -> None:
    """What two steps read stays until the later one, and so does a page that they share; what
    another tensor has on the first and the last page stays."""
    memory = torch.ones(64 * 1024, dtype=torch.uint8)
    at = -memory.data_ptr() % 4096
    first, second, never = (memory[at + 4096 * low : at + 4096 * high] for low, high in _PAGES)
    used_up = UsedUp([memory])
    used_up.read(1, second)
    used_up.read(0, first)
    used_up.read(0, second[:1])
    assert _gone(memory, at) == []
    used_up.let_go(NEVER)
    assert _gone(memory, at) == [*range(*_PAGES[2])]
    used_up.let_go(0)
    assert _gone(memory, at) == [*range(2), *range(*_PAGES[2])]
    used_up.let_go(1)
    assert _gone(memory, at) == [*range(8)]
    assert bool((memory[:at] == 1).all())
    assert never.numel() == 3 * 4096


_PAGES = ((0, 3), (2, 5), (5, 8))  # pages 0 to 2, 2 to 4, 5 to 7


def _gone(memory: torch.Tensor, at: int) -> list[int]:
    """Which of the first eight whole pages have no values any more."""
    return [page for page in range(8) if not memory[at + 4096 * page :][:4096].any()]


def test_views_of_one_storage_are_one_area() -> None:
    memory = torch.ones(64 * 1024, dtype=torch.uint8)
    used_up = UsedUp([memory[:4096], memory[8192:]])
    used_up.read(0, memory)
    used_up.let_go(NEVER)
    assert bool((memory == 1).all()), "what lies between two views is read"


def test_pinned_memory_stays() -> None:
    """A device that reads it has the pages that were there when it was pinned: with others in
    their place it would see old values, whoever gets this memory next. (Seen on an H200, of
    memory that CUDA registered.)"""
    lying = torch.ones(3 * 64 * 1024, dtype=torch.uint8).split(64 * 1024)
    pinned, *rest = sorted((one.clone() for one in lying), key=torch.Tensor.data_ptr)
    is_pinned = lambda one: one.data_ptr() == pinned.data_ptr()  # noqa: E731
    with mock.patch.object(torch.Tensor, "is_pinned", is_pinned):
        for held in ([pinned], [*rest, pinned]):
            used_up = UsedUp(held)
            used_up.read(0, pinned)
            used_up.let_go(NEVER)
            used_up.let_go(0)
    assert bool((pinned == 1).all())
    assert not all(bool((one == 1).all()) for one in rest), "the control: others go"
