"""Bounds on what a small file may ask for: depth and sharing in a pickle, values in a manifest,
files that are none."""

import os
import time
from pathlib import Path

import pytest

from megatron_ucp.core import manifest_json
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.folder import LocalFile, LocalFolder
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.pt.unpickle import MAX_DEPTH, loads
from tests.formats.craft import number, pickle_of, storage, tensor, text, tuple_of
from tests.formats.hostile_pickles import doubled, doubled_lists


def levels(count: int, leaf: bytes = b")") -> bytes:
    return leaf + b"\x85" * (count - 1)


def test_depth() -> None:
    assert loads(pickle_of(levels(MAX_DEPTH)), file="x")
    with pytest.raises(DamagedFileError, match="nested too deeply"):
        loads(pickle_of(levels(MAX_DEPTH + 1)), file="x")
    twice = tuple_of(
        levels(60) + b"q\x00", b"h\x00" + b"\x85" * 60
    )  # seen first where it is not deep
    with pytest.raises(DamagedFileError, match="nested too deeply"):
        loads(pickle_of(twice), file="x")


@pytest.mark.parametrize(
    "value",
    [
        doubled(),
        doubled_lists(),
        b"("
        + text("x" * 10**6)
        + b"q\x00"
        + b"h\x00" * 1000
        + b"lq\x01"
        + b"0("
        + b"h\x01" * 1000
        + b"l",
    ],
    ids=["tuples", "lists", "texts"],
)
def test_sharing_without_end(value: bytes) -> None:
    started = time.process_time()
    with pytest.raises(DamagedFileError, match="shares its parts too often"):
        loads(pickle_of(value), file="x")
    assert time.process_time() - started < 5


def test_ordinary_sharing_is_allowed() -> None:
    """A list of 1,000 values under 1,000 names, and one that holds itself."""
    shared = b"](" + b"".join(number(n) for n in range(1000)) + b"eq\x00"
    value = loads(pickle_of(tuple_of(shared, *[b"h\x00"] * 999)), file="x")
    assert isinstance(value, tuple) and len(value) == 1000 and value[0] is value[999]
    itself = loads(pickle_of(b"]q\x00h\x00a"), file="x")
    assert isinstance(itself, list) and itself[0] is itself


def test_a_tensor_by_stride_0_is_no_larger_than_a_file_of_its_kind() -> None:
    small = loads(
        pickle_of(tensor(storage("0", 1), 0, tuple_of(number(1000)), tuple_of(number(0)))), file="x"
    )
    assert small.numel == 1000  # type: ignore[attr-defined]
    with pytest.raises(DamagedFileError, match="larger values"):
        loads(
            pickle_of(tensor(storage("0", 1), 0, tuple_of(number(10**9)), tuple_of(number(0)))),
            file="x",
        )


def test_values_of_a_manifest_are_counted_before_they_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit, value in (("MAX_VALUES", "[" + "0," * 20 + "0]"), ("MAX_BYTES", " " * 50)):
        with (
            monkeypatch.context() as patch,
            pytest.raises(DamagedFileError, match="can't be read") as caught,
        ):
            patch.setattr(manifest_json, limit, 10)
            from_json(value.encode(), "x")
        assert "are read" in str(caught.value)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(DamagedFileError, match="no regular file"):
        ManifestBeside(LocalFolder(tmp_path), [])
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / FILE_NAME, Path("/dev/zero"), Path("/dev/tty")):
        with pytest.raises(DamagedFileError):
            LocalFile(path)
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "x").write_text("text")
    with LocalFile(tmp_path / "x") as file:
        assert file.whole(4) == b"text"
        with pytest.raises(DamagedFileError, match="larger than any"):
            file.whole(3)
