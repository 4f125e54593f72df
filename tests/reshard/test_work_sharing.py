"""Conversions and exports that several ranks share write the bytes that one process writes, or
nothing that counts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.names import VALUE
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.file_layout import FileLayout, FilePiece
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard.folder import share_of
from tests.ranks import RankPool
from tests.reshard import paper, twins, work_sharing_jobs
from tests.reshard.converted import digest

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("convert", {"mesh": "tp=2,dp=3,zero=1"}),
    "native ZeRO-3": ("convert", {"mesh": "dp=3,zero=3"}),
    "universal": ("convert", {"to": "universal", "latest": True}),
    "torch_dist": ("convert", {"to": "torch_dist"}),
    "export": ("export", {"dtype": "bf16"}),
    "export in files": ("export", {"dtype": "float32", "max_shard_size": 3000, "verify": True}),
    "import": ("import", {"mesh": "tp=2,dp=2,zero=1", "padded_vocab": 48}),
}
ALONE = {"convert": ucp.convert, "export": ucp.export_hf, "import": ucp.import_hf}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A llama on tp=2, dp=2, ZeRO-1 as DeepSpeed's files, and as a folder of Hugging Face."""
    home = tmp_path_factory.mktemp("sources")
    first = paper.write(twins.model("llama"), home / "first" / "step7")
    ucp.convert(first, home / "runs" / "step7", mesh="tp=2,dp=2,zero=1")
    ucp.export_hf(first, home / "hf")
    return {
        "convert": home / "runs" / "step7",
        "export": home / "runs" / "step7",
        "import": home / "hf",
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_same_bytes_as_by_one_process(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path, way: str, world: int
) -> None:
    what, options = WAYS[way]
    source = str(folders[what])
    one = ALONE[what](source, tmp_path / "one" / "step7", **options)
    output = tmp_path / "several" / "step7"
    found = ranks.run(world, work_sharing_jobs.call, what, source, str(output), **options)
    assert digest(tmp_path / "several") == digest(tmp_path / "one")
    assert sorted(tmp_path.glob("several/.*")) == []
    # every rank says the same: what all of them did
    assert len({str((rank["done"], rank["pointer"])) for rank in found}) == 1
    assert found[0]["done"]["written_bytes"] == one.written_bytes
    assert found[0]["done"]["files"] == one.files
    # the work was shared, and none of it done twice
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    each = [rank["written"] for rank in found]
    assert all(each) and one.written_bytes <= sum(each) <= size
    path = max(output.rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert digest(tmp_path / "several") != digest(tmp_path / "one")


def test_rank_0_alone_needs_no_others(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Without the option a process group changes nothing."""
    output = str(tmp_path / "alone")
    assert ranks.run(2, work_sharing_jobs.by_rank_0, str(folders["convert"]), output)[0]


def _piece(size: int, place: int) -> FilePiece:
    return FilePiece(0, Slot(0, (), 0, VALUE), size // 4, "float32", place)


def test_files_are_shared_by_bytes() -> None:
    """Largest first to whoever has least; a file without checksums in pieces, each once."""
    sums = lambda _: ()  # noqa: E731
    sizes = [400, 80, 800, 120, 400]
    files = [
        FileLayout(str(n), size, [_piece(size, 0)], around=sums) for n, size in enumerate(sizes)
    ]
    shares = [share_of(files, rank, 2) for rank in range(2)]
    assert [[one.name for one in share] for share in shares] == [["2", "3"], ["0", "1", "4"]]
    large = 64 * 2**20
    pieces = [_piece(large, number * large) for number in range(7)]
    header = [(7 * large, lambda: b"header")]
    one = [FileLayout("model.safetensors", 7 * large + 6, pieces, header)]
    shares = [share_of(one, rank, 3) for rank in range(3)]
    given = [piece.place for share in shares for part in share for piece in part.pieces]
    assert sorted(given) == [piece.place for piece in pieces]
    assert [sum(len(part.pieces) for part in share) for share in shares] == [3, 2, 2]
    assert sum(len(part.blobs) for share in shares for part in share) == 1
    assert share_of(one, 0, 1) == one


def test_a_damaged_record_is_an_error_on_all(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = tmp_path / "runs" / "step7"
    shutil.copytree(folders["convert"], source)
    name = sorted(path.name for path in source.glob("*zero_pp_rank_1*optim_states.pt"))[-1]
    with PtFile(source / name) as file:
        tree: Any = file.tree
        (master, *_) = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        at = file.record(master.storage).offset_bytes + 7
    data = bytearray((source / name).read_bytes())
    data[at] ^= 1
    (source / name).write_bytes(data)
    for number, (way, (what, options)) in enumerate(WAYS.items()):
        if what == "import" or way == "export":  # which read no optimizer states
            continue
        output = tmp_path / "out" / str(number)
        found = ranks.run(3, work_sharing_jobs.call, what, str(source), str(output), **options)
        for rank in found:
            assert "DamagedFileError: " in rank["error"], (way, rank)
            assert name in rank["error"]
        assert list((tmp_path / "out").iterdir()) == [], way


def test_a_full_disk_of_one_rank_is_an_error_on_all(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    output = tmp_path / "out" / "step7"
    found = ranks.run(3, work_sharing_jobs.full, str(folders["convert"]), str(output))
    assert all("SaveError: the output could not be written" in one for one in found)
    assert all("No space left on device" in one for one in found)
    assert "(on rank 2)" in found[0] and list((tmp_path / "out").iterdir()) == []


def test_ranks_that_ask_for_different_things(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    """They are told which, on each rank; so is a flag that only one of them has wrong."""
    source, same = str(folders["convert"]), [str(tmp_path / "out" / "step7")] * 2
    cases = [
        ("mesh", same, [{"mesh": "dp=2,zero=1"}, {"mesh": "dp=3,zero=1"}]),
        ("dst", [same[0], str(tmp_path / "out" / "other")], [{"to": "universal"}] * 2),
        ("there is no such format", same, [{"to": "universal"}, {"to": "universall"}]),
    ]
    for word, outputs, options in cases:
        found = ranks.run(2, work_sharing_jobs.otherwise, source, outputs, options)
        assert all("UsageError" in one and word in one for one in found), found
    assert not (tmp_path / "out").exists()
