"""Damaged and hostile files: each is refused by a named error that names the file, and no
descriptor stays open."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ucp.errors import DamagedFileError, NotFoundError, UcpError, UsageError
from megatron_ucp.formats.pt import file as pt_file
from megatron_ucp.formats.pt import zip as pt_zip
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import StorageRef
from tests.formats.craft import Entry, mutated, pickle_of, storage, watch, zip_of

PICKLE = Entry("a/data.pkl", pickle_of(storage(elems=2)))
DATA = Entry("a/data/0", b"12345678")


@pytest.fixture(autouse=True)
def no_open_descriptors() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def use(path: Path) -> None:
    """All that a reader does with a file."""
    with PtFile(path) as file:
        tree = file.tree
        for record in file.records.values():
            file.check(record)
        for key in range(4):
            if isinstance(tree, StorageRef) or f"{file.root}/data/{key}" in file.records:
                file.record(
                    tree if isinstance(tree, StorageRef) else StorageRef(str(key), "uint8", 1)
                )


def test_the_crafted_file_is_a_good_one(tmp_path: Path) -> None:
    for end64 in (False, True):
        (tmp_path / "x.pt").write_bytes(zip_of([PICKLE, DATA], end64=end64))
        use(tmp_path / "x.pt")


ARCHIVES: dict[str, bytes] = {
    "compressed": zip_of([PICKLE, replace(DATA, method=8)]),
    "encrypted": zip_of([PICKLE, replace(DATA, flags=1)]),
    "strongly encrypted": zip_of([PICKLE, replace(DATA, flags=0x41)]),
    "masked": zip_of([PICKLE, replace(DATA, flags=0x2000)]),
    "same name twice": zip_of([PICKLE, DATA, DATA]),
    "same place twice": zip_of([PICKLE, DATA, Entry("a/data/1", header=0)]),
    "inside of another": zip_of([PICKLE, DATA, Entry("a/data/1", b"", header=40)]),
    "longer than the rest": zip_of([PICKLE, replace(DATA, size=9)]),
    "into the next": zip_of([replace(PICKLE, size=200), DATA]),
    "4 GiB in 8 bytes": zip_of([PICKLE, replace(DATA, size=2**32 + 8, zip64=True)]),
    "2**64 bytes": zip_of([PICKLE, replace(DATA, size=2**64 - 1, zip64=True)]),
    "far away": zip_of([PICKLE, replace(DATA, header=2**40, zip64=True)]),
    "ZIP64 field missing": zip_of([PICKLE, replace(DATA, zip64=True, extra=b"")]),
    "ZIP64 field short": zip_of(
        [PICKLE, replace(DATA, zip64=True, extra=b"\1\0\x08\0" + bytes(8))]
    ),
    "ZIP64 field past the end": zip_of(
        [PICKLE, replace(DATA, zip64=True, extra=b"\1\0\xff\0" + bytes(24))]
    ),
    "another disk": zip_of([PICKLE, replace(DATA, disk=1)]),
    "two folders": zip_of([PICKLE, replace(DATA, name="b/data/0")]),
    "no pickle": zip_of([DATA]),
    "pickle in a subfolder": zip_of([Entry("a/b/data.pkl", PICKLE.data), DATA]),
    "no records": zip_of([]),
    "local name differs": zip_of([PICKLE, replace(DATA, local_name=b"a/data/1")]),
    "local name longer": zip_of([PICKLE, replace(DATA, local_name=b"a/data/00")]),
    "local extra too long": zip_of(
        [PICKLE, replace(DATA, local_extra=b"FB\2\0ZZ", data=b"12", size=8)]
    ),
    "header of nothing": zip_of(
        [
            replace(PICKLE, data=PICKLE.data + bytes(99), size=len(PICKLE.data)),
            replace(DATA, header=60),
        ]
    ),
    "fewer entries": zip_of([PICKLE, DATA], count=1),
    "more entries": zip_of([PICKLE, DATA], count=3, here=3),
    "65534 entries": zip_of([PICKLE, DATA], count=65534, here=65534),
    "a comment": zip_of([PICKLE, DATA], comment=1),
    "disk of the end": zip_of([PICKLE, DATA], disk=1),
    "directory too short": zip_of([PICKLE, DATA], length=50),
    "directory elsewhere": zip_of([PICKLE, DATA], start=5),
    "directory past the end": zip_of([PICKLE, DATA], start=10**9),
    "end64 elsewhere": zip_of([PICKLE, DATA], end64=True, end64_at=3),
    "end64 of another count": zip_of([PICKLE, DATA], end64=True, end64_count=3),
    "end64 of another length": zip_of([PICKLE, DATA], end64=True, end64_length=9),
    "end64 of 2**63": zip_of([PICKLE, DATA], end64=True, end64_start=2**63),
    "end64 of two disks": zip_of([PICKLE, DATA], end64=True, disks=2),
    "big-endian": zip_of([PICKLE, DATA, Entry("a/byteorder", b"big")]),
    "byte order of 1 MB": zip_of([PICKLE, DATA, Entry("a/byteorder", b"l" * 10**6)]),
    "storage missing": zip_of([PICKLE]),
    "storage too small": zip_of([PICKLE, replace(DATA, data=b"1234567")]),
    "storage too large": zip_of([PICKLE, replace(DATA, data=b"123456789")]),
    "wrong CRC": zip_of([PICKLE, replace(DATA, crc=1)]),
    "wrong CRC of the pickle": zip_of([replace(PICKLE, crc=1), DATA]),
    "CRC 0 of one": zip_of([PICKLE, replace(DATA, crc=0)]),
    "pickle empty": zip_of([replace(PICKLE, data=b""), DATA]),
    "bytes after the end": zip_of([PICKLE, DATA]) + b"\0",
    "bytes before": b"\0" * 4 + zip_of([PICKLE, DATA]),
    "empty": b"",
    "one byte": b"P",
    "text": b"not a checkpoint\n" * 50,
    "only an end": b"PK\5\6" + bytes(18),
    "signature only": b"PK\3\4",
    "zeros": bytes(10_000),
    "git lfs pointer": b"version https://git-lfs.github.com/spec/v1\n",
}
NAMES = [
    b"",
    b"a",
    b"/etc/passwd",
    b"a/../b",
    b"../a/data/0",
    b"a/..",
    b"a/.",
    b"./a",
    b"a//b",
    b"a/b/",
    b"a\\b",
    b"a/b\\c",
    b"a/\0",
    b"a/b\0c",
    b"a/\n",
    b"a/\xff",
    b"a/\x7f",
    b"/",
    b"a/data/0/",
]


@pytest.mark.parametrize("data", ARCHIVES.values(), ids=ARCHIVES.keys())
def test_archives_that_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.pt"
    path.write_bytes(data)
    with pytest.raises(DamagedFileError) as caught:
        use(path)
    assert str(path) in str(caught.value)


FOUND_AT_OPENING = {
    "compressed or encrypted": ["compressed", "encrypted", "strongly encrypted", "masked"],
    "reaches into another": [
        *(
            "same place twice",
            "inside of another",
            "longer than the rest",
            "into the next",
            "4 GiB in 8 bytes",
        ),
        *("2**64 bytes", "far away"),
    ],
    "is there twice": ["same name twice"],
    "directory is malformed": [
        *(
            "ZIP64 field missing",
            "ZIP64 field short",
            "ZIP64 field past the end",
            "another disk",
            "fewer entries",
        ),
        *(
            "a comment",
            "disk of the end",
            "directory too short",
            "directory elsewhere",
            "directory past the end",
        ),
        *("end64 elsewhere", "end64 of another count", "end64 of another length", "end64 of 2**63"),
        "end64 of two disks",
    ],
    "impossible size": ["65534 entries", "more entries"],
    "not written by torch": ["two folders", "no pickle", "pickle in a subfolder"],
    "no torch .pt file": [
        *(
            "bytes before",
            "empty",
            "one byte",
            "text",
            "only an end",
            "zeros",
            "no records",
            "git lfs pointer",
        ),
    ],
    "is truncated": ["signature only", "bytes after the end"],
}


@pytest.mark.parametrize(
    ("reason", "name"),
    [(reason, name) for reason, names in FOUND_AT_OPENING.items() for name in names],
)
def test_what_the_directory_shows_is_refused_at_opening(
    tmp_path: Path, reason: str, name: str
) -> None:
    (tmp_path / "x.pt").write_bytes(ARCHIVES[name])
    with pytest.raises(DamagedFileError, match=reason):
        PtFile(tmp_path / "x.pt")


def test_the_two_end_records_must_agree(tmp_path: Path) -> None:
    for wrong in ({"count": 1}, {"here": 1}, {"length": 1}, {"start": 1}):
        (tmp_path / "x.pt").write_bytes(zip_of([PICKLE, DATA], end64=True, **wrong))
        with pytest.raises(DamagedFileError, match=r"agrees|malformed"):
            PtFile(tmp_path / "x.pt")


@pytest.mark.parametrize(
    "name", ["local name differs", "local name longer", "local extra too long"]
)
def test_a_local_header_must_be_the_one_of_the_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.pt").write_bytes(ARCHIVES[name])
    with (
        PtFile(tmp_path / "x.pt") as file,
        pytest.raises(DamagedFileError, match="header of record"),
    ):
        _ = file.records["a/data/0"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_that_are_not_plain(tmp_path: Path, name: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(zip_of([PICKLE, replace(DATA, name=name)]))
    with pytest.raises(DamagedFileError, match="not plain"):
        PtFile(tmp_path / "x.pt")


def test_names_of_torch_are_plain(tmp_path: Path) -> None:
    for name in ("a/.data/serialization_id", "a/.format_version", "a/data/..0", "a/é", "a/a b"):
        (tmp_path / "x.pt").write_bytes(zip_of([PICKLE, DATA, Entry(name, b"1")]))
        with PtFile(tmp_path / "x.pt") as file:
            assert file.records[name].size_bytes == 1


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save([torch.arange(20), {"a": "b"}], path)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 7), *range(len(whole) - 120, len(whole))]:
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedFileError):
            PtFile(path)
    path.write_bytes(whole)
    PtFile(path).close()


def test_truncation_after_the_file_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(torch.zeros(10_000), path)
    with PtFile(path) as file:
        record = file.records["x/data/0"]
        os.truncate(path, record.offset_bytes + 100)
        with pytest.raises(DamagedFileError, match="truncated"):
            file.read_into(record, 0, memoryview(bytearray(record.size_bytes)))
        with pytest.raises(DamagedFileError, match="truncated"):
            file.check(record)


def test_legacy_torch_files_are_named_as_such(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(DamagedFileError, match="legacy") as caught:
        PtFile(tmp_path / "x.pt")
    assert "save it again" in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    for absent in (tmp_path / "none.pt", tmp_path / "none" / "x.pt"):
        with pytest.raises(NotFoundError) as caught:
            PtFile(absent)
        assert str(absent) in str(caught.value)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotFoundError):
        PtFile(tmp_path / "file" / "x.pt")
    with pytest.raises(DamagedFileError, match="a folder"):
        PtFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DamagedFileError, match="no regular file"):
        PtFile(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DamagedFileError, match="symbolic"):
        PtFile(tmp_path / "loop")
    with pytest.raises(UsageError):
        PtFile(f"{tmp_path}/x\0.pt")


def test_errors_of_the_system_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(torch.ones(3), tmp_path / "x.pt")

    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    for call in ("open", "fstat", "preadv"):
        with (
            monkeypatch.context() as patch,
            pytest.raises(UcpError, match=r"can't be|may not be") as caught,
        ):
            patch.setattr(pt_file.os, call, refuse)
            PtFile(tmp_path / "x.pt")
        assert "Permission denied" in str(caught.value)
        # a file that its reader may not open is no damage
        assert isinstance(caught.value, NotFoundError if call == "open" else DamagedFileError)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_bytes(zip_of([PICKLE, DATA]))
    for limit in ("MAX_RECORDS", "MAX_DIRECTORY_BYTES"):
        with (
            monkeypatch.context() as patch,
            pytest.raises(DamagedFileError, match="impossible size"),
        ):
            patch.setattr(pt_zip, limit, 1)
            PtFile(tmp_path / "x.pt")
    monkeypatch.setattr(pt_file, "MAX_PICKLE_BYTES", 1)
    with PtFile(tmp_path / "x.pt") as file, pytest.raises(DamagedFileError, match="larger"):
        _ = file.tree


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    path = tmp_path_factory.mktemp("fuzz") / "x.pt"
    torch.save({"a": torch.arange(3), "b": [torch.ones(2, 2).bfloat16(), 7]}, path)
    return path, [
        path.read_bytes(),
        zip_of([PICKLE, DATA]),
        zip_of([PICKLE, replace(DATA, zip64=True)], end64=True),
    ]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2), st.integers(0, 2**64), st.booleans())
def test_mutations_raise_only_named_errors_and_run_nothing(
    valid: tuple[Path, list[bytes]], which: int, seed: int, at_end: bool
) -> None:
    path, files = valid
    data = files[which]
    cut = len(data) // 2 if at_end else 0  # half of the time only the directory
    path.write_bytes(data[:cut] + mutated(data[cut:], seed))
    with watch() as events:
        try:
            use(path)
        except UcpError as error:
            assert str(path) in str(error)
    assert all(event.startswith("open ") for event in events) and len(events) <= 1
