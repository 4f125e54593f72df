"""Reads of objects: what is asked for before, together and again; and the hints on their way from a
tensor to the bytes of a file."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.errors import DamagedFileError, NotFoundError
from megatron_ucp.formats import store
from megatron_ucp.formats.byte_files import AssembledTensor, OpenFile, Record
from megatron_ucp.formats.folder import LocalFile, LocalFolder, SharedFolder
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.store import StoreOptions, StorePath, configure, folder_at
from tests.object_server import ObjectServer, Request

RUN, SIZE = StorePath("s3://bucket/run"), 200_000
ENDS, SMALL, MOST = 8192, 1024, 30_000
DATA = random.Random(1).randbytes(SIZE)
Ranges = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "ENDS_BYTES", ENDS)
    monkeypatch.setattr(store, "SMALL_BYTES", SMALL)
    monkeypatch.setattr(store, "REQUEST_BYTES", MOST)
    configure(StoreOptions(timeout_s=20, give_up_s=1))
    yield
    configure(StoreOptions())


@pytest.fixture
def server(object_server: ObjectServer) -> ObjectServer:
    (RUN / "a").write_bytes(DATA)
    object_server.ask("forget_requests")
    return object_server


def asked(server: ObjectServer, count: int) -> Ranges:
    """What was asked for, once so many requests were answered: first byte, end."""
    got: list[Request] = []
    for _ in range(500):
        got = [one for one in server.requests("GET") if one.took_s]
        if len(got) >= count:
            break
        time.sleep(0.01)
    return sorted((one.first_byte or 0, (one.first_byte or 0) + one.bytes_out) for one in got)


def test_bytes_that_were_asked_for_are_not_asked_for_again(server: ObjectServer) -> None:
    with folder_at(RUN).open("a") as file:
        for start, size in ((50_000, 10_000), (45_000, 8000), (52_000, 9000), (46_000, 14_000)):
            file.prefetch(start, size)
        assert file.bytes_at(45_000, 17_024) == DATA[45_000:62_024]
        assert asked(server, 4) == [
            (45_000, 50_000),
            (50_000, 60_000),
            (60_000, 61_024),
            (61_024, 62_048),
        ]
        # what lies within more bytes comes with these
        file.prefetch(70_000, 100)
        file.prefetch(65_000, 10_000)
        assert file.bytes_at(65_000, 10_000) == DATA[65_000:75_000]
        assert asked(server, 6)[4:] == [(65_000, 75_000), (70_000, 71_024)]
        file.prefetch(90_000, 2 * MOST + 5)
        file.prefetch(SIZE - 10, 1000)
        assert file.bytes_at(90_000, 2 * MOST) == DATA[90_000 : 90_000 + 2 * MOST]
        assert max(end - first for first, end in asked(server, 10)) == MOST
        assert file.bytes_at(SIZE - 10, 10) == DATA[-10:]
        with pytest.raises(DamagedFileError, match="truncated"):
            file.bytes_at(SIZE - 10, 11)


def test_ends_and_few_bytes_are_kept_and_many_are_not(server: ObjectServer) -> None:
    with folder_at(RUN).open("a") as file:
        for start, size, requests in (
            *((10, 20, 1), (0, ENDS, 1), (SIZE - 98, 98, 2), (SIZE - 500, 20, 2)),
            *((60_000, 5, 3), (60_005, 900, 3), (60_000, 5, 3)),
            *((100_000, 5000, 4), (100_000, 5000, 5)),
        ):
            assert file.bytes_at(start, size) == DATA[start : start + size]
            assert server.count("GET") == requests, (start, size)


def test_both_ends_are_asked_for_before_a_file_is_opened(server: ObjectServer) -> None:
    folder = folder_at(RUN)
    folder.prefetch(["a", "nothing of that name"], 2048)
    with folder.open("a") as file:
        assert (
            file.bytes_at(0, 2048) + file.bytes_at(SIZE - 2048, 2048) == DATA[:2048] + DATA[-2048:]
        )
    assert asked(server, 2) == [(0, 2048), (SIZE - 2048, SIZE)]


def test_reads_in_any_order_from_several_threads_are_right(server: ObjectServer) -> None:
    draw = random.Random(7)
    with folder_at(RUN).open("a") as file:

        def work(_: int) -> bool:
            start = draw.randrange(SIZE)
            size = draw.choice((1, 300, 5000, 40_000))
            size = min(size, SIZE - start)
            if draw.random() < 0.5:
                file.prefetch(max(0, start - draw.randrange(5000)), size)
            if draw.random() < 0.3:
                rows = range(start, start + size - 9, 20)
                found = bytearray(10 * len(rows))
                file.read_rows(rows, 10, memoryview(found), range(0, len(found), 10))
                return found == b"".join(DATA[at : at + 10] for at in rows)
            return file.bytes_at(start, size) == DATA[start : start + size]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(150)))


def test_what_failed_is_asked_for_again(server: ObjectServer) -> None:
    server.fault("status", "GET", value=404, times=1)
    with folder_at(RUN).open("a") as file:
        file.prefetch(50_000, 4000)
        with pytest.raises(NotFoundError):
            file.bytes_at(50_000, 4000)
        assert file.bytes_at(50_000, 4000) == DATA[50_000:54_000]


# ---- from a tensor to the bytes


class Noted(LocalFile):
    """A file of the disk that notes what it is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.told: Ranges = []
        self.did_read: Ranges = []

    def prefetch(self, start_byte: int, size_bytes: int) -> None:
        self.told.append((start_byte, start_byte + size_bytes))

    def read(self, start_byte: int, target: memoryview) -> None:
        self.did_read.append((start_byte, start_byte + len(target)))
        super().read(start_byte, target)


def test_a_tensor_is_asked_for_before_its_header_was_read(tmp_path: Path) -> None:
    tensors = {
        "first": torch.ones(1),
        "few": torch.tensor(3.0),
        "many": torch.arange(5000.0),
        "last": torch.ones(7),
    }
    torch.save(tensors, tmp_path / "a.pt")
    stored = Noted(tmp_path / "a.pt")
    with PtFile(stored) as file:
        tree: Any = file.tree
        file.record(tree["first"].storage)  # looks at the byte order too
        for name, start, size in (("few", 0, 4), ("many", 8000, 400), ("last", 20, 8)):
            stored.told.clear()
            stored.did_read.clear()
            storage = tree[name].storage
            file.prefetch(storage, start, size)
            data = bytearray(size)
            file.read_into(file.record(storage), start, memoryview(data))
            assert data == tensors[name].numpy().tobytes()[start : start + size]
            told = stored.told
            for first, end in stored.did_read:
                assert any(low <= first and end <= high for low, high in told), (first, end, told)
            assert sum(high - low for low, high in told) < size + 300


def test_chunks_of_a_tensor_are_asked_for_in_their_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    stored = [Noted(tmp_path / "a") for _ in range(2)]
    parts = [
        (OpenFile(stored[0]), Record("x", 10, 20, 0)),
        (OpenFile(stored[1]), Record("y", 50, 30, 0)),
    ]
    whole = AssembledTensor("ab", parts)
    whole.prefetch(whole.record, 5, 35)
    assert [one.told for one in stored] == [[(15, 30)], [(50, 70)]]


def test_what_another_rank_read_is_not_asked_for_unless_it_is_a_part(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    first = SharedFolder(LocalFolder(tmp_path))
    with first.open("a") as file:
        file.bytes_at(1000, 8)
    assert first.look is not None
    opened: list[Noted] = []

    class Folder(LocalFolder):
        def open(self, name: str) -> Noted:
            opened.append(Noted(tmp_path / name))
            return opened[-1]

    with SharedFolder(Folder(tmp_path), first.look).open("a") as file:
        file.prefetch(990, 60)
        assert opened == []
        file.prefetch(0, SIZE)
        assert [one.told for one in opened] == [[(0, SIZE)]]
