"""What the ranks do in the tests of saves that this package writes."""

import zipfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.model import Setup, make_engine, train

OF_THE_ARCHIVE = ".data/serialization_id"  # torch's mark of the call that wrote it


def saved_both_ways(setup: Setup, folder: str, way: str, steps: int = 2) -> ucp.Manifest:
    """Saves one moment by DeepSpeed's own code and by this package."""
    engine = make_engine(setup, attach=False)
    train(engine, steps)
    stock = engine.save_checkpoint
    stock(f"{folder}/stock", tag="tag", client_state={"seen": 7})
    ucp.attach(engine, save=way)
    engine.save_checkpoint(f"{folder}/own", tag="tag", client_state={"seen": 7})
    ucp.wait(engine)
    report = ucp.report(engine).save
    assert report is not None and not report.is_under_way
    engine.destroy()
    return report


def records(path: Path) -> dict[str, bytes]:
    """The records of an archive, by their names in it."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None, "a checksum is wrong"
        names = [name for name in archive.namelist() if not name.endswith(OF_THE_ARCHIVE)]
        return {name: archive.read(name) for name in names}
