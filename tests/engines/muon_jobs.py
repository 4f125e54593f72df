"""What the ranks do in the tests of Muon."""

from dataclasses import replace
from typing import Any

from tests.engines import jobs
from tests.engines.model import Setup


def plain(setup: Setup, seed: int) -> Setup:
    """A setup whose sections are dicts, which a parameter of a test can't be."""
    sections = tuple((k, dict(v) if isinstance(v, tuple) else v) for k, v in setup.zero_config)
    return replace(setup, zero_config=sections, seed=seed)


def save(setup: Setup, folder: str, **options: Any) -> None:
    jobs.save(plain(setup, 1), folder, **options)


def resume(setup: Setup, folder: str, **options: Any) -> dict[str, Any]:
    return jobs.resume(plain(setup, 9), folder, **options)
