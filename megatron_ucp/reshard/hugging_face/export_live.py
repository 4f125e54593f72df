"""A live engine as a folder of a Hugging Face model, from the memory of all ranks."""

import time
from functools import partial
from pathlib import Path

from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.hugging_face.beside import Beside
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.hugging_face.model_folder import Outgoing, publish
from megatron_ucp.reshard.match import replica_notes
from megatron_ucp.reshard.memories import Memories
from megatron_ucp.reshard.ranks_folder import RanksFolderSink
from megatron_ucp.reshard.transfer import TransferRun, transfer


def export_live(
    engine: Engine, out: Outgoing, folder: Path, beside: Beside, run: TransferRun
) -> Exported:
    """Writes the folder, whole or not at all. Collective; every rank sees the same disk. Raises a
    UcpError on every rank."""
    started, manifest = time.perf_counter(), engine.manifest
    source = Memories(str(folder), engine)
    output = out.output(source, beside, partial(publish, folder=folder))
    transfer(source, RanksFolderSink(folder, output), run=run)
    sizes = 0, run.done, time.perf_counter() - started
    notes = [*replica_notes(manifest), *beside.notes]
    return out.exported(folder, str(manifest.mesh), sizes, False, notes, "from memory")
