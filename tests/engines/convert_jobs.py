"""What the ranks do with converted checkpoints: stock DeepSpeed loads them, and the state is
compared with the source's run."""

from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines import pipeline_jobs, tensor_jobs
from tests.engines.canonical import canonical, differences
from tests.engines.model import Setup, make_engine
from tests.engines.pipeline_jobs import Staged


def make(setup: Any, attach: bool, universal: bool = False) -> Any:
    """An engine of any kind of setup; `universal`: with stock's key for universal folders."""
    import deepspeed

    plain = deepspeed.initialize

    def initialize(*args: Any, config: dict[str, Any], **kwargs: Any) -> Any:
        return plain(
            *args,
            config={**config, **({"checkpoint": {"load_universal": True}} if universal else {})},
            **kwargs,
        )

    deepspeed.initialize = initialize
    try:
        if isinstance(setup, Setup):
            return make_engine(setup, attach)
        return (pipeline_jobs if isinstance(setup, Staged) else tensor_jobs).make(setup, attach)
    finally:
        deepspeed.initialize = plain


def close(engine: Any, setup: Any) -> None:
    if isinstance(setup, Setup):
        engine.destroy()
    else:
        tensor_jobs.close(engine)


def stock_load(
    setup: Any,
    converted: str,
    oracle: str,
    tag: str = "filled",
    universal: bool = False,
    same_dtype: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Stock DeepSpeed's own load of a converted folder into an engine that knows nothing of the
    package."""
    want = torch.load(Path(oracle) / "oracle.pt", weights_only=False)["states"][tag]
    engine = make(setup, attach=False, universal=universal)
    before = differences(want, canonical(engine), same_dtype)
    folder = Path(converted)
    path, client_state = engine.load_checkpoint(str(folder.parent), tag=folder.name, **options)
    have = canonical(engine)
    found = {
        "loaded": path is not None,
        "before": before,
        "differences": differences(want, have, same_dtype),
        "client_state": {key: client_state.get(key) for key in ("note", "data")}
        if client_state
        else {},
    }
    close(engine, setup)
    return found


def our_load(
    setup: Any,
    folder: str,
    oracle: str,
    tag: str = "filled",
    same_dtype: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Our load of a folder of any format."""
    want = torch.load(Path(oracle) / "oracle.pt", weights_only=False)["states"][tag]
    engine = make(setup, attach=True)
    before = differences(want, canonical(engine), same_dtype)
    report = ucp.load(engine, folder, **options)
    found = {
        "before": before,
        "differences": differences(want, canonical(engine), same_dtype),
        "notes": report.notes,
    }
    close(engine, setup)
    return found
