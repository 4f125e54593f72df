"""Checkpoints that several tests share: each source mesh is saved once."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

from tests.engines import jobs
from tests.engines.model import Setup
from tests.ranks import Job, RankPool

PLAIN = Setup(1, "bf16")


class Sources:
    """Each source mesh is saved once and reused."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder

    def get(self, dp: int, setup: Any, job: Job = jobs.save, **kwargs: Any) -> str:
        key = f"{dp}_{zlib.crc32(repr((setup, sorted(kwargs.items()))).encode()):08x}"
        path = self.folder / key
        if not path.exists():
            path.mkdir()
            try:
                self.ranks.run(dp, job, setup, str(path), timeout_s=200, **kwargs)
            except BaseException:
                path.rename(self.folder / f"failed_{key}")  # or the next test takes it for whole
                raise
        return str(path)


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
