"""Exports of tensors that the source stores transposed: whatever a window holds of them, and
however many threads there are, the file is the same."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError, InexactError, SaveError
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.file_layout import TiledRows
from megatron_ucp.formats.output_folder import OutFile
from megatron_ucp.formats.pt.reader import PtFile
from megatron_ucp.reshard import files
from megatron_ucp.reshard import folder as folder_sink
from megatron_ucp.reshard.hugging_face import export
from tests.formats.test_pt_file import flip
from tests.reshard import paper, twins
from tests.reshard.test_export import digests
from tests.reshard.test_export_edges import with_values


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return paper.write(twins.model("gpt"), tmp_path_factory.mktemp("gpt") / "step7")


def windows(
    monkeypatch: pytest.MonkeyPatch, threads: int, size_bytes: int
) -> list[tuple[str, int, int]]:
    """From here on exports have so many threads, and windows of that size. The returned list gets
    what is written in tiles: (tensor, runs of its rows, tiles of each) in turn."""
    seen: list[tuple[str, int, int]] = []
    for module in (export, files, folder_sink):
        monkeypatch.setattr(module, "THREADS", threads)
    monkeypatch.setattr(export, "WIDE_WINDOW_BYTES", size_bytes)
    tiles = export.Outgoing._tiles

    def noted(out: Any, one: Any, *more: Any) -> list[TiledRows]:
        runs = [*tiles(out, one, *more)]
        seen.append((one.name, len(runs), len(runs[0].tiles)))
        return runs

    monkeypatch.setattr(export.Outgoing, "_tiles", noted)
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # copies, and masters
@pytest.mark.parametrize("threads", [1, 2, 3, 20])
def test_the_bytes_do_not_depend_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, threads: int, dtype: str
) -> None:
    cut = tmp_path / "cut" / "tag"
    ucp.convert(source, cut, target=Target(ucp.Mesh(tp=2, dp=3, zero=1)))
    ucp.export_hf(source, tmp_path / "whole", dtype=dtype)
    names, most = set[str](), 0
    for size_bytes in (48, 200, 1000):
        seen = windows(monkeypatch, threads, size_bytes)
        for number, one in enumerate((source, cut)):
            out = tmp_path / f"out{size_bytes}_{number}"
            ucp.export_hf(one, out, dtype=dtype, verify=True)
            assert digests(out) == digests(tmp_path / "whole")
        assert max(tiles for _, _, tiles in seen) == threads
        names |= {name.split(".", 3)[-1] for name, _, _ in seen}
        most = max(most, *(runs for _, runs, _ in seen))
    assert names == {
        f"{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert most > 1, "a tensor in several runs of rows"


def test_a_tile_in_a_wrong_place_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    windows(monkeypatch, 2, 200)
    write = OutFile.write_joined

    def swapped(out: OutFile, pieces: Sequence[memoryview], place: int) -> None:
        write(out, [*reversed(pieces)], place)

    monkeypatch.setattr(OutFile, "write_joined", swapped)
    with pytest.raises(SaveError, match="read back"):
        ucp.export_hf(source, tmp_path / "out", verify=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_flipped_bit_of_what_is_turned_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, dtype: str
) -> None:
    windows(monkeypatch, 2, 200)
    folder = tmp_path / "damaged" / "step7"
    shutil.copytree(source, folder)
    for path in sorted(folder.glob("*.pt")):
        with PtFile(path) as file:
            record = max(file.records.values(), key=lambda one: one.size_bytes)
        flip(path, record.offset_bytes + record.size_bytes // 2)
    with pytest.raises(DamagedFileError, match="CRC-32"):
        ucp.export_hf(folder, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_values_that_the_dtype_can_not_hold_are_counted_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"decoder.layers.{layer}.mlp.linear_fc{layer + 1}.weight" for layer in (0, 1)]
    model = with_values(twins.model("gpt"), dict.fromkeys(names, 1e5))
    source = paper.write(model, tmp_path / "source" / "step7")
    found: set[str] = set()
    for size_bytes in (2**20, 200, 48):
        windows(monkeypatch, 2, size_bytes)
        with pytest.raises(InexactError, match=r"c_fc\.weight: 1; .*c_proj\.weight: 1") as raised:
            ucp.export_hf(source, tmp_path / "out", dtype="float16")
        found.add(str(raised.value))
    assert len(found) == 1
