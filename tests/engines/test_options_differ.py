"""Options that differ between ranks are named on all of them, before anything is opened."""

from pathlib import Path
from typing import Any

import pytest

from tests.engines import alike_jobs
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks


def require_said(found: dict[str, Any], name: str, *words: str) -> None:
    said = found[name]
    assert said.startswith("UsageError"), (name, said)
    assert all(word in said for word in (name.split()[-1], "rank 1", *words)), (name, said)


def test_loads_and_saves(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, alike_jobs.differing, str(tmp_path))
    assert first == second
    for name, words in {
        "load_optimizer_states": ("True", "False"),
        "load_lr_scheduler_states": ("True", "False"),
        "load_module_only": ("True", "False"),
        "hyper": ("'checkpoint'", "'config'"),
        "an unknown hyper": ("'checkpoint'", "'mine'"),
        "allow": ("[]", "['missing']"),
        "rng": ("True", "False"),
        "checksums": ("True", "False"),
        "tag": ("'one'", "'two'"),
        "path": (f"'{tmp_path}'", f"'{tmp_path}/other'"),
        "load_checkpoint native": ("True", "False"),
        "load_checkpoint load_module_strict": ("True", "False"),
        "load_checkpoint load_dir": (f"'{tmp_path}'", f"'{tmp_path}/none'"),
        "save save_latest": ("True", "False"),
        "save exclude_frozen_parameters": ("True", "False"),
    }.items():
        require_said(first, name, *words)
    assert first["unchanged"]
    assert first["left"] == ["latest", "one", "other", "two"]
    assert first["loaded"] == f"{tmp_path}/one"


def test_attaching(ranks: RankPool) -> None:
    first, second = ranks.run(2, alike_jobs.attached)
    assert first == second
    for name in ("keep_latest", "durable", "hyper", "allow", "rng"):
        require_said(first, name)
