"""The object store of the tests: what it does as moto's does, and each of its faults, seen through
obstore."""

import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
)
from obstore.store import S3Store

from tests.object_server import KINDS, MotoServer, ObjectServer

MIB = 2**20
DATA = bytes(range(256)) * 4096  # 1 MiB


def a_store(tries: int = 3, timeout: str = "500ms", url: str = "s3://bucket/run") -> S3Store:
    return S3Store.from_url(
        url,
        client_options={"allow_http": True, "timeout": timeout, "connect_timeout": "500ms"},
        retry_config={
            "max_retries": tries - 1,
            "retry_timeout": timedelta(seconds=5),
            "backoff": {
                "init_backoff": timedelta(milliseconds=5),
                "max_backoff": timedelta(milliseconds=20),
                "base": 2,
            },
        },
    )


@pytest.fixture(params=["object_server", "moto_server"])
def store(request: pytest.FixtureRequest) -> S3Store:
    """A store at either server."""
    request.getfixturevalue(request.param)
    return a_store(timeout="20s")


# ---- as S3 does, on both


def test_a_range_is_what_was_put(store: S3Store) -> None:
    obstore.put(store, "a/b.pt", DATA)
    assert bytes(obstore.get_range(store, "a/b.pt", start=300, length=1000)) == DATA[300:1300]
    found = obstore.get_ranges(store, "a/b.pt", starts=[0, 600000], lengths=[10, 10], coalesce=0)
    assert [bytes(data) for data in found] == [DATA[:10], DATA[600000:600010]]
    assert bytes(obstore.get(store, "a/b.pt").bytes()) == DATA
    assert obstore.head(store, "a/b.pt")["size"] == MIB
    # what lies behind the end is no error, and gives fewer bytes
    assert bytes(obstore.get_range(store, "a/b.pt", start=MIB - 5, length=100)) == DATA[-5:]
    with pytest.raises(GenericError, match="416"):
        obstore.get_range(store, "a/b.pt", start=MIB, length=1)


def test_what_is_not_there(store: S3Store) -> None:
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "none")
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "none")
    assert [*obstore.list(store)] == []


def test_an_object_is_made_once(store: S3Store) -> None:
    obstore.put(store, "claim", b"first", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "claim", b"second", mode="create")
    assert bytes(obstore.get(store, "claim").bytes()) == b"first"


def test_an_object_is_replaced_only_as_it_was_seen(store: S3Store) -> None:
    seen = obstore.put(store, "latest", b"step 1")["e_tag"]
    assert obstore.head(store, "latest")["e_tag"] == seen
    obstore.put(store, "latest", b"step 2", mode={"e_tag": seen})
    with pytest.raises(PreconditionError):
        obstore.put(store, "latest", b"step 3", mode={"e_tag": seen})
    with pytest.raises(PreconditionError):
        obstore.put(store, "none", b"step 3", mode={"e_tag": seen})
    with pytest.raises(PreconditionError):
        obstore.get(store, "latest", options={"if_match": seen})
    assert bytes(obstore.get(store, "latest").bytes()) == b"step 2"


def test_lists(store: S3Store) -> None:
    for name in ("latest", "tag/a & b.pt", "tag/zero/é.pt", "tags/x"):
        obstore.put(store, name, name.encode())
    found = {entry["path"]: entry["size"] for entry in obstore.list(store).collect()}
    assert found == {"latest": 6, "tag/a & b.pt": 12, "tag/zero/é.pt": 14, "tags/x": 6}
    below = obstore.list_with_delimiter(store, "tag")
    assert [entry["path"] for entry in below["objects"]] == ["tag/a & b.pt"]
    assert list(below["common_prefixes"]) == ["tag/zero"]
    after = obstore.list(store, offset="tag/a & b.pt").collect()
    assert [entry["path"] for entry in after] == ["tag/zero/é.pt", "tags/x"]


def test_removals_and_copies(store: S3Store) -> None:
    obstore.put(store, "a", b"1")
    obstore.copy(store, "a", "b")
    obstore.rename(store, "b", "c")
    assert {entry["path"] for entry in obstore.list(store).collect()} == {"a", "c"}
    obstore.delete(store, ["a", "c"])
    assert obstore.list(store).collect() == []


def test_an_upload_in_parts_is_there_when_it_is_complete(store: S3Store) -> None:
    seen: list[int] = []

    def pieces() -> Iterator[bytes]:
        for _ in range(11):
            yield DATA
            # obstore takes no call from within a generator that it asks
            seen.append(other.submit(lambda: len(obstore.list(store).collect())).result())

    with ThreadPoolExecutor(1) as other:
        obstore.put(store, "big", pieces(), use_multipart=True, chunk_size=5 * MIB)
    assert set(seen) == {0}
    assert bytes(obstore.get(store, "big").bytes()) == DATA * 11


def test_an_upload_whose_source_fails_is_aborted(store: S3Store) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(7):
            yield DATA
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        obstore.put(store, "big", pieces(), use_multipart=True, chunk_size=5 * MIB)
    assert obstore.list(store).collect() == []
    uploads = f"{os.environ['AWS_ENDPOINT_URL']}/bucket?uploads"
    with urllib.request.urlopen(uploads, timeout=20) as answer:
        assert b"<UploadId>" not in answer.read()


# ---- the server itself


def test_a_list_of_several_pages(object_server: ObjectServer) -> None:
    object_server.ask("page", keys=2)
    store = a_store()
    for number in range(5):
        obstore.put(store, f"d{number}/x", b"1")
    assert len(obstore.list(store).collect()) == 5
    assert len(obstore.list_with_delimiter(store)["common_prefixes"]) == 5
    assert object_server.count("LIST") == 6


def test_requests_and_bytes_are_counted(object_server: ObjectServer) -> None:
    store = a_store(timeout="20s")
    obstore.put(store, "x", DATA)
    obstore.get_range(store, "x", start=5, length=100)
    put, got = object_server.requests()
    assert (put.name, put.key, put.status, put.bytes_in) == ("PUT", "bucket/run/x", 200, MIB)
    assert (got.name, got.status, got.first_byte, got.bytes_out) == ("GET", 206, 5, 100)
    object_server.ask("forget_requests")
    obstore.put(store, "y", iter([DATA] * 11), use_multipart=True, chunk_size=5 * MIB)
    assert object_server.counts() == {"CREATE": 1, "PART": 3, "COMPLETE": 1}
    assert sum(r.bytes_in for r in object_server.requests("PART")) == 11 * MIB


def test_folders_in_and_out(object_server: ObjectServer, tmp_path: Path) -> None:
    (tmp_path / "in" / "zero").mkdir(parents=True)
    (tmp_path / "in" / "latest").write_bytes(b"tag")
    (tmp_path / "in" / "zero" / "x").write_bytes(DATA)
    object_server.ask("copy_in", folder=str(tmp_path / "in"), prefix="bucket/run")
    assert object_server.ask("objects") == {"bucket/run/latest": 3, "bucket/run/zero/x": MIB}
    object_server.ask("copy_out", prefix="bucket/run", folder=str(tmp_path / "out"))
    assert (tmp_path / "out" / "zero" / "x").read_bytes() == DATA


# ---- its faults


def test_each_kind_of_fault_is_tested_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'fault("{kind}"' in text for kind in KINDS)


@pytest.fixture
def at(object_server: ObjectServer) -> S3Store:
    """A store with an object x, and half a second for each request."""
    store = a_store()
    obstore.put(store, "x", DATA)
    object_server.ask("forget_requests")
    return store


def read(store: S3Store, length: int = MIB) -> bytes:
    return bytes(obstore.get_range(store, "x", start=0, length=length))


def took_s(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def test_delay(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("delay", "GET", value=0.1)
    assert took_s(lambda: read(at)) >= 0.1
    object_server.fault("delay", "PUT", value=30)
    with pytest.raises(GenericError, match="error sending request"):
        obstore.put(a_store(tries=1), "y", b"1")


def test_status_for_some_requests(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("status", "GET", value=503, times=2)
    assert read(at) == DATA
    assert object_server.count("GET") == 3
    object_server.fault("status", "GET", value=500)
    with pytest.raises(GenericError, match="500 Internal Server Error"):
        read(at)
    object_server.ask("heal")
    assert read(at) == DATA


def test_a_fault_after_some_requests(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("status", "GET", value=404, after=1, times=1)
    read(at)
    with pytest.raises(FileNotFoundError):
        read(at)
    read(at)


def test_status_of_one_key(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("status", key="*/secret", value=403)
    obstore.put(at, "open", b"1")
    for use in (obstore.get, obstore.head, lambda s, key: obstore.put(s, key, b"1")):
        with pytest.raises(PermissionDeniedError):
            use(at, "secret")


def test_cut(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("cut", "GET", value=1000, times=1)
    assert read(at) == DATA  # goes on where it was cut
    assert [r.first_byte for r in object_server.requests("GET")] == [0, 1000]
    object_server.fault("cut", "GET", value=1000)
    with pytest.raises(GenericError, match="request or response body error"):
        read(at)


def test_cut_of_what_is_put(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("cut", "PUT", value=1000, times=1)
    obstore.put(at, "y", DATA)
    assert [r.bytes_in for r in object_server.requests("PUT")] == [1000, MIB]


def test_stall(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("stall", "GET", value=1000)
    with pytest.raises(GenericError, match="request or response body error"):
        read(a_store(tries=1))


def test_trickle(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("trickle", "GET", value=100_000)
    assert took_s(lambda: read(a_store(timeout="10s"), 30_000)) > 0.25


def test_flip_and_short_are_no_errors_of_http(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("flip", "GET", value=77, times=1)
    found = read(at)
    assert [n for n in range(MIB) if found[n] != DATA[n]] == [77]
    object_server.fault("short", "GET", value=10, times=1)
    assert read(at) == DATA[:-10]


def test_lost_answers(object_server: ObjectServer, at: S3Store) -> None:
    """The object is there, and obstore, which asks again, says that another one made it."""
    object_server.fault("lost", "PUT", times=1)
    with pytest.raises(AlreadyExistsError):
        obstore.put(at, "claim", b"ours", mode="create")
    assert bytes(obstore.get(at, "claim").bytes()) == b"ours"
    object_server.fault("lost", "COMPLETE", times=1)
    with pytest.raises(FileNotFoundError):
        obstore.put(at, "big", iter([DATA] * 6), use_multipart=True)
    assert obstore.head(at, "big")["size"] == 6 * MIB


def test_unconditional(object_server: ObjectServer, at: S3Store) -> None:
    object_server.fault("unconditional")
    obstore.put(at, "x", b"other", mode="create")
    obstore.put(at, "x", b"third", mode={"e_tag": '"of nothing"'})
    assert read(at, 5) == b"third"


def test_a_host_that_hangs_and_one_that_is_dead(object_server: ObjectServer, at: S3Store) -> None:
    once = a_store(tries=1)
    object_server.pause()
    try:
        with pytest.raises(GenericError, match="error sending request"):
            read(once)
    finally:
        object_server.resume()
    object_server.ask("refuse")
    with pytest.raises(GenericError, match="error sending request"):
        read(once)
    object_server.ask("accept")
    assert read(once) == DATA


def test_a_bucket_that_is_not_there(moto_server: MotoServer) -> None:
    store = a_store(url="s3://none/run")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.get(store, "x")
    with pytest.raises(BaseError, match="NoSuchBucket"):
        obstore.list(store).collect()
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.put(store, "x", b"1")
