"""What the ranks do with Hugging Face folders: engines of megatron-core's models load them, and save
what is exported."""

from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines import pipeline_jobs
from tests.engines.canonical import canonical, differences
from tests.engines.pipeline_jobs import Staged
from tests.engines.tensor_jobs import close


def load(
    setup: Staged, folder: str, oracle: str, tag: str = "filled", trained: int = 0, **options: Any
) -> dict[str, Any]:
    """Loads a folder into an engine that may have `trained` before, and compares the masters with
    those of the run that was exported; then trains a step."""
    want = torch.load(Path(oracle) / "oracle.pt", weights_only=False)["states"][tag]["full"]
    engine = pipeline_jobs.make(setup)
    pipeline_jobs.train(engine, trained)
    found: dict[str, Any] = {"error": "", "notes": ()}
    try:
        report = ucp.load(engine, folder, **options)
    except ucp.UcpError as error:
        close(engine)
        return {**found, "error": f"{type(error).__name__}: {error}"}
    have = canonical(engine)["full"]
    masters = {key: value for key, value in want.items() if key[1] == "fp32"}
    found["masters"] = [
        f"{key}" for key, value in masters.items() if not torch.equal(have[key], value)
    ]
    found["compared"] = len(masters)
    found["states"] = sorted({state for _, state in have})
    found["notes"], found["read_bytes"] = report.notes, report.read_bytes
    found["loss"] = pipeline_jobs.train(engine, 1)[0]
    close(engine)
    return found
