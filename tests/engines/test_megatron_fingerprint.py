"""The fingerprint of megatron-core's stack: from its memory, from its saves, the same in either
engine."""

import json
import struct
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from isal.isal_zlib import crc32

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME, FINGERPRINT
from tests.engines import megatron_fingerprint_jobs
from tests.engines.cross_jobs import Zero
from tests.engines.megatron_jobs import Mcore
from tests.engines.test_megatron_background import ENGINES, SMALL
from tests.engines.test_megatron_pairs import CONSTANT, MOE, show
from tests.ranks import RankPool

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
    for found in ranks.run(world, megatron_fingerprint_jobs.saved, setup, str(tmp_path), way):
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
    want = ranks.run(own, megatron_fingerprint_jobs.saved, setup, str(tmp_path))[0]["own"]
    for found, before in ranks.run(world, megatron_fingerprint_jobs.loaded, target, str(tmp_path)):
        assert found.table == want.table
        assert before > 10, "the engine was equal before the load"


def test_the_smallest_fault_changes_it(ranks: RankPool) -> None:
    states = {
        "one bit": "mlp.linear_fc1.weight (fp32)",
        "two elements swapped": "mlp.linear_fc1.weight (exp_avg)",
    }
    (found,) = ranks.run(
        1, megatron_fingerprint_jobs.changed_by, SMALL, [*states, "one group's weight decay"]
    )
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
    ranks.run(2, megatron_fingerprint_jobs.saved, setup, str(tmp_path))
    flip(tmp_path, f"{stored}embedding.word_embeddings.weight")
    for said in ranks.run(2, megatron_fingerprint_jobs.refused, target, str(tmp_path)):
        assert said.startswith("ForeignFileError"), said
        assert f"embedding.word_embeddings.weight ({state})" in said
        assert "CRC-32 of float32" in said
    with pytest.raises(ucp.ForeignFileError, match="is not what was saved"):
        ucp.fingerprint(tmp_path)
    (tag,) = tmp_path.glob("iter_*")
    said = json.loads((tag / FILE_NAME).read_text())
    del said["run"][FINGERPRINT]
    (tag / FILE_NAME).write_text(json.dumps(said))
    assert ranks.run(2, megatron_fingerprint_jobs.refused, target, str(tmp_path)) == ["", ""], (
        "nothing else sees it"
    )


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
    for found in ranks.run(2, megatron_fingerprint_jobs.diverged, setup, param, str(tmp_path)):
        assert found["alike"] == ()
        (said,) = found["notes"]
        assert "copies of one parameter differ between ranks" in said and param in said
        assert found["error"].startswith("ForeignFileError") and param in found["error"]
        assert param in found["recorded"], "the files hold one of them"
