"""The fingerprint of megatron-core's stack: from its memory, from its saves, the same in either
engine."""

import json
import struct
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from isal.isal_zlib import crc32

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME, FINGERPRINT
from tests.engines import cross_jobs, tensor_jobs
from tests.engines.cross_jobs import Zero
from tests.engines.kinds import attached
from tests.engines.megatron_jobs import Engine, Mcore, arguments, close, make, train
from tests.engines.megatron_states import held, numbered, plant_fault
from tests.engines.test_megatron_background import ENGINES, SMALL
from tests.engines.test_megatron_pairs import CONSTANT, MOE, show
from tests.ranks import RankPool


@contextmanager
def trained(setup: Mcore, steps: int) -> Any:
    """An engine of either kind: what this package handles, and what `megatron_states` takes."""
    if isinstance(setup, Zero):
        engine = cross_jobs.make(setup)
        tensor_jobs.train(engine, steps, first=90)
        yield engine, None
        tensor_jobs.close(engine)
    else:
        own = make(setup)
        train(own, steps, first=90)
        yield own.handle, own
        close(own)


def memory(engine: Engine) -> list[int]:
    """Where everything that the optimizer steps lies."""
    tensors = [t for one in held(engine) for t in (one[3], *one[4].values())]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def saved(setup: Mcore, folder: str, way: str = "direct") -> dict[str, Any]:
    """Fingerprints of an engine, and of the files of its save; what the first one moved."""
    engine = attached(setup, save="background") if way == "background" else make(setup)
    first = ucp.fingerprint(engine.handle)
    train(engine, 2)
    before = memory(engine)
    own = ucp.fingerprint(engine.handle)
    moved = before != memory(engine)
    ucp.save(engine.handle, folder, arguments=arguments(engine))
    if way == "background":
        train(engine, 1, first=2)
        ucp.wait(engine.handle)
    notes = ucp.report(engine.handle).save.notes
    dist.barrier()
    files = ucp.fingerprint(folder)
    close(engine)
    states = sorted({state for kept in first.table.values() for state in kept})
    return {"own": own, "files": files, "moved": moved, "notes": notes, "first": states}


def loaded(setup: Mcore, folder: str) -> list[Any]:
    """The fingerprint of an engine that loaded a save, and how far it was from it."""
    with trained(replace(setup, seed=9), 1) as (handle, _):
        before = ucp.fingerprint(handle)
        ucp.load(handle, folder, load_lr_scheduler_states=False)
        after = ucp.fingerprint(handle)
    return [after, len(before.differences(after))]


def refused(setup: Mcore, folder: str) -> str:
    with trained(setup, 1) as (handle, _):
        try:
            ucp.load(handle, folder, load_lr_scheduler_states=False)
        except ucp.UcpError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def changed_by(setup: Mcore, faults: list[str]) -> dict[str, list[str]]:
    """What a fault of each kind changes."""
    out: dict[str, list[str]] = {}
    with trained(setup, 2) as (handle, engine):
        before = ucp.fingerprint(handle)
        for fault in faults:
            plant_fault(engine, fault)
            after = ucp.fingerprint(handle)
            out[fault], before = before.differences(after), after
    return out


def diverged(setup: Mcore, param: str, folder: str) -> dict[str, Any]:
    """One bit of a copy of a parameter differs on the last rank: what a save says, and what the
    fingerprint of the engine is."""
    out: dict[str, Any] = {}
    with trained(setup, 2) as (handle, engine):
        names = numbered(engine)
        ucp.save(handle, folder, arguments=arguments(engine))
        out["alike"] = ucp.report(handle).save.notes
        for held_param, _, _, master, _, _ in held(engine):
            if dist.get_rank() == dist.get_world_size() - 1 and names[held_param] == param:
                master.view(torch.int32).view(-1)[1] ^= 1
        ucp.save(handle, f"{folder}/apart", arguments=arguments(engine))
        out["notes"] = ucp.report(handle).save.notes
        try:
            ucp.fingerprint(handle)
        except ucp.UcpError as error:
            out["error"] = f"{type(error).__name__}: {error}"
    out["recorded"] = sorted(ucp.fingerprint(Path(folder) / "apart").table)
    return out


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks


def recorded(folder: Path) -> Any:
    (tag,) = folder.glob("iter_*")
    return json.loads((tag / FILE_NAME).read_text())["run"][FINGERPRINT]


@pytest.mark.parametrize("way", ["direct", "background"])
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_files_and_manifest_have_one(
    ranks: RankPool, tmp_path: Path, engine: str, way: str
) -> None:
    """In the background of the moment of the call, and nothing in the engine moves."""
    world, setup = ENGINES[engine]
    for found in ranks.run(world, saved, setup, str(tmp_path), way):
        assert found["own"].differences(found["files"]) == []
        assert found["own"].digest == found["files"].digest
        assert found["own"].table == recorded(tmp_path) and len(found["own"].table) > 10
        assert not found["moved"]
        assert not [note for note in found["notes"] if "copies" in note]
        assert found["first"] in (["fp32"], ["fp32", "value"]), "before the first step"


TARGETS: list[tuple[str, int, Mcore]] = [
    ("dp4", 4, Mcore(tp=2, pp=2, **CONSTANT)),
    ("dp4", 2, Zero(zero=3)),
    ("dp4", 4, Zero(zero=1, tp=2)),
    ("dp4", 2, Zero(zero=0)),
    ("moe", 2, Zero(zero=2, **MOE)),
    ("plain", 4, Mcore("gpt", tied=True, pp=2, layers=2, dtype="bf16")),
]


@pytest.mark.parametrize(("source", "world", "target"), TARGETS, ids=show)
def test_whoever_loads_it_has_the_same(
    ranks: RankPool, tmp_path: Path, source: str, world: int, target: Mcore
) -> None:
    own, setup = ENGINES[source]
    want = ranks.run(own, saved, setup, str(tmp_path))[0]["own"]
    for found, before in ranks.run(world, loaded, target, str(tmp_path)):
        assert found.table == want.table
        assert before > 10, "the engine was equal before the load"


def test_the_smallest_fault_changes_it(ranks: RankPool) -> None:
    states = {
        "one bit": "mlp.linear_fc1.weight (fp32)",
        "two elements swapped": "mlp.linear_fc1.weight (exp_avg)",
    }
    (found,) = ranks.run(1, changed_by, SMALL, [*states, "one group's weight decay"])
    for fault, said in states.items():
        (changed,) = found[fault]
        assert changed.endswith(said)
    (first, *others) = found["one group's weight decay"]
    assert others and all(line.endswith("(steps or hyper-parameters)") for line in (first, *others))


def flip(folder: Path, key: str) -> None:
    """One bit of the first chunk of a tensor, and the checksum that the file has of it."""
    from torch.distributed.checkpoint import FileSystemReader

    (tag,) = folder.glob("iter_*")
    places = FileSystemReader(tag).read_metadata().storage_data
    place = min((i.offset, n) for n, (m, i) in enumerate(places.items()) if m.fqn == key)[1]
    place = [*places.values()][place]
    path = tag / place.relative_path
    whole = bytearray(path.read_bytes())
    archive = bytes(whole[place.offset : place.offset + place.length])
    with zipfile.ZipFile(BytesIO(archive)) as read:
        info = next(one for one in read.infolist() if one.filename.endswith("data/0"))
        data = read.read(info)
    at = archive.index(data)
    other = bytes([data[0] ^ 1]) + data[1:]
    old, new = (struct.pack("<I", crc32(one)) for one in (data, other))
    archive = archive[:at].replace(old, new) + other + archive[at + len(data) :].replace(old, new)
    with zipfile.ZipFile(BytesIO(archive)) as read:
        assert read.testzip() is None
    whole[place.offset : place.offset + place.length] = archive
    path.write_bytes(whole)


PLAIN = replace(SMALL, distributed=False)  # whose weights are the masters


@pytest.mark.parametrize("target", [Zero(zero=3, layers=2), replace(SMALL, tp=2)], ids=show)
@pytest.mark.parametrize(
    ("setup", "stored", "state"),
    [
        (SMALL, "optimizer.state.exp_avg.", "exp_avg"),
        (SMALL, "optimizer.state.exp_avg_sq.", "exp_avg_sq"),
        (PLAIN, "", "fp32"),
    ],
    ids=show,
)
def test_a_changed_file_with_checksums_of_its_own_is_named(
    ranks: RankPool, tmp_path: Path, setup: Mcore, stored: str, state: str, target: Mcore
) -> None:
    ranks.run(2, saved, setup, str(tmp_path))
    flip(tmp_path, f"{stored}embedding.word_embeddings.weight")
    for said in ranks.run(2, refused, target, str(tmp_path)):
        assert said.startswith("ForeignFileError"), said
        assert f"embedding.word_embeddings.weight ({state})" in said
        assert "CRC-32 of float32" in said
    with pytest.raises(ucp.ForeignFileError, match="is not what was saved"):
        ucp.fingerprint(tmp_path)
    (tag,) = tmp_path.glob("iter_*")
    said = json.loads((tag / FILE_NAME).read_text())
    del said["run"][FINGERPRINT]
    (tag / FILE_NAME).write_text(json.dumps(said))
    assert ranks.run(2, refused, target, str(tmp_path)) == ["", ""], "nothing else sees it"


@pytest.mark.parametrize(
    ("setup", "param"),
    [
        (Mcore(tp=2, layers=2), "decoder.final_layernorm.weight"),
        (Mcore("gpt", tied=True, pp=2, layers=2), "embedding.word_embeddings.weight"),
    ],
    ids=show,
)
def test_copies_that_differ_are_said(
    ranks: RankPool, tmp_path: Path, setup: Mcore, param: str
) -> None:
    for found in ranks.run(2, diverged, setup, param, str(tmp_path)):
        assert found["alike"] == ()
        (said,) = found["notes"]
        assert "copies of one parameter differ between ranks" in said and param in said
        assert found["error"].startswith("ForeignFileError") and param in found["error"]
        assert param in found["recorded"], "the files hold one of them"
