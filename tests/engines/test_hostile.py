"""Every hostile checkpoint through `engine.load_checkpoint` on the mesh that wrote it: a named
error on every rank, nothing run, and an engine that is bit for bit as it was."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.engines.record import record_of
from tests.engines.canonical import canonical, differences
from tests.engines.model import Setup, make_engine, train
from tests.engines.sources import PLAIN, Sources
from tests.formats.hostile import ROWS, bounded, make


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


pytestmark = pytest.mark.ranks
MEMORY_BYTES, TIME_S = 2 * 2**30, 10.0
LOADED = [name for name, row in ROWS.items() if "load" in row.sees]


@pytest.fixture(scope="module")
def results(
    sources: Sources, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Path]:
    """What every rank found, from one job, and the mark that nothing may make."""
    root, good = tmp_path_factory.mktemp("hostile"), Path(sources.get(2, PLAIN))
    mark = root / "mark"
    folders = [
        str(make(name, good, root / str(number), f"touch {mark}"))
        for number, name in enumerate(LOADED)
    ]
    try:
        return sources.ranks.run(
            2,
            load_all,
            Setup(1, "bf16", seed=9),
            folders,
            str(good),
            MEMORY_BYTES,
            timeout_s=300,
        ), mark
    finally:
        for folder in folders:
            shutil.rmtree(folder)


@pytest.mark.cases()  # of one job
@pytest.mark.parametrize("number", range(len(LOADED)), ids=LOADED)
def test_a_hostile_checkpoint_is_refused(
    results: tuple[list[dict[str, Any]], Path], number: int
) -> None:
    ranks, mark = results
    row = ROWS[LOADED[number]]
    for rank in ranks:
        found = rank["found"][number]
        assert found["named"], f"{found['error']}: {found['message']}"
        assert row.says in found["message"] and "what to do:" in found["message"], found["message"]
        assert "MemoryError" not in found["message"], found["message"]
        assert found["unchanged"] and found["seconds"] < TIME_S, found
    assert not mark.exists()


def test_the_engine_loads_a_good_one_afterwards(results: tuple[list[dict[str, Any]], Path]) -> None:
    """Negative control: the same call fills the engine, and the comparison sees it."""
    for rank in results[0]:
        assert rank["changed by a good load"] and rank["steps after"]
