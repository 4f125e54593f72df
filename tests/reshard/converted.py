"""What the tests of conversions on real checkpoints share."""

import hashlib
from pathlib import Path
from typing import Any

import megatron_ucp as ucp
from tests.engines import kinds
from tests.engines.sources import Sources
from tests.ranks import Job

Mesh = tuple[int, ...]


def digest(folder: Path) -> str:
    """Of every byte under a folder."""
    found = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        found.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return found.hexdigest()


def loaded(
    sources: Sources,
    world: int,
    setup: Any,
    folder: str,
    oracle: str,
    job: Job = kinds.stock_load,
    **options: Any,
) -> list[str]:
    """What differs on any rank after a load."""
    found = sources.ranks.run(world, job, setup, folder, oracle, timeout_s=180, **options)
    assert all(rank["before"] for rank in found), "the target was equal before the load"
    return [difference for rank in found for difference in rank["differences"]]


def same(source: str | Path, output: str) -> None:
    assert ucp.verify(output, deep=True).findings == ()
    assert ucp.diff(source, output) == []
