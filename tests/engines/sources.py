"""Checkpoints that several tests share: each source mesh is saved once."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.engines import kinds
from tests.engines.model import Setup
from tests.ranks import Job, RankPool

PLAIN = Setup(1, "bf16")


class Sources:
    """Each source mesh is saved once and reused."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def get(self, world: int, setup: Any, job: Job = kinds.save, **kwargs: Any) -> str:
        """The folder of a run on so many ranks, with its oracle."""
        key = f"{world}_{zlib.crc32(repr((setup, sorted(kwargs.items()))).encode()):08x}"
        path = self.folder / key
        if not path.exists():
            path.mkdir()
            try:
                self.ranks.run(world, job, setup, str(path), timeout_s=200, **kwargs)
            except BaseException:
                path.rename(self.folder / f"failed_{key}")  # or the next test takes it for whole
                raise
        return str(path)

    def resume(self, world: int, setup: Any, folder: str | Path, **options: Any) -> list[Any]:
        """What each of so many ranks finds with `kinds.resume`."""
        timeout_s = options.pop("timeout_s", 240)
        job = kinds.resume
        return self.ranks.run(world, job, setup, str(folder), timeout_s=timeout_s, **options)


def check(found: list[dict[str, Any]], loss: float | None = None, different: int = 10) -> None:
    """Every rank saw equal bits, and saw that more than so many values were different before; and
    no loss is further than that from the one of the run."""
    for rank in found:
        wrong = {tag: said[:6] for tag, said in rank["differences"].items() if said}
        assert rank["differences"] and not wrong, wrong
        assert all(len(said) > different for said in rank["before"].values()), (
            "the engine was equal before the load"
        )
        assert loss is None or rank["loss"] <= loss


def check_fails(found: list[dict[str, Any]]) -> None:
    """Negative control: `check` fails for every rank, and for what it saw after the load."""
    for rank in found:
        with pytest.raises(AssertionError) as caught:
            check([rank])
        assert "equal before the load" not in str(caught.value)


def of_states(differences: list[str]) -> list[str]:
    """But for counters and the schedule, which stock does not load from universal folders."""
    return [one for one in differences if not one.startswith(("counters", "scheduler"))]


def without_manifest(folder: Path) -> Path:
    """As stock DeepSpeed would have written it."""
    for path in [*folder.rglob("ucp_*")]:
        path.unlink()
    return folder


def patterns_alone(folder: Path) -> Path:
    """As DeepSpeed wrote it before it had affine maps, and as scripts write it."""
    import torch

    for path in folder.rglob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        del state["universal_checkpoint_info"]["affine_map"]
        torch.save(state, path)
    return folder


def drop_record(path: Path, which: int) -> None:
    """Writes a .pt file again without one of its tensor records."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    tensors = [name for name in records if "/data/" in name]
    del records[tensors[which]]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for record, data in records.items():
            new.writestr(record, data)
