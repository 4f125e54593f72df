"""What the ranks do in the tests of Megatron-LM's older files."""

from pathlib import Path

import megatron_ucp as ucp
from tests.engines.megatron_jobs import Mcore, close, legacy_save, make, train


def by_stock(setup: Mcore, folder: str) -> None:
    engine = make(setup)
    train(engine, 2)
    legacy_save(engine, Path(folder) / "iter_0000002")
    close(engine)


def load_refused(setup: Mcore, folder: str) -> str:
    engine = make(setup)
    train(engine, 1, first=9)
    try:
        ucp.load(engine.handle, folder)
        return ""
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close(engine)
