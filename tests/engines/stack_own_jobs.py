"""What the ranks do in the tests of values that differ from rank to rank, and of exports from
memory, in megatron-core's own stack."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.stack_jobs import Mcore, close, make, train, write
from tests.engines.stack_states import biases


def own_buffers(setup: Mcore, folder: str) -> dict[str, Any]:
    """Buffers that differ from rank to rank: saved, and loaded on the same mesh; what is refused
    before the save; the error of a group's value that no file holds."""
    engine = make(setup)
    train(engine, 1)
    for value in biases(engine).values():
        value += dist.get_rank()
    want = {name: value.tolist() for name, value in biases(engine).items()}
    ucp.save(engine.handle, folder)
    for value in biases(engine).values():
        value.zero_()
    report = ucp.load(engine.handle, folder)
    have = {name: value.tolist() for name, value in biases(engine).items()}
    engine.handle.optimizer.chained_optimizers[0].optimizer.param_groups[0]["mine"] = object()
    said = ""
    try:
        ucp.save(engine.handle, folder)
    except ucp.UcpError as error:
        said = f"{type(error).__name__}: {error}"
    close(engine)
    return {"same": want == have, "want": want, "notes": list(report.notes), "error": said}


def load_own_buffers(setup: Mcore, folder: str, **options: Any) -> str:
    engine = make(setup)
    try:
        notes = ucp.load(engine.handle, folder, **options).notes
        return "\n".join(notes)
    except ucp.UcpError as error:
        return f"error: {error}"
    finally:
        close(engine)


def export_in_place(setup: Mcore, folder: str) -> list[tuple[int, ...]]:
    """Exports the weights from memory, and those of a save; where each master lies before the
    export, and after it."""
    from megatron_ucp.engines.megatron.engine.inner import inner_optimizers, pieces_of

    engine = make(setup)
    train(engine, 1)
    inners = inner_optimizers(engine.optimizer)
    masters = [piece.master for inner in inners for piece in pieces_of(inner)]
    found = [tuple(master.data_ptr() for master in masters)]
    engine.handle.ucp.export_hf(f"{folder}/live", "float32")
    found.append(tuple(master.data_ptr() for master in masters))
    write(engine, Path(folder) / "saved", "ours")
    close(engine)
    return found
