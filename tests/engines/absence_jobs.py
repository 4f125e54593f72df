"""What the ranks do in the test of the law of absence: one engine loads what is left of a save."""

from typing import Any

import megatron_ucp as ucp
from tests.engines.kinds import Kind, kind_of, oracle_of

EXACT = "exact"


def loads(setup: Any, oracle: str, tags: list[str]) -> list[str]:
    """Loads each tag folder into one engine, which has other values before: `EXACT` where it has
    what the engine had that saved, else what the load says."""
    kind, want = kind_of(setup), oracle_of(oracle)["states"]["trained"]
    with kind.known():
        engine = kind.make(setup)
        found = [_load(kind, engine, tag, want) for tag in tags]
        kind.close(engine)
    return found


def _load(kind: Kind, engine: Any, tag: str, want: dict[str, Any]) -> str:
    kind.fill(engine)
    if not kind.differences(want, kind.canonical(engine)):
        return "the engine had these values before the load: nothing is shown"
    try:
        ucp.load(engine, tag)
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    other = kind.differences(want, kind.canonical(engine))
    return f"other values: {other[:3]}" if other else EXACT
