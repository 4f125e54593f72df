"""What the ranks do in the tests of values that differ from rank to rank, and of exports from
memory, in megatron-core's own stack."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.kinds import refusal_of
from tests.engines.megatron_jobs import Engine, Mcore, close, make, train, write
from tests.engines.megatron_states import biases, canonical, compare


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
    said = refusal_of(lambda: ucp.save(engine.handle, folder))
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
    from megatron_ucp.engines.megatron.optimizer import inner_optimizers, pieces_of

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


def regrouped(setup: Mcore, folder: str) -> tuple[list[str], list[str]]:
    """What differs after a load of a run whose groups another program made, into an engine that
    was built so too; and the notes."""
    engine = _with_swapped_decays(setup)
    train(engine, 2)
    ucp.save(engine.handle, folder)
    want = canonical(engine)
    close(engine)
    engine = _with_swapped_decays(replace(setup, seed=5))
    train(engine, 1, first=9)
    report = ucp.load(engine.handle, folder)
    found = compare(want, canonical(engine))
    close(engine)
    return found, [note for note in report.notes if "weight_decay" in note]


def _with_swapped_decays(setup: Mcore) -> Engine:
    """Matrices have no weight decay, norms have one."""
    engine = make(setup)
    (inner,) = engine.optimizer.chained_optimizers
    one, other = inner.optimizer.param_groups
    one["wd_mult"], other["wd_mult"] = other["wd_mult"], one["wd_mult"]
    return engine
