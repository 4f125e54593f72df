"""What the ranks do in the tests of savers beside each other."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core.manifest import RUN, TAG
from megatron_ucp.formats import output_folder
from tests.engines.megatron_jobs import Mcore, arguments, close, make, train


def folders(folder: str) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
    dist.barrier()
    return found


def megatron_beside(setup: Mcore, folder: str) -> dict[str, Any]:
    """A tag that another saver holds is refused; the next ones are saved, and move DeepSpeed's
    pointer, which lies there."""
    engine, out = make(setup), dict[str, Any]()
    is_first = dist.get_rank() == 0
    train(engine, 1)
    with output_folder.begin(Path(folder), "iter_0000001") if is_first else nullcontext():
        dist.barrier()
        try:
            ucp.save(engine.handle, folder, arguments=arguments(engine))
        except ucp.UcpError as error:
            out["error"] = str(error)
        out["held"] = folders(folder)
    if is_first:
        (Path(folder) / "latest").write_text("global_step9")
    for step in (1, 2):
        train(engine, 1, first=step)
        ucp.save(engine.handle, folder, arguments=arguments(engine))
    out["left"] = folders(folder)
    names = ("latest", "latest_checkpointed_iteration.txt")
    out["pointers"] = [(Path(folder) / name).read_text() for name in names]
    close(engine)
    again = make(setup)
    ucp.load(again.handle, folder)
    train(again, 1, first=3)
    ucp.save(again.handle, folder, arguments=arguments(again))
    runs = [output_folder.manifest_of(Path(folder) / tag).run for tag in folders(folder)]
    out["run"] = [one[TAG] for one in runs], len({one[RUN] for one in runs})
    close(again)
    return out
