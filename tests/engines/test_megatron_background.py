"""Saves of megatron-core's stack that go on beside training: byte for byte those of the same moment
that wait."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import kinds, megatron_background_jobs
from tests.engines.megatron_background_jobs import manifest
from tests.engines.megatron_jobs import Mcore
from tests.engines.test_megatron_pairs import BUCKETS, CONSTANT, MOE
from tests.engines.test_megatron_saves import MIXTURE
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
SMALL = Mcore(layers=2, **CONSTANT)
FUSED = replace(SMALL, adam="apex")  # counts steps in its groups
LATEST = "latest_checkpointed_iteration.txt"
ENGINES: dict[str, tuple[int, Mcore]] = {
    "dp4": (4, Mcore(**BUCKETS, **CONSTANT)),
    "tp2pp2vpp2": (4, Mcore("gpt", tied=True, tp=2, pp=2, vpp=2, dtype="bf16")),
    "fp16": (2, Mcore(dtype="fp16", layers=2)),
    "dropout": (2, Mcore(tp=2, dropout=0.2, layers=2)),
    "moe": (4, Mcore(ep=2, overlap=True, bucket=1000, **MOE)),
    "own buffers": (2, Mcore(**MIXTURE)),
    "plain": (2, Mcore("gpt", distributed=False, tied=True, tp=2, layers=2, dtype="bf16")),
}


def check_alike(folder: Path, latest: str = "2") -> int:
    """All files of both saves are the same, but when each was made; returns how many bytes."""
    (one,), (two,) = ([*(folder / way).glob("iter_*")] for way in ("direct", "background"))
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in two.iterdir()) and len(names) > 4
    assert (folder / "background" / LATEST).read_text() == latest
    assert manifest(one) == manifest(two)
    sizes = 0
    for name in names:
        if name != "ucp_manifest.json":
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
            sizes += (one / name).stat().st_size
    return sizes


@pytest.mark.parametrize("engine", ENGINES)
def test_the_files_are_those_of_a_save_that_waits(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    world, setup = ENGINES[engine]
    found = ranks.run(world, megatron_background_jobs.saved_both_ways, setup, str(tmp_path))
    assert check_alike(tmp_path) > 10_000
    assert not ucp.verify(tmp_path / "background", deep=True).findings
    for direct, background in found:
        assert direct.blocked_seconds == direct.seconds
        assert 0 < background.blocked_seconds < background.seconds
        assert direct.bytes_by_rank == background.bytes_by_rank
        assert sum(direct.bytes_by_rank) == direct.written_bytes == background.written_bytes
        assert all(direct.bytes_by_rank)


@pytest.mark.parametrize("room", [None, 30_000])
def test_what_finds_no_room_is_written_at_once(
    ranks: RankPool, tmp_path: Path, room: int | None
) -> None:
    options = {} if room is None else {"snapshot_bytes": room}
    ranks.run(2, megatron_background_jobs.saved_both_ways, SMALL, str(tmp_path), **options)
    check_alike(tmp_path)
    assert not ucp.verify(tmp_path / "background", deep=True).findings


@pytest.mark.parametrize("engine", ["dp4", "fp16", "own buffers", "plain"])
def test_ten_steps_before_the_writer_starts_change_nothing(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    world, setup = ENGINES[engine]
    for one in ranks.run(world, megatron_background_jobs.trained_on, setup, str(tmp_path)):
        assert one["found"] == [] and len(one["changed"]) > 5
    tree = torch.load(tmp_path / "iter_0000002" / "common.pt", weights_only=False)
    assert vars(tree["args"])["many"] == {"a": [1, 2]}


@pytest.mark.parametrize("plant", ["schedule", "elements"])
def test_what_is_left_out_of_the_snapshot_is_found(
    ranks: RankPool, tmp_path: Path, plant: str
) -> None:
    for one in ranks.run(2, megatron_background_jobs.trained_on, SMALL, str(tmp_path), plant):
        assert one["found"]
        assert any("scheduler" in line for line in one["found"]) == (plant == "schedule")


@pytest.mark.parametrize("way", ["direct", "background"])
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize("setup", [SMALL, FUSED], ids=["torch", "apex"])
def test_a_step_amid_the_taking_is_named(
    ranks: RankPool, tmp_path: Path, setup: Mcore, after: int, way: str
) -> None:
    """After the count of steps was taken, and with a part of the elements."""
    for found in ranks.run(
        2, megatron_background_jobs.torn, setup, str(tmp_path), way, after, True
    ):
        assert len(found["changed"]) > 5
        assert found["error"].startswith("SaveError: the optimizer stepped while"), found
        assert "'step': 2.0}, as when" in found["error"] and "'step': 3.0}" in found["error"]
        assert found["left"] == [] == found["whole"]


@pytest.mark.parametrize(
    ("setup", "after", "said"),
    [
        (SMALL, 0, ""),
        (replace(SMALL, distributed=False, tp=2), 5, ""),
        (SMALL, 5, "masters of parameters"),
    ],
    ids=["after the count", "one copy of the weights", "two copies"],
)
def test_what_else_sees_a_step_amid_the_taking(
    ranks: RankPool, tmp_path: Path, setup: Mcore, after: int, said: str
) -> None:
    """The fingerprint fits what was taken: it is summed from that. A load finds masters and weights
    of two steps where the files hold both, and else is content with a state that never was."""
    for found in ranks.run(
        2, megatron_background_jobs.torn, setup, str(tmp_path), "background", after, False
    ):
        assert found["error"] == "" and found["found"] and found["later"]
        errors = [line for line in found["found"] + found["later"] if "Error" in line]
        assert len(errors) == (2 if said else 0) and all(said in line for line in errors)
    findings = ucp.verify(tmp_path / "torn", deep=True).findings
    assert [one for one in findings if said in one.what] == [*findings]
    assert bool(findings) == bool(said)


@pytest.mark.parametrize("way", ["direct", "background"])
@pytest.mark.parametrize("engine", ["dp4", "tp2pp2vpp2", "plain"])
def test_later_saves_write_what_a_first_one_does(
    ranks: RankPool, tmp_path: Path, engine: str, way: str
) -> None:
    """Byte for byte what a handle writes that has saved nothing yet; of other values."""
    world, setup = ENGINES[engine]
    for found in ranks.run(world, megatron_background_jobs.saved_again, setup, str(tmp_path), way):
        assert found["differences"] == [] != found["before"]
    shutil.rmtree(tmp_path / "background" / "iter_0000001")
    shutil.rmtree(tmp_path / "background" / "iter_0000002")
    assert check_alike(tmp_path, "3") > 10_000


OTHERS = {
    "other buckets": replace(SMALL, overlap=True, bucket=2000),
    "other widths of the pipeline": replace(SMALL, pp=2),
    "whole optimizers": replace(SMALL, distributed=False),
    "weights in half precision": replace(SMALL, dtype="bf16"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_structure_is_saved_as_it_is(ranks: RankPool, tmp_path: Path, other: str) -> None:
    setup = OTHERS[other]
    target, job = replace(SMALL, dtype=setup.dtype), megatron_background_jobs.saved_as_another
    for found in ranks.run(2, job, SMALL, setup, str(tmp_path), load=target):
        assert found["differences"] == [] != found["before"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"save": "stock"}, "direct or background"),
        ({"save": "background", "busy": "later"}, "busy is none of its words"),
        ({"deadlin": 3}, "deadlin"),
        ({"save": "direct", "deadline": 3}, "deadline"),
    ],
    ids=str,
)
def test_options_are_checked(ranks: RankPool, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RanksFailed, match=f"UsageError(.|\\n)*{said}"):
        ranks.run(1, kinds.attached, SMALL, **options)
