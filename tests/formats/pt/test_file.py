"""Valid files: torch.load and Python's zipfile are the oracles; bytes are compared, not values."""

import hashlib
import io
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib

from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import DamagedFileError, UsageError
from megatron_ucp.formats.byte_files import Record
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import with_tensors
from tests.formats.craft import Entry, pickle_of, storage, watch, zip_end, zip_of


def rebuild(file: PtFile, ref: TensorRef) -> torch.Tensor:
    """The tensor, from the bytes of its storage's record."""
    buffer = bytearray(ref.storage.size_bytes)
    file.read_into(ref.storage, 0, memoryview(buffer))
    dtype = getattr(torch, ref.storage.dtype)
    base = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
    return base.as_strided(ref.shape, ref.stride, ref.offset_elems)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).untyped_storage())


def check_all(path: Path, source: object) -> int:
    """Compares every tensor of the file with torch.load's and the source's; returns how many bytes
    were compared."""
    expected = torch.load(path, weights_only=False)
    compared = 0

    def walk(mine: object, theirs: object, live: object) -> None:
        nonlocal compared
        if isinstance(theirs, torch.Tensor):
            assert isinstance(mine, torch.Tensor) and isinstance(live, torch.Tensor)
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert mine.stride() == theirs.stride()
            assert bits(mine) == bits(theirs) == bits(live)
            compared += mine.numel() * mine.element_size()
        elif isinstance(theirs, dict):
            assert isinstance(mine, dict) and isinstance(live, dict) and list(mine) == list(theirs)
            for key in theirs:
                walk(mine[key], theirs[key], live[key])
        elif isinstance(theirs, list | tuple):
            assert isinstance(mine, list | tuple) and isinstance(live, list | tuple)
            for one, two, three in zip(mine, theirs, live, strict=True):
                walk(one, two, three)
        elif not isinstance(mine, InertObject):
            assert mine == theirs

    with PtFile(path) as file:
        walk(with_tensors(file.tree, lambda ref: rebuild(file, ref)), expected, source)
    return compared


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    flat = torch.randn(200)
    source = {
        "views": [
            flat[:91].view(13, 7),
            flat[91:104],
            flat[104:].view(2, 48).T,
            flat[5],
            flat[::3],
        ],
        "dtypes": [torch.randint(0, 2, (3, 5)).to(getattr(torch, name)) for name in ITEMSIZE],
        "bf16": torch.randn(33).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.25),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "empty": torch.empty(0),
        "flat empty": torch.empty(3, 0, 2),
        "expanded": torch.ones(1, 4).expand(5, 4),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "state": torch.nn.LayerNorm(4).state_dict(),
    }
    path = tmp_path / "x.pt"
    torch.save(source, path)
    assert check_all(path, source) > 1000


def test_a_deepspeed_like_file(tmp_path: Path) -> None:
    flat = torch.randn(164)
    source = {
        "optimizer_state_dict": {
            "zero_stage": 1,
            "partition_count": [2],
            "single_partition_of_fp32_groups": [flat[:161]],
            "group_paddings": [3],
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(164)}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}],
            },
            "param_slice_mappings": [OrderedDict(w=(0, 161))],
        },
        "ds_config": {"bf16": {"enabled": True}},
        "ds_version": "0.19.8",
    }
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save(source, path)
    assert check_all(path, source) == 4 * (161 + 164 + 1)
    with PtFile(path) as file:
        tree = file.tree
        assert file.root == path.stem and isinstance(tree, dict)
        master = tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        assert (master.numel, master.storage.elems) == (161, 164)


DTYPES = ("float32", "bfloat16", "int64", "uint8", "bool", "float64")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_views(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    source = []
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = getattr(torch, data.draw(st.sampled_from(DTYPES)))
        base = torch.randint(0, 2, (data.draw(st.integers(0, 60)),)).to(dtype)
        for _ in range(data.draw(st.integers(1, 3))):
            shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
            dims = len(shape)
            stride = data.draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims))
            last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            if 0 in shape or last < len(base):
                room = 0 if 0 in shape else len(base) - 1 - last
                source.append(base.as_strided(shape, stride, data.draw(st.integers(0, room))))
    path = tmp_path_factory.mktemp("views") / "x.pt"
    torch.save(source, path)
    assert check_all(path, source) == sum(one.numel() * one.element_size() for one in source)


def test_records_are_those_of_zipfile(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.randn(n) for n in (1, 1000, 7)], path)
    with PtFile(path) as file, zipfile.ZipFile(path) as oracle:
        assert list(file.records) == oracle.namelist()
        for info in oracle.infolist():
            record = file.records[info.filename]
            assert record == Record(info.filename, record.offset_bytes, info.file_size, info.CRC)
            held = path.read_bytes()[record.offset_bytes :][: info.file_size]
            assert held == oracle.read(info.filename)
        places = [record.offset_bytes for record in file.records.values()]
        assert not any(place % 64 for place in places), "torch aligns payloads"
        found = [name in file.records for name in ("x/data/2", "x/data/3", "data/2")]
        assert found == [True, False, False]
        with pytest.raises(KeyError):
            file.records["x/data/3"]


@pytest.mark.parametrize("end64", [False, True])
def test_archives_with_and_without_zip64_end(tmp_path: Path, end64: bool) -> None:
    data = pickle_of(storage(elems=2))
    entries = [
        Entry("a/data.pkl", data, local_extra=b"FB\x02\x00ZZ"),
        Entry("a/data/0", b"12345678", zip64=end64),
    ]
    path = tmp_path / "x.pt"
    path.write_bytes(zip_of(entries, end64=end64))
    assert zipfile.ZipFile(path).testzip() is None  # the crafted archive is a right one
    with PtFile(path) as file:
        assert file.tree == StorageRef("0", "float32", 2)
        record = file.record(StorageRef("0", "float32", 2))
        buffer = bytearray(8)
        file.read_into(record, 0, memoryview(buffer))
        assert buffer == b"12345678"


def test_an_archive_of_pythons_zipfile(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle_of(b"K\x05"))
    assert PtFile(tmp_path / "x.pt").tree == 5


def zip64_entry(name: bytes, length: int, header: int, crc: int) -> bytes:
    """An entry of the directory that gives in a ZIP64 field what takes more than 32 bits, behind a
    field that says nothing."""
    fields = (length, length, header) if length > 2**32 else (header,)
    extra = struct.pack("<2HHH", 0xCAFE, 4, 0, 0) + struct.pack("<2H", 1, 8 * len(fields))
    extra += struct.pack(f"<{len(fields)}Q", *fields)
    shown = min(length, 2**32 - 1)
    place = 2**32 - 1 if length > 2**32 or header > 2**32 else header
    about = 0, 0, 8, 0, 0, 0, crc, shown, shown, len(name), len(extra), 0, 0, 0, 0, place
    return struct.pack("<4s6H3L5H2L", b"PK\1\2", *about) + name + extra


def test_records_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file: 5 GiB of nothing, then a record whose place needs 64 bits."""
    size, data, path = 5 * 2**30, pickle_of(b"K\x07"), tmp_path / "x.pt"
    names = (b"a/data/0", b"a/data.pkl")
    local = [
        struct.pack("<4s5H3L2H", b"PK\3\4", 0, 8, 0, 0, 0, 0, 0, 0, len(name), 0) + name
        for name in names
    ]
    second = len(local[0]) + size
    start = second + len(local[1]) + len(data)
    with path.open("wb") as out:
        out.write(local[0])
        out.seek(second - 4)
        out.write(b"last" + local[1] + data)
        central = zip64_entry(names[0], size, 0, 1)
        central += zip64_entry(names[1], len(data), second, zlib.crc32(data))
        out.write(central + zip_end(2, len(central), start, end64=True))
    with zipfile.ZipFile(path) as oracle, PtFile(path) as file:
        assert [info.header_offset for info in oracle.infolist()] == [0, second]  # negative control
        assert file.tree == 7
        record = file.record(StorageRef("0", "uint8", size))
        buffer = bytearray(4)
        file.read_into(record, size - 4, memoryview(buffer))
        assert buffer == b"last" and record.size_bytes == size


def test_opening_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.randn(2**20) for _ in range(8)], path)  # 32 MiB
    read: list[tuple[int, int]] = []
    real: Callable[..., int] = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        read.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    for other in ("read", "pread", "readv"):
        monkeypatch.setattr(os, other, None)
    with PtFile(path) as file:
        directory_bytes = sum(count for _, count in read)
        assert len(read) == 3 and directory_bytes < 2000
        tree = file.tree
        assert isinstance(tree, list)
        records = [file.record(ref.storage) for ref in tree]
        assert 0 < sum(count for _, count in read) < 10_000
        before = len(read)
        assert [file.record(ref.storage) for ref in tree] == records
        assert file.tree is tree and len(read) == before
        buffer = bytearray(12)
        file.read_into(tree[3], 4000, memoryview(buffer))
        assert read[before:] == [(records[3].offset_bytes + 4000, 12)]


def test_opening_runs_and_imports_nothing(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    with watch() as events, PtFile(tmp_path / "x.pt") as file:
        assert file.tree
    assert [event.split()[0] for event in events] == ["open"]


def test_reading_ranges(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    base = torch.arange(100, dtype=torch.int16)
    torch.save([base[10:30], base.view(10, 10).T], path)
    with PtFile(path) as file:
        tree = file.tree
        assert isinstance(tree, list)
        part, turned = tree
        record = file.record(part.storage)
        for source, first, length in ((part, 10, 20), (part.storage, 0, 100), (record, 0, 100)):
            buffer = torch.empty(length, dtype=torch.int16)
            file.read_into(source, 0, buffer.numpy().data)
            assert torch.equal(buffer, base[first : first + length])
            tail = bytearray(4)
            file.read_into(source, 2 * length - 4, memoryview(tail))
            assert list(struct.unpack("<2h", tail)) == [first + length - 2, first + length - 1]
            file.read_into(source, 2 * length, memoryview(b""))
            for start in (-1, 2 * length - 3):
                with pytest.raises(UsageError, match="range"):
                    file.read_into(source, start, memoryview(tail))
        with pytest.raises(UsageError, match="contiguous"):
            file.read_into(turned, 0, memoryview(bytearray(200)))


def test_short_counts_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(torch.arange(1000), tmp_path / "x.pt")
    real: Callable[..., int] = os.preadv
    with PtFile(tmp_path / "x.pt") as file:
        ref = file.tree
        assert isinstance(ref, TensorRef)
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [views[0][:7]], at))
        assert torch.equal(rebuild(file, ref), torch.arange(1000))
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: 0)
        with pytest.raises(DamagedFileError, match="truncated"):
            rebuild(file, ref)


def test_closing(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "x.pt")
    with PtFile(tmp_path / "x.pt") as file:
        fd = file.stored.fd
        assert os.fstat(fd).st_size == file.size_bytes == (tmp_path / "x.pt").stat().st_size
    file.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(UsageError, match="closed"):
        _ = file.tree


# ---- checksums ----


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as out:
        out.seek(offset)
        byte = out.read(1)[0]
        out.seek(offset)
        out.write(bytes([byte ^ 4]))


def test_check_finds_one_flipped_bit(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.randn(600_000), torch.randn(3)], path)  # the first has more than two chunks
    with PtFile(path) as file:
        for record in file.records.values():
            file.check(record)
        large, small = (file.record(ref.storage) for ref in file.tree)  # type: ignore[union-attr, attr-defined]
        assert file.has_checksums
    for place in (0, 2**20, large.size_bytes - 1):
        flip(path, large.offset_bytes + place)
        with PtFile(path) as file:
            file.check(small)
            with pytest.raises(DamagedFileError, match="checksum"):
                file.check(large)
        flip(path, large.offset_bytes + place)


def test_a_flipped_bit_in_the_pickle_is_found_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": 1}, path)
    with PtFile(path) as file:
        record = file.records["x/data.pkl"]
    flip(path, record.offset_bytes + 5)
    with PtFile(path) as file, pytest.raises(DamagedFileError, match="checksum"):
        _ = file.tree


def test_files_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(4)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert check_all(path, {"a": torch.arange(4)}) == 32
    with PtFile(path) as file:
        assert not file.has_checksums
        file.check(file.records["x/data/0"])


def test_directory_hash(tmp_path: Path) -> None:
    def save(name: str, value: object) -> str:
        path = tmp_path / name / "x.pt"
        path.parent.mkdir()
        torch.save(value, path)
        with PtFile(path) as file, zipfile.ZipFile(path) as oracle:
            directory = path.read_bytes()[oracle.start_dir :]
            listed = directory[: directory.index(b"PK\6\6")]
            assert hashlib.sha256(listed).hexdigest() == file.directory_sha256
            return file.directory_sha256

    one = save("a", torch.zeros(9))
    assert one == save("b", torch.zeros(9))
    assert one != save("c", torch.tensor([0.0] * 8 + [1e-30])) and one != save("d", torch.zeros(10))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.binary(max_size=400), st.integers(0, 300))
def test_the_sums_of_parts_combine(a: bytes, b: bytes, zeros: int) -> None:
    """isal's CRC-32 is the one of the zip directory, and joins runs that several ranks summed."""
    b = b + bytes(zeros)
    both = isal_zlib.crc32_combine(isal_zlib.crc32(a), isal_zlib.crc32(b), len(b))
    assert both == zlib.crc32(a + b)


def test_an_archive_in_memory_is_what_torch_writes() -> None:
    """The crafted archives of the other tests are read by torch as well."""
    entries = [Entry("a/data.pkl", pickle_of(b"K\x05")), Entry("a/version", b"3\n")]
    buffer = io.BytesIO(zip_of([*entries, Entry("a/byteorder", b"little")]))
    assert torch.load(buffer, weights_only=True) == 5
