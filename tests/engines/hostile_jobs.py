"""Hostile checkpoints, one after the other, into one engine."""

import time
from typing import Any

import megatron_ucp as ucp
from megatron_ucp.engines.record import record_of
from tests.engines.canonical import canonical, differences
from tests.engines.model import Setup, make_engine, train
from tests.formats.hostile import bounded


def load_all(setup: Setup, folders: list[str], good: str, memory_bytes: int) -> dict[str, Any]:
    """What `engine.load_checkpoint` says to each folder, and whether the engine is bit for bit as
    before; a good load after."""
    engine = make_engine(setup)
    train(engine, 1)
    first = before = canonical(engine)
    found: list[dict[str, Any]] = []
    for folder in folders:
        started = time.process_time()
        out: dict[str, Any] = {"error": "", "named": False, "message": ""}
        with bounded(memory_bytes):
            try:
                engine.load_checkpoint(folder)
            except Exception as error:
                out = {
                    "error": type(error).__name__,
                    "named": isinstance(error, ucp.UcpError),
                    "message": str(error),
                }
        out["seconds"] = time.process_time() - started
        out["marked"] = bool(record_of(engine).broken)
        out["unchanged"] = not out["marked"] and differences(before, canonical(engine)) == []
        found.append(out)
        if not out["unchanged"]:  # the next ones are compared with a whole engine
            engine.load_checkpoint(good)
            before = canonical(engine)
    engine.load_checkpoint(good)
    loaded = canonical(engine)
    train(engine, 1)
    moved = differences(loaded, canonical(engine)) != []
    engine.destroy()
    return {
        "found": found,
        "changed by a good load": differences(first, loaded) != [],
        "steps after": moved,
    }
