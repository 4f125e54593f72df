"""Object stores: a folder at `s3://bucket/run`, `gs://...` or `az://...`, read by ranges and
written whole or not at all. The only module that knows the library `obstore`.

What lies in a store differs from a disk in three ways. Nothing can be renamed, so a save writes its
objects where they stay, and one object that is written last, the manifest, makes them a tag
(`store_saves`). Nothing can be locked, so writers find each other by conditional writes. And each
request takes its time, so bytes are asked for before they are needed (`prefetch`).
"""

import io
import json
import os
import re
import threading
import time
import uuid
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from fnmatch import fnmatch
from functools import cache
from itertools import chain, repeat
from pathlib import Path, PurePosixPath
from queue import Full, Queue
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar, cast
from urllib.parse import unquote, urlsplit

from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.errors import (
    DamagedFileError,
    NotFoundError,
    StoreError,
    UsageError,
)
from megatron_ucp.formats.folder import Folder, LocalFile, LocalFolder, StoredFile

_T = TypeVar("_T")


# ---- paths


SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_URL = re.compile(rf"({'|'.join(SCHEMES)}):/+(.*)", re.DOTALL | re.IGNORECASE)
_FILE_URL = re.compile(r"file:(?://)?(/(?!/).*)", re.DOTALL | re.IGNORECASE)
_ANY_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class StorePath(PurePosixPath):
    """The path of an object, or of a folder of objects, in a store: what `pathlib.Path` is on a
    disk, as far as checkpoints need it. `str` gives the URL.

    Example: `StorePath("s3://bucket/run") / "latest"` is the object `run/latest` of `bucket`.
    """

    def __str__(self) -> str:
        return _URL.sub(r"\1://\2", super().__str__(), count=1)

    def __fspath__(self) -> str:
        return str(self)

    @property
    def bucket(self) -> str:
        """The URL of the bucket."""
        return "://".join((self.parts[0].removesuffix(":"), *self.parts[1:2]))

    @property
    def key(self) -> str:
        """The key in the bucket."""
        return "/".join(self.parts[2:])

    def absolute(self) -> "StorePath":
        """Itself: every URL is."""
        return self

    def resolve(self) -> "StorePath":
        """Itself: nothing leads elsewhere."""
        return self

    def is_symlink(self) -> bool:
        """Nothing in a store is a link."""
        return False

    def is_file(self) -> bool:
        if hasattr(self, "_known"):
            return self._known is not None
        return bool(self.key) and _head(self) is not None

    def is_dir(self) -> bool:
        """Whether any object has this path and a slash before its name."""
        if hasattr(self, "_known"):
            return self._known is None
        return next(objects_below(self), None) is not None

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def iterdir(self) -> "Iterator[StorePath]":
        """What lies in the folder."""
        folders, files = level_of(self)
        for name in folders:
            yield (self / name).seen(None)
        for name, status in files.items():
            yield (self / name).seen(status)

    def rglob(self, pattern: str) -> "Iterator[StorePath]":
        """All objects below the folder whose name fits."""
        return (
            one.seen(status) for one, status in objects_below(self) if fnmatch(one.name, pattern)
        )

    def glob(self, pattern: str) -> "Iterator[StorePath]":
        return (one for one in self.iterdir() if fnmatch(one.name, pattern) and one.is_file())

    def seen(self, status: "_Status | None") -> "StorePath":
        """Itself, as a listing has it: nobody asks for it again."""
        self._known = status
        return self

    def stat(self) -> Any:
        """Size and time of an object; of a folder those of its newest object. Raises
        FileNotFoundError, StoreError."""
        found = getattr(self, "_known", None) or _head(self)
        if found is None:
            below = [status for _, status in objects_below(self)]
            found = max(below, key=lambda one: one.st_mtime, default=None)
        if found is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        return found

    def read_bytes(self) -> bytes:
        """All bytes of an object. Raises FileNotFoundError, StoreError."""
        return read_object(self)[0]

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def open(self, encoding: str = "utf-8", errors: str = "strict") -> io.TextIOWrapper:
        """A small object, to be read as text. Raises FileNotFoundError, StoreError."""
        return io.TextIOWrapper(io.BytesIO(self.read_bytes()), encoding, errors)

    def write_bytes(self, data: bytes) -> None:
        """Writes an object. Raises StoreError."""
        put_object(self, data)

    def write_text(self, data: str, encoding: str = "utf-8") -> None:
        put_object(self, data.encode(encoding))

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object, if it is there. Raises StoreError."""
        delete([self])

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders are not made in a store."""


Location: TypeAlias = Path | StorePath


def is_url(path: object) -> bool:
    """Whether a path is one in an object store. `Path("s3://b/r")`, which lost a slash, is."""
    return isinstance(path, str | os.PathLike) and bool(_URL.match(os.fspath(path)))


def location(path: str | os.PathLike[str]) -> Location:
    """A path of the local disk, or a URL, as what can be looked at. Raises UsageError for a URL of
    no store that is known, and where the library for stores is not installed."""
    if not isinstance(text := os.fspath(path), str):
        return Path(path)
    if url := _URL.match(text):
        _require_library(text)
        scheme = url[1].lower()
        return StorePath(f"{'gs' if scheme == 'gcs' else scheme}://{url[2]}")
    if url := _FILE_URL.fullmatch(text):
        return Path(unquote(url[1]))
    if _ANY_URL.match(text):
        raise UsageError(
            "this kind of URL is not known",
            expected=f"a path, file:///path, or {', '.join(f'{one}://' for one in SCHEMES)}",
            found=text,
            fix="give a folder of the disk, or of one of these stores",
            id="object-store",
        )
    return Path(text)


def _require_library(url: str) -> None:
    """Raises UsageError where the library for stores is not installed."""
    try:
        import obstore.store  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "paths in object stores need a library that is not installed",
            file=url,
            expected="obstore",
            found=str(error),
            fix="pip install megatron_ucp[remote]",
        ) from None


def absolute(path: str | os.PathLike[str]) -> Location:
    """A path as it is meant now, wherever the program goes; a URL as it is. Raises UsageError."""
    there = location(path)
    return there if isinstance(there, StorePath) else Path(os.path.abspath(there))


def open_file(path: str | os.PathLike[str]) -> StoredFile:
    """A file of the disk or of a store. Raises NotFoundError, DamagedFileError, StoreError."""
    there = location(path)
    if not isinstance(there, StorePath):
        return LocalFile(there)
    status = _head(there)
    if status is None:
        raise _no_object(str(there))
    return StoredObject(there, status.st_size, status.e_tag)


def real(path: Location) -> Location:
    """A path without links; of a loop of them, too."""
    return path if isinstance(path, StorePath) else Path(os.path.realpath(path))


@contextmanager
def written_by_places(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A small file that is written by places; of an object, which is sent as a whole, the bytes are
    kept in memory meanwhile. Raises OSError, StoreError."""
    there = location(path)
    if isinstance(there, StorePath):
        memory = io.BytesIO()
        yield memory
        there.write_bytes(memory.getvalue())
        return
    with open(there, "wb") as file:
        yield file


def bring_to_disk(file: BinaryIO) -> None:
    """Waits until what was written of a file is on disk. Raises OSError."""
    if not isinstance(file, io.BytesIO):
        file.flush()
        os.fsync(file.fileno())


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """The folder of a path, or of a URL, to read."""
    there = location(path)
    return StoreFolder(there) if isinstance(there, StorePath) else LocalFolder(there)


# ---- options, and requests


@dataclass(frozen=True)
class StoreOptions:
    """How stores are asked. `timeout_s`: one request, or a part of an upload, may take so long.
    `give_up_s`: it is tried again, with growing pauses, for so long. `config`: what `obstore`
    takes, such as an endpoint, beside what it finds in the environment."""

    timeout_s: float = 30.0
    give_up_s: float = 120.0
    config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "StoreOptions":
        """Of the section `store` of a config. Raises UsageError."""
        if not isinstance(cast("object", given), Mapping):
            raise UsageError(
                "store says how object stores are asked",
                expected='such as {"timeout_s": 30, "endpoint": "http://minio:9000"}',
                found=repr(given)[:200],
                fix="give a mapping",
            )
        times = {n: _seconds(f"store: {n}", given[n]) for n in _ENVIRONMENT if n in given}
        config = {name: value for name, value in given.items() if name not in _ENVIRONMENT}
        return cls(**times, config=config or None)


def _seconds(name: str, value: object) -> float:
    """How long a request may take. Raises UsageError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 10**7:
        return value
    raise UsageError(
        f"{name} is a number of seconds",
        expected="more than 0, such as 30",
        found=repr(value),
        fix="correct it, or leave it out",
    )


_ENVIRONMENT = {"timeout_s": "UCP_STORE_TIMEOUT_S", "give_up_s": "UCP_STORE_GIVE_UP_S"}
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
_options = StoreOptions()


def configure(options: StoreOptions) -> None:
    """Sets how this process asks stores from here on."""
    global _options
    _options = options
    _client.cache_clear()
    _KEEPS.clear()


def options() -> StoreOptions:
    """How this process asks stores: what was configured, else what the environment says. Raises
    UsageError."""
    said: dict[str, Any] = {}
    for name, variable in _ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text and getattr(_options, name) == getattr(StoreOptions, name):
            value: object = text
            with suppress(ValueError):
                value = float(text)
            said[name] = _seconds(variable, value)
    return replace(_options, **said)


_THREADS = 32  # requests that one process has in flight
WHOLE_OBJECT_BYTES = 512 * 2**20  # of an object that is read whole
_TRIES = 4  # of an answer that is too short and says so: the library takes it as it is


@cache
def _client(bucket: str) -> Any:
    """The library's store for a bucket. Raises UsageError where the configuration is none."""
    import obstore.store

    how = options()
    seconds = timedelta(seconds=how.timeout_s)
    retries: Any = {
        "max_retries": 1000,  # `retry_timeout` ends them
        "retry_timeout": timedelta(seconds=how.give_up_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=max(0.1, min(15.0, how.give_up_s / 4))),
            "base": 2,
        },
    }
    client: Any = {"timeout": seconds, "connect_timeout": min(seconds, timedelta(seconds=10))}
    # options of the client that are given here replace what the library finds in the environment
    allow_http = any(os.environ.get(one, "").lower() in ("1", "true") for one in _ALLOW_HTTP)
    client["allow_http"] = allow_http or str((how.config or {}).get("allow_http")).lower() == "true"
    from_url: Any = obstore.store.from_url
    _require_endpoints(bucket, how.config or {})
    try:
        return from_url(bucket, config=how.config, client_options=client, retry_config=retries)
    except (ValueError, TypeError, obstore.exceptions.BaseError) as error:
        raise UsageError(
            "an object store can't be asked with this configuration",
            file=bucket,
            found=_short(error),
            fix="look at the URL, the environment (AWS_..., GOOGLE_..., AZURE_...) and the key "
            "`store` of the config",
            id="object-store",
        ) from error


_ENDPOINT = re.compile(r"(AWS|AZURE_STORAGE|AZURE|GOOGLE)_ENDPOINT(_URL)?(_S3)?")


def _require_endpoints(bucket: str, settings: Mapping[str, Any]) -> None:
    """Raises UsageError for an endpoint that is no address: the library ends the process's call
    with a panic, which is no error of Python's."""
    said = {name: value for name, value in os.environ.items() if _ENDPOINT.fullmatch(name)}
    said |= {name: value for name, value in settings.items() if "endpoint" in name.lower()}
    for name, value in said.items():
        with suppress(ValueError):
            parts = urlsplit(str(value))
            is_web = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            if is_web and not re.search(r"\s", str(value)):
                continue
        raise UsageError(
            "an object store's endpoint is no address",
            file=bucket,
            parameter=name,
            expected="such as https://minio:9000",
            found=repr(value)[:200],
            fix="correct it, or leave it out for the provider's own",
            id="object-store",
        )


_first_process = 0  # that asked a store


def _require_first_process(path: StorePath) -> None:
    """Raises UsageError in a fork of a process that has asked a store: the library's threads did
    not come along, and whoever asks it there waits for ever."""
    global _first_process
    _first_process = _first_process or os.getpid()
    if _first_process != os.getpid():
        raise UsageError(
            "this process is a fork of one that has asked an object store, and can't ask itself",
            file=path,
            expected="a process that was spawned, or forked before",
            found=f"process {os.getpid()}, forked from {_first_process} or below it",
            fix='start it by spawn (multiprocessing.get_context("spawn")), as torchrun does',
            id="object-store",
        )


def _of(path: StorePath) -> Any:
    if len(path.parts) < 2:
        raise UsageError(
            "this URL names no bucket",
            expected="s3://bucket/run",
            found=repr(str(path)),
            fix="give the bucket, and the folder in it",
            id="object-store",
        )
    _require_first_process(path)
    return _client(path.bucket)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="ucp-store")


def _short(error: BaseException) -> str:
    """What the library says, in one line: it prints structures over many."""
    said = str(error).partition("\n\nDebug source")[0]
    return " ".join(f"{type(error).__name__}: {said}".split())[:400]


@contextmanager
def _asking(path: object, what: str) -> Iterator[None]:
    """Inside, what a store refuses is a StoreError that names the object; what is not there a
    FileNotFoundError."""
    from obstore import exceptions as known

    started = time.monotonic()
    try:
        yield
    except (known.BaseError, OSError, ValueError) as error:
        if "NoSuchBucket" in str(error):
            raise StoreError(
                "there is no such bucket",
                file=path,
                found=_short(error)[:120],
                fix="make it, or correct the URL or the endpoint",
            ) from error
        if isinstance(
            error, known.AlreadyExistsError | known.PreconditionError | FileNotFoundError
        ):
            raise
        if not _is_refusal(error):
            raise StoreError(
                f"the object store did not {what}",
                file=path,
                expected=f"an answer within {options().give_up_s:g} s, tried again and again",
                found=f"{_short(error)}, after {time.monotonic() - started:.1f} s",
            ) from error
        raise StoreError(
            f"the object store refuses: it does not let this job {what}",
            file=path,
            found=_short(error),
            fix="look at the credentials, and at what they are allowed (docs/stores.md lists it)",
        ) from error


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a store says with an error that it will never do what this job asked for."""
    from obstore import exceptions as known

    refused = known.PermissionDeniedError, known.UnauthenticatedError
    said = "403 Forbidden", "NoSuchBucket"
    return isinstance(error, refused) or any(one in str(error) for one in said)


def _head(path: StorePath) -> "_Status | None":
    """What is known of an object; None where there is none."""
    import obstore

    if listed := _listed_around(path):
        return listed.get(path)
    client = _of(path)
    try:
        with _asking(path, "say whether the object is there"):
            return _Status.of(obstore.head(client, path.key))
    except FileNotFoundError:
        return None


class _Status(NamedTuple):
    """As `os.stat_result`, of an object."""

    st_size: int
    st_mtime: float
    e_tag: str | None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> "_Status":
        return cls(meta["size"], meta["last_modified"].timestamp(), meta.get("e_tag"))

    @property
    def st_mtime_ns(self) -> int:
        return int(self.st_mtime * 1e9)


def _prefix(path: StorePath) -> str:
    return f"{path.key}/" if path.key else ""


def objects_below(path: StorePath) -> Iterator[tuple[StorePath, _Status]]:
    """All objects below a folder."""
    if (listed := _listed_around(path)) is not None:
        prefix = _prefix(path)
        yield from ((one, status) for one, status in listed.items() if one.key.startswith(prefix))
        return
    for page in _pages_below(path):
        yield from page


_PAGE_OBJECTS = 1000  # of one answer, as S3 gives them


def _pages_below(path: StorePath) -> Iterator[list[tuple[StorePath, _Status]]]:
    """All objects below a folder, as many at a time as one answer has."""
    import obstore

    prefix, client = _prefix(path), _of(path)
    with _asking(path, "list its objects"):
        for page in obstore.list(client, prefix=prefix or None, chunk_size=_PAGE_OBJECTS):
            names = [(meta["path"].removeprefix(prefix), meta) for meta in page]
            yield [
                (path / name, _Status.of(meta))
                for name, meta in names
                if name and meta["path"] != path.key
            ]


def _without_marks(files: Mapping[_T, _Status], folders: Collection[_T]) -> dict[_T, _Status]:
    """Objects without the empty ones that have the name of a folder: what a store's console makes
    when somebody makes a folder there."""
    return {n: one for n, one in files.items() if one.st_size or n not in folders}


def level_of(path: StorePath) -> tuple[list[str], dict[str, _Status]]:
    """Names of the folders in a folder, and of the objects."""
    import obstore

    if _listed_around(path) is not None:
        below = [(one.relative_to(path).parts, status) for one, status in objects_below(path)]
        folders = {parts[0] for parts, _ in below if len(parts) > 1}
        files = {parts[0]: status for parts, status in below if len(parts) == 1}
    else:
        prefix, client = _prefix(path), _of(path)
        with _asking(path, "list its objects"):
            found = obstore.list_with_delimiter(client, prefix=prefix or None)
        folders = {one.rstrip("/").removeprefix(prefix) for one in found["common_prefixes"]} - {""}
        files = {meta["path"].removeprefix(prefix): _Status.of(meta) for meta in found["objects"]}
    return sorted(folders), _without_marks({n: files[n] for n in sorted(files) if n}, folders)


# ---- one listing for a look


# The folder of the look that is under way, and all objects below it.
_LISTED: ContextVar["tuple[StorePath, dict[StorePath, _Status]] | None"]
_LISTED = ContextVar("listed", default=None)


def _listed_around(path: StorePath) -> dict[StorePath, _Status] | None:
    """What was listed for the look that is under way, where that is all of a path."""
    root, objects = _LISTED.get() or (None, {})
    return objects if root in (path, *path.parents) else None


def look_once(path: object, look: Callable[[], _T]) -> _T:
    """What `look` finds below a folder. A store lists it once meanwhile, where one answer has all;
    what is missed there is looked for once more, as somebody may have saved in between. Raises what
    `look` raises, StoreError."""
    root = location(cast("str", path)) if is_url(path) else None
    if not isinstance(root, StorePath) or not root.key or _listed_around(root) is not None:
        return look()
    objects = dict(next(_pages_below(root), []))
    if len(objects) >= _PAGE_OBJECTS - 1:  # there are more; the folder itself may be an object
        return look()
    folders = {folder for one in objects for folder in one.parents}
    token = _LISTED.set((root, _without_marks(objects, folders)))
    try:
        return look()
    except NotFoundError:
        _LISTED.set(None)
        return look()
    finally:
        _LISTED.reset(token)


def read_object(path: StorePath) -> tuple[bytes, str | None]:
    """All bytes of an object, and what tells this version of it from others. Raises
    FileNotFoundError, StoreError."""
    import obstore

    client = _of(path)
    for _ in range(_TRIES):
        with _asking(path, "send an object"):
            got = obstore.get(client, path.key)
            if got.meta["size"] > WHOLE_OBJECT_BYTES:
                raise DamagedFileError(
                    "the file is larger than any of its kind",
                    file=path,
                    expected=f"at most {WHOLE_OBJECT_BYTES} bytes",
                    found=f"{got.meta['size']} bytes",
                )
            data = bytes(got.bytes())
            if len(data) == got.meta["size"]:
                return data, got.meta.get("e_tag")
    raise StoreError("the object store sent fewer bytes than the object has", file=path)


# ---- reading


ENDS_BYTES = 128 * 2**10  # of the head and of the tail of an object, which are asked for once
SMALL_BYTES = 4 * 2**10  # what is asked for at least, and kept: of records, headers and scalars
_KEPT_PAGES = 256  # of so many bytes each, for what nobody said would be read
_ROW_GAP_BYTES = 256  # over which one request reads on, to the next row
REQUEST_BYTES = 8 * 2**20  # at most of one request


class _Asked(NamedTuple):
    """Bytes [first, end) of an object, which were asked for."""

    first: int
    end: int
    data: "Future[memoryview]"


def _first(asked: _Asked) -> int:
    return asked.first


class StoredObject(StoredFile):
    """An object that is read by ranges. All ranges are of one version of it: one that was replaced
    meanwhile is refused."""

    def __init__(self, path: StorePath, size_bytes: int, e_tag: str | None) -> None:
        self._at, self.path, self.size_bytes, self._e_tag = path, str(path), size_bytes, e_tag
        # by their first bytes; none overlap. Each until its last byte was read, but for small ones
        # and the ends of the object, which may be read again.
        self._asked: list[_Asked] = []
        self._pages: deque[_Asked] = deque()  # of them those that no `prefetch` asked for
        self._lock = threading.RLock()  # of what was asked
        self._is_closed = False

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._asked.clear()

    def prefetch(self, start_byte: int, size_bytes: int) -> None:
        """Asks now for what of these bytes nobody has asked for."""
        end = min(start_byte + size_bytes, self.size_bytes)
        with self._lock:
            at = self._unasked(start_byte, end)
            if at >= end:
                return
            end = max(end, min(at + SMALL_BYTES, self.size_bytes))
            while asked := self._asked_with(end - 1):
                end = asked.first
            low, high = (bisect_left(self._asked, byte, key=_first) for byte in (at, end))
            self._asked[low:high] = [
                self._ask(first, min(first + REQUEST_BYTES, end))
                for first in range(at, end, REQUEST_BYTES)
            ]

    def _ask(self, first: int, end: int) -> _Asked:
        return _Asked(first, end, _threads().submit(self._range, first, end))

    def read(self, start_byte: int, target: memoryview) -> None:
        if self._is_closed:
            raise UsageError("the file has been closed", file=self.path, fix="open it again")
        at, end = start_byte, start_byte + len(target)
        while at < end:
            data, first = self._piece(at, end)
            part = data[at - first : end - first]
            target[at - start_byte : at - start_byte + len(part)] = part
            at += len(part)

    def read_rows(self, starts: range, size_bytes: int, target: memoryview, places: range) -> None:
        """Several rows at a time, each by a request of its own; those that are near by one."""
        joined: list[tuple[int, int, list[tuple[int, int]]]] = []  # first byte, end, rows in it
        for start, place in zip(starts, places, strict=True):
            if self._unasked(start, start + size_bytes) >= start + size_bytes:
                self.read(start, target[place : place + size_bytes])
                continue
            if joined and 0 <= start - joined[-1][1] <= _ROW_GAP_BYTES:
                first, _, rows = joined.pop()
            else:
                first, rows = start, []
            joined.append((first, start + size_bytes, [*rows, (start, place)]))
        for batch in range(0, len(joined), _THREADS):
            runs = joined[batch : batch + _THREADS]
            pool = _threads()
            got = [pool.submit(self._range, first, end) for first, end, _ in runs]
            for future, (first, _, rows) in zip(got, runs, strict=True):
                data = future.result()
                for start, place in rows:
                    row = data[start - first : start - first + size_bytes]
                    target[place : place + size_bytes] = row

    def _asked_with(self, byte: int) -> _Asked | None:
        """What was asked for and has a byte."""
        number = bisect_right(self._asked, byte, key=_first) - 1
        found = self._asked[number] if number >= 0 else None
        return found if found is not None and byte < found.end else None

    def _unasked(self, at: int, end: int) -> int:
        """The first of bytes [at, end) that nobody asked for; no less than `end` where all were."""
        with self._lock:
            while at < end and (asked := self._asked_with(at)):
                at = asked.end
        return at

    def _piece(self, at: int, end: int) -> tuple[memoryview, int]:
        """Bytes that begin at `at` or before it, and their first byte."""
        with self._lock:
            asked = self._asked_with(at) or self._around(at, end)
        if asked is None:
            return self._range(at, end), at
        has_failed = asked.data.exception() is not None  # whoever reads it again asks again
        is_end = asked.first == 0 or asked.end == self.size_bytes
        is_kept = asked.end - asked.first <= (ENDS_BYTES if is_end else SMALL_BYTES)
        if has_failed or (end >= asked.end and not is_kept):
            self._drop(asked)
        return asked.data.result(), asked.first

    def _around(self, at: int, end: int) -> _Asked | None:
        """Asks for the head or the tail where it has these bytes, else for what lies around a few;
        None for many."""
        for first in (0, max(0, self.size_bytes - ENDS_BYTES)):
            if first <= at and end <= min(first + ENDS_BYTES, self.size_bytes):
                self.prefetch(first, ENDS_BYTES)
                return self._asked_with(at)
        if end - at > SMALL_BYTES or end > self.size_bytes:
            return None
        self.prefetch(at, SMALL_BYTES)
        if len(self._pages) == _KEPT_PAGES:
            self._drop(self._pages.popleft())
        page = self._asked_with(at)
        if page is not None:
            self._pages.append(page)
        return page

    def _drop(self, asked: _Asked) -> None:
        with self._lock:
            number = bisect_left(self._asked, asked.first, key=_first)
            if self._asked[number : number + 1] == [asked]:
                del self._asked[number]

    def _range(self, start: int, end: int) -> memoryview:
        """Bytes [start, end). Raises DamagedFileError where the object ends before, or was
        replaced; NotFoundError, StoreError."""
        if end > self.size_bytes:
            raise DamagedFileError(
                "the file is truncated",
                file=self.path,
                expected=f"{end - start} bytes from byte {start}",
                found=f"{max(0, self.size_bytes - start)} bytes",
            )
        if start == end:
            return memoryview(b"")
        found = 0
        for _ in range(_TRIES):
            data = self._sent(start, end)
            if len(data) == end - start:
                return data
            found = len(data)
        raise StoreError(
            "the object store sent fewer bytes than it was asked for",
            file=self.path,
            expected=f"{end - start} bytes from byte {start}",
            found=f"{found} bytes, {_TRIES} times",
        )

    def _sent(self, start: int, end: int) -> memoryview:
        import obstore

        wanted: Any = {"range": (start, end)}
        if self._e_tag:
            wanted["if_match"] = self._e_tag
        client = _of(self._at)
        try:
            with _asking(self.path, f"send bytes {start} to {end} of the object"):
                return memoryview(obstore.get(client, self._at.key, options=wanted).bytes())
        except FileNotFoundError as error:
            raise _no_object(self.path) from error
        except obstore.exceptions.PreconditionError as error:
            raise DamagedFileError(
                "the object was replaced while it was read",
                file=self.path,
                expected=f"version {self._e_tag}",
                found="another one",
                fix="read the checkpoint again",
            ) from error


def _no_object(path: str) -> NotFoundError:
    return NotFoundError(
        "the file does not exist", file=path, fix="restore it, or load another tag"
    )


CLAIM = ".ucp_saving"  # the object that says who writes a tag
# Beside a claim: what else lies in the tag is whole, as DeepSpeed's files without a manifest are.
BESIDE = ".ucp_saving_beside"
AGAIN = ".ucp_save_"  # how the folder of a save begins into a tag that is there already
STORED_IN = "stored_in"  # the manifest's word for that folder
CLEAN_UP = "where nobody writes it any more, `megatron-ucp ls --remove-left-overs` removes it"
COMMITS = (FILE_NAME, "ucp_export.json")  # what is written last, and makes a folder whole


class StoreFolder(Folder):
    """A folder in an object store, which holds what it held when it was first asked. A save that
    was not finished holds nothing."""

    def __init__(self, path: StorePath) -> None:
        self._at = path
        self._levels: dict[str, dict[str, _Status | None]] = {}  # None of a folder
        self._below = ""  # the folder in it that holds the objects of the save that counts
        # files whose ends are on their way; None of those that were opened
        self._begun: dict[str, StoredObject | None] = {}

    def __str__(self) -> str:
        return str(self._at)

    def __truediv__(self, name: str) -> str:
        return f"{self}/{name}"

    def name_of(self, path: str) -> str:
        """Of the path that `/` gives, and of the one that an object has."""
        return path.removeprefix(f"{self}/").removeprefix(self._below)

    def names(self, below: str = "") -> list[str]:
        return sorted(self._level(below))

    def __contains__(self, name: str) -> bool:
        return self._found(name) is not _NOTHING

    def is_file(self, name: str) -> bool:
        return isinstance(self._found(name), _Status)

    def is_folder(self, name: str) -> bool:
        return self._found(name) is None

    def size_bytes(self, name: str) -> int:
        return self._status(name).st_size

    def modified(self, name: str) -> float:
        return self._status(name).st_mtime

    def open(self, name: str) -> StoredFile:
        file = self._begun.get(name) or self._opened(name)
        self._begun[name] = None
        return file

    def prefetch(self, names: Iterable[str], ends_bytes: int = 0) -> None:
        for name in names:
            if name not in self._begun and self.is_file(name):
                self._begun[name] = file = self._opened(name)
                is_small = file.size_bytes <= ENDS_BYTES
                ends = ENDS_BYTES if is_small or not ends_bytes else ends_bytes
                file.prefetch(0, ends)
                file.prefetch(max(0, file.size_bytes - ends), ends)

    def _opened(self, name: str) -> StoredObject:
        status = self._status(name)
        return StoredObject(self._object(name), status.st_size, status.e_tag)

    def listing(self) -> Any:
        return self._below, self._levels

    def take_listing(self, listing: Any) -> None:
        self._below, self._levels = listing

    def _status(self, name: str) -> _Status:
        found = self._found(name)
        if not isinstance(found, _Status):
            raise _no_object(self / name)
        return found

    def _object(self, name: str) -> StorePath:
        """The object of a name."""
        return self._at / (name if name == FILE_NAME else f"{self._below}{name}")

    def _found(self, name: str) -> "_Status | object | None":
        below, _, last = name.rpartition("/")
        return self._level(below).get(last, _NOTHING)

    def _level(self, below: str) -> dict[str, "_Status | None"]:
        if "" not in self._levels:
            self._levels[""] = self._first_level()
        if below not in self._levels and below.split("/")[0] in self._levels[""]:
            self._all_levels()
        return self._levels.get(below, {})

    def _first_level(self) -> dict[str, "_Status | None"]:
        folders, files = level_of(self._at)
        again = [name for name in folders if name.startswith(AGAIN)]
        if _is_unfinished(files) and self._at not in _SHOWN:
            return {}
        if again and FILE_NAME in files:
            self._below = stored_in(self._at / FILE_NAME)
            if self._below:
                folders, own = level_of(self._at / self._below)
                return {**dict.fromkeys(folders), **own, FILE_NAME: files[FILE_NAME]}
        shown = [name for name in folders if name not in again]
        return {
            **dict.fromkeys(shown),
            **{n: s for n, s in files.items() if n not in (CLAIM, BESIDE)},
        }

    def _all_levels(self) -> None:
        """The folders in it, by one listing of all: there may be thousands."""
        root = self._at / self._below if self._below else self._at
        for path, status in objects_below(root):
            parts = path.relative_to(root).parts
            if len(parts) == 1 or parts[0].startswith(AGAIN):
                continue
            for depth in range(1, len(parts)):
                here = self._levels.setdefault("/".join(parts[:depth]), {})
                here[parts[depth]] = status if depth == len(parts) - 1 else None


_NOTHING = object()


def stored_in(manifest: StorePath) -> str:
    """The folder in a tag, with a slash, in which its objects lie; empty where that is the tag."""
    # its reader says what is wrong with it
    with suppress(ValueError, AttributeError, RecursionError, FileNotFoundError):
        run = json.loads(read_object(manifest)[0]).get("run", {})
        found = run.get(STORED_IN, "")
        if isinstance(found, str) and re.fullmatch(rf"{re.escape(AGAIN)}\w+/", found):
            return found
    return ""


def is_left_over(path: Location) -> bool:
    """Whether a folder of a store is a save that was not finished, or is on its way."""
    return isinstance(path, StorePath) and _is_unfinished(level_of(path)[1])


def _is_unfinished(files: Collection[str]) -> bool:
    return CLAIM in files and not any(name in files for name in (BESIDE, *COMMITS))


_SHOWN: set[Location] = set()


@contextmanager
def unfinished_shown(folder: Location) -> Iterator[None]:
    """Inside, a folder is read though it is not finished: its writer looks at what it wrote."""
    _SHOWN.add(folder)
    try:
        yield
    finally:
        _SHOWN.discard(folder)


# ---- writing


PART_BYTES, _PARTS = 8 * 2**20, 9000  # of an upload; S3 takes 10,000 parts at most
_AT_ONCE = 8  # parts of one object


def put_object(path: StorePath, data: bytes) -> None:
    """Writes an object, whatever was there. Raises StoreError."""
    import obstore

    client = _of(path)
    with _asking(path, "take an object"):
        obstore.put(client, path.key, data, use_multipart=False)


def upload(path: StorePath, chunks: Iterable[bytes], size_bytes: int) -> None:
    """Writes an object in parts, as `chunks` gives its bytes; there is nothing of it before the
    last one. Raises StoreError, and what `chunks` raises."""
    if size_bytes <= PART_BYTES:
        put_object(path, b"".join(bytes(chunk) for chunk in chunks))
        return
    part_bytes = max(PART_BYTES, -(-size_bytes // _PARTS))
    parts: Queue[bytes | None] = Queue(maxsize=2)  # None: there will be no more
    sent = _uploads().submit(_send, path, parts, part_bytes)
    last: bytes | None = None  # what was sent is taken back, where `chunks` raises
    try:
        for part in _joined(chunks, part_bytes):
            _give(parts, part, sent)
        last = b""
    finally:
        _give(parts, last, sent)
        if last is None:  # whoever removes what there is must not be overtaken
            wait([sent], timeout=options().timeout_s)
    sent.result()
    found = _head(path)
    if found is None or found.st_size != size_bytes:
        raise StoreError(
            "the object store does not have the object that it took",
            file=path,
            expected=f"{size_bytes} bytes",
            found="no object" if found is None else f"{found.st_size} bytes",
        )


@cache
def _uploads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="ucp-upload")


def _give(parts: "Queue[bytes | None]", part: bytes | None, sent: "Future[None]") -> None:
    """Hands a part over, unless the upload has ended by itself."""
    while not sent.done():
        with suppress(Full):
            parts.put(part, timeout=0.2)
            return


def _send(path: StorePath, parts: "Queue[bytes | None]", part_bytes: int) -> None:
    """Sends parts as they come, the empty one last. In a thread of its own: what the library asks
    for bytes must not ask the library for anything, and a source may be a store too."""
    import obstore

    def given() -> Iterator[bytes]:
        while part := parts.get():
            yield part
        if part is None:
            raise ValueError("the source of the bytes failed")

    client = _of(path)
    with (
        _asking(path, "take an object"),
        suppress(FileNotFoundError),  # the answer to the last request was lost, and asked again
    ):
        obstore.put(client, path.key, given(), chunk_size=part_bytes, max_concurrency=_AT_ONCE)


def _joined(chunks: Iterable[bytes], least: int) -> Iterator[bytes]:
    """Runs of at least so many bytes; the last one may be shorter."""
    held, size = list[bytes](), 0
    for chunk in chunks:
        held.append(chunk)
        size += len(chunk)
        if size >= least:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def put_if(path: StorePath, data: bytes, e_tag: str | None) -> bool:
    """Writes an object where it is still that version (None: where there is none); whether it did.
    `data` must be like no other: a lost answer is told from a lost race by it. Raises
    StoreError."""
    import obstore

    client = _of(path)
    mode: Any = "create" if e_tag is None else {"e_tag": e_tag}
    ends = time.monotonic() + options().give_up_s
    for pause in chain((0.1, 0.4), repeat(1.0)):
        try:
            with _asking(path, "take an object"):
                obstore.put(client, path.key, data, mode=mode, use_multipart=False)
            return True
        except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
            there = object_or_none(path)
            if there is not None or e_tag is not None:
                return there is not None and there[0] == data
            # else somebody else wrote at that moment, and failed
        except StoreError as error:  # the library does not ask again what has a condition
            if _is_refusal(error.__cause__) or time.monotonic() > ends:
                raise
            there = object_or_none(path)
            if there is not None and there[0] == data:
                return True
        if time.monotonic() > ends:
            break
        time.sleep(pause)
    return False


def object_or_none(path: StorePath) -> tuple[bytes, str | None] | None:
    try:
        return read_object(path)
    except FileNotFoundError:
        return None


def delete(paths: Iterable[StorePath]) -> None:
    """Removes objects, those that are not there too. Raises StoreError."""
    import obstore

    found = [*paths]
    for at in range(0, len(found), 1000):
        batch = found[at : at + 1000]
        client = _of(batch[0])
        with _asking(batch[0], "remove an object"), suppress(FileNotFoundError):
            obstore.delete(client, [one.key for one in batch])


def keeps_conditions(folder: StorePath) -> bool:
    """Whether the store of a folder refuses a write whose condition is not met, as all others here
    rely on: the second of two writes of a new object, and one of another version. It is tried once
    for each bucket."""
    if folder.bucket not in _KEEPS:
        probe = folder / f".ucp_probe_{uuid.uuid4().hex}"
        try:
            put_if(probe, b"1", None)
            _KEEPS[folder.bucket] = not any(put_if(probe, b"2", tag) for tag in (None, '"none"'))
        finally:
            delete([probe])
    return _KEEPS[folder.bucket]


_KEEPS: dict[str, bool] = {}  # by the bucket
