"""What the ranks do in the tests of forecasts: a load whose agreements, files and bytes are
counted."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed import optimizer
from megatron_ucp.formats.folder import LocalFile
from megatron_ucp.reshard.messages import Ranks
from tests.engines.kinds import kind_of


def counted(setup: Any, folder: str) -> dict[str, Any]:
    """Of one load: how often ranks agreed in which way, the bytes that this one received for that,
    the files of the checkpoint that it opened, and the bytes that it read of states."""
    engine, calls, files = kind_of(setup).make(setup), Counter[str](), set[str]()
    received = [0]
    ways = {name: getattr(Ranks, name) for name in ("lowest", "agreed", "delivered")}
    subclasses = [one for one in _below(Ranks) if "move" in vars(one)]
    moves = {one: one.move for one in subclasses}
    opens = LocalFile.__init__

    def named(name: str) -> Any:
        def call(self: Ranks, *args: Any) -> Any:
            calls[name] += 1
            return ways[name](self, *args)

        return call

    def moving(kind: Any) -> Any:
        def move(self: Ranks, sent: Any, sizes: Any) -> Any:
            received[0] += sum(sizes.values())
            return moves[kind](self, sent, sizes)

        return move

    def opening(self: LocalFile, path: Any) -> None:
        files.add(Path(path).name)
        opens(self, path)

    for kind in subclasses:
        kind.move = moving(kind)
    try:
        patched = {name: named(name) for name in ways}
        with (
            mock.patch.multiple(Ranks, **patched),
            mock.patch.object(LocalFile, "__init__", opening),
            # as between machines: no rank reads another one's weights
            mock.patch.object(optimizer, "exchange_partitions", lambda *_: False),
        ):
            report = ucp.load(engine, folder)
    finally:
        for kind in subclasses:
            kind.move = moves[kind]
    kind_of(setup).close(engine)
    return {
        "calls": dict(calls),
        "received": received[0],
        "files": sorted(files),
        "read_bytes": report.read_bytes,
    }


def _below(kind: Any) -> list[Any]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_below(sub))]
