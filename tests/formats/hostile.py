"""Hostile checkpoints, as data: what an attacker does to a good one. All are built here; no file of
theirs is kept.

A row gets the folder of a good tag that two ranks wrote at ZeRO-1, without a manifest unless it
says otherwise, and a shell command that makes a file (the mark). Nothing may ever run the command.
A row must be refused by everything that reads what it spoils: `sees` names the verbs that do, of
which `inspect` reads least.
"""

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.formats.craft import (
    number,
    text,
)
from tests.formats.hostile_changes import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Hostile,
    plant,
    planted,
)
from tests.formats.hostile_files import MANIFESTS, PLACES, POINTERS, ZIPS
from tests.formats.hostile_pickles import BOMBS, RUNS, TENSORS, doubled

SHAPELESS = {"a list of lists": b"](]]e", "a number": number(7), "a text": text("x")}
KEYS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "ds_config",
    "lr_scheduler",
    "global_steps",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_version",
)

ROWS: dict[str, Hostile] = {
    **{
        f"pickle: {name}": Hostile(planted(value), says=MODEL)
        for name, value in (RUNS | BOMBS | TENSORS).items()
    },
    **{
        f"optimizer's pickle: {name}": Hostile(planted(RUNS[name], OPTIMIZER), says=OPTIMIZER)
        for name in ("os.system by REDUCE", "Popen by NEWOBJ", "os.system by INST")
    },
    **{
        f"{key}: {what}": Hostile(planted(value, key=key))
        for key in KEYS
        for what, value in {"doubled tuples in a list": lambda _: b"]" + doubled() + b"a"}.items()
    },
    **{
        f"{key}: 2**24": Hostile(planted(lambda _: number(2**24), key=key))
        for key in ("dp_world_size", "mp_world_size")
    },
    "dp_world_size and mp_world_size: 2**24": Hostile(
        lambda folder, _: [
            plant(folder / MODEL, number(2**24), key) for key in ("dp_world_size", "mp_world_size")
        ]
    ),
    **{
        f"{key}: {what}": Hostile(planted(lambda _, value=value: value, key=key))
        for key in ("module", "param_shapes", "frozen_param_shapes")
        for what, value in SHAPELESS.items()
    },
    **{f"zip: {name}": row for name, row in ZIPS.items()},
    **{f"manifest: {name}": row for name, row in MANIFESTS.items()},
    **{f"place: {name}": row for name, row in PLACES.items()},
    **{f"pointer: {name}": row for name, row in POINTERS.items()},
}


def make(name: str, good: Path, folder: Path, command: str) -> Path:
    """A copy of the good checkpoint, with the attack of that row; returns its folder. `good` has
    the tag `filled`."""
    row = ROWS[name]
    shutil.copytree(good, folder, ignore=shutil.ignore_patterns("trained", "oracle.pt", "*.py"))
    (folder / "latest").write_text("filled")
    if not row.manifest:
        (folder / "filled" / MANIFEST).unlink()
    row.make(folder / "filled", command)
    return folder


@contextlib.contextmanager
def bounded(more_bytes: int) -> Iterator[None]:
    """Lets this process take at most so much more memory: what asks for more gets a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
