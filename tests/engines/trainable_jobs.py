"""What the ranks do where other parameters are trained than in the checkpoint."""

from typing import Any

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.model import Setup, make_engine, train


def go_on(setup: Setup, folder: str, first: int, **options: Any) -> dict[str, Any]:
    """Canonical states before the load, after it, and after one more step; or the error."""
    engine = make_engine(setup)
    before = canonical(engine)
    try:
        report = ucp.load(engine, folder, tag="trained", **options)
    except ucp.UcpError as error:
        unchanged = differences(before, canonical(engine)) == []
        engine.destroy()
        return {"error": f"{type(error).__name__}: {error}", "unchanged": unchanged}
    found = {"before": before, "after": canonical(engine), "notes": report.notes}
    train(engine, 1, first)
    found["stepped"] = canonical(engine)
    engine.destroy()
    return found
