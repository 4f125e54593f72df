"""How much of what `tests/run.sh all` does this run does: it sets TESTS_ALL."""

import os
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
ALL = "TESTS_ALL" in os.environ
LOSS_STEPS = 20 if ALL else 8  # that go on after a load, where losses are compared


def every(cases: Iterable[Case]) -> list[Case]:
    """The cases of a test that is `slow`. Thousands are not made where they would be left out."""
    cases = list(cases)
    return cases if ALL else cases[:1]


def tags_of(more: int) -> tuple[str, ...]:
    """What a resume loads: provenance values prove the bits; losses go on from what was trained."""
    return ("filled", "trained") if more else ("filled",)
