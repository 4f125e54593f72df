"""An object store like S3 for tests: HTTP, in memory, in a process of its own, with faults.

    with ObjectServer() as server:
        server.fault("status", "PART", "bucket/run/*", value=503, times=2)
        os.environ.update(server.environment())
        ...
        assert server.count("GET") == 3

It has what obstore asks for: objects by ranges, conditional puts, lists, copies and multipart
uploads. It checks no signatures. A key here is `bucket/path`, and a bucket is there from its first
object on. An ETag follows from the bytes of an object, as S3's do.

What a request is called: GET, HEAD, PUT, DELETE, COPY, LIST, DELETE_MANY, and of multipart uploads
CREATE, PART, COMPLETE, ABORT, UPLOADS.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import Request as HttpRequest
from urllib.request import urlopen
from xml.etree import ElementTree
from xml.sax.saxutils import escape

FOR_EVER = -1
# What `value` says of each kind of fault.
KINDS = {
    "delay": "seconds before the request's body is read",
    "stall": "bytes of the answer's body, after which nothing comes",
    "trickle": "bytes of the answer's body that come in a second",
    "cut": "bytes of the body, of the request or else of the answer; then the server hangs up",
    "lost": "nothing: what is asked for is done, and the server hangs up without an answer",
    "status": "the answer's status, in place of what is asked for",
    "flip": "the byte of the answer's body that has one bit flipped",
    "short": "bytes of which the answer's body is shorter, as its Content-Length says",
    "unconditional": "nothing: If-Match and If-None-Match are not looked at",
}
CODES = {403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange"}
CODES |= {409: "ConditionalRequestConflict", 500: "InternalError", 503: "SlowDown"}


@dataclass
class Fault:
    """What goes wrong with `times` requests, of those that its patterns name, after `after`."""

    kind: str
    request: str = "*"
    key: str = "*"
    value: float = 0
    times: int = FOR_EVER
    after: int = 0


@dataclass
class Request:
    """A request that came in, as it was answered. Of one that was cut the status is 0."""

    name: str
    key: str
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    first_byte: int | None = None
    began_s: float = 0.0
    took_s: float = 0.0


# ---- the server's process


class Stored:
    """An object as it was put."""

    def __init__(self, data: bytes) -> None:
        self.data, self.etag, self.time_s = data, etag(data), time.time()


@dataclass
class Upload:
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class Store:
    """Objects, uploads, faults and what was asked, under one lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, Upload] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.page = 1000
        self.made_uploads = 0

    def put(self, key: str, data: bytes) -> str:
        """The ETag. Whoever has the lock calls it."""
        self.objects[key] = held = Stored(data)
        return held.etag

    def faults_of(self, name: str, key: str) -> dict[str, float]:
        found: dict[str, float] = {}
        with self.lock:
            for fault in self.faults:
                if fault.times == 0 or fault.kind in found:
                    continue
                if fnmatchcase(name, fault.request) and fnmatchcase(key, fault.key):
                    if fault.after:
                        fault.after -= 1
                    else:
                        fault.times -= fault.times > 0
                        found[fault.kind] = fault.value
        return found


def etag(data: bytes) -> str:
    return f'"{zlib.crc32(data):08x}-{len(data)}"'


class HangUp(Exception):
    """The connection ends here, without a further byte."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Listener"

    def handle_any(self) -> None:
        began, self.stored = time.monotonic(), self.server.stored
        parts = urlsplit(self.path)
        self.key = unquote(parts.path).strip("/")
        self.query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        self.name = self.request_name()
        self.told = Request(self.name, self.key, began_s=began)
        with self.stored.lock:
            self.stored.requests.append(self.told)
        try:
            if self.server.refusing:
                raise HangUp
            self.faults = self.stored.faults_of(self.name, self.key)
            time.sleep(self.faults.get("delay", 0))
            body = self.body()
            if "status" in self.faults:
                self.refuse(int(self.faults["status"]))
            else:
                getattr(self, f"on_{self.name.lower()}")(body)
        except (HangUp, ConnectionError):
            self.close_connection = True
        self.told.took_s = time.monotonic() - began

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def request_name(self) -> str:
        if "uploads" in self.query:
            return "CREATE" if self.command == "POST" else "UPLOADS"
        if "uploadId" in self.query:
            return {"PUT": "PART", "POST": "COMPLETE", "DELETE": "ABORT"}[self.command]
        if "x-amz-copy-source" in self.headers:
            return "COPY"
        if "/" not in self.key:
            return {"GET": "LIST", "POST": "DELETE_MANY"}.get(self.command, self.command)
        return self.command

    def body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        cut = size and "cut" in self.faults
        data = self.rfile.read(min(size, int(self.faults["cut"])) if cut else size)
        self.told.bytes_in = len(data)
        if cut:
            raise HangUp
        return data

    # ---- answers

    def answer(self, status: int, body: bytes | memoryview = b"", **headers: str) -> None:
        faults, size = self.faults, len(body)
        if "lost" in faults:
            raise HangUp
        if "flip" in faults and size:
            body = bytearray(body)
            body[min(int(faults["flip"]), size - 1)] ^= 1
        body = memoryview(body)[: max(0, size - int(faults.get("short", 0)))]
        self.send_response(status)
        self.send_header("Content-Length", headers.pop("Length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.told.status = status
        if self.command == "HEAD":
            return
        ends = [int(faults[kind]) for kind in ("cut", "stall") if kind in faults]
        for piece in self.pieces(body[: min(ends)] if ends else body):
            self.told.bytes_out += len(piece)  # before a client that has them can ask
            self.wfile.write(piece)
        if "stall" in faults:
            self.connection.recv(1)  # until the client hangs up
        if ends:
            raise HangUp

    def pieces(self, body: memoryview) -> Iterator[memoryview]:
        if "trickle" not in self.faults:
            yield body
            return
        step = max(1, int(self.faults["trickle"] / 100))
        for start in range(0, len(body), step):
            time.sleep(0.01)
            yield body[start : start + step]

    def answer_xml(self, root: str, inner: str, status: int = 200) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}>{inner}</{root}>'
        self.answer(status, text.encode(), Content_Type="application/xml")

    def refuse(self, status: int) -> None:
        code = CODES.get(status, "InternalError")
        self.answer_xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)

    def condition(self) -> int:
        """The status with which the request's conditions refuse it; 0 where they hold. With the
        lock, so that nothing changes until what it allows is done."""
        if "unconditional" in self.faults:
            return 0
        held = self.stored.objects.get(self.key)
        wanted, unwanted = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if wanted is not None:
            if held is None:
                return 404
            return 0 if wanted in ("*", held.etag) else 412
        if unwanted is not None and held is not None and unwanted in ("*", held.etag):
            return 412 if self.command in ("PUT", "POST") else 304
        return 0

    # ---- objects

    def on_get(self, _: bytes) -> None:
        held = self.stored.objects.get(self.key)
        if held is None:
            return self.refuse(404)
        if status := self.condition():
            return self.refuse(status)
        headers = {"ETag": held.etag, "Accept-Ranges": "bytes"}
        headers["Last_Modified"] = formatdate(held.time_s, usegmt=True)
        size = len(held.data)
        if self.command == "HEAD":
            return self.answer(200, Length=str(size), **headers)
        low, high = 0, size
        if unit := self.headers.get("Range"):
            first, _, last = unit.removeprefix("bytes=").partition("-")
            low = int(first) if first else max(0, size - int(last))
            high = min(size, int(last) + 1) if first and last else size
            if low >= size:
                return self.refuse(416)
            headers["Content_Range"] = f"bytes {low}-{high - 1}/{size}"
        self.told.first_byte = low
        self.answer(206 if unit else 200, memoryview(held.data)[low:high], **headers)

    on_head = on_get

    def on_put(self, body: bytes) -> None:
        with self.stored.lock:
            status = self.condition()
            made = "" if status else self.stored.put(self.key, body)
        return self.refuse(status) if status else self.answer(200, ETag=made)

    def on_copy(self, _: bytes) -> None:
        with self.stored.lock:
            held = self.stored.objects.get(unquote(self.headers["x-amz-copy-source"]).strip("/"))
            status = 404 if held is None else self.condition()
            made = "" if status or held is None else self.stored.put(self.key, held.data)
        if status:
            return self.refuse(status)
        self.answer_xml("CopyObjectResult", f"<ETag>{escape(made)}</ETag>")

    def on_delete(self, _: bytes) -> None:
        with self.stored.lock:
            self.stored.objects.pop(self.key, None)
        self.answer(204)

    def on_delete_many(self, body: bytes) -> None:
        found = [held.text or "" for held in ElementTree.fromstring(body).iter() if is_key(held)]
        with self.stored.lock:
            for name in found:
                self.stored.objects.pop(f"{self.key}/{name}", None)
        told = (f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in found)
        self.answer_xml("DeleteResult", "".join(told))

    def on_list(self, _: bytes) -> None:
        bucket, prefix = f"{self.key}/", self.query.get("prefix", "")
        delimiter, after = self.query.get("delimiter"), self.query.get("continuation-token", "")
        after = max(after, self.query.get("start-after", ""))
        with self.stored.lock:
            held = {k.removeprefix(bucket): v for k, v in self.stored.objects.items()
                    if k.startswith(bucket + prefix)}  # fmt: skip
        entries: dict[str, str] = {}
        for name in sorted(held):
            below, found, _ = name.removeprefix(prefix).partition(delimiter or "/")
            if delimiter and found:
                name = prefix + below + delimiter
                text = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                when, size = time.gmtime(held[name].time_s), len(held[name].data)
                text = f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size>"
                text += f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', when)}"
                text += f"</LastModified><ETag>{escape(held[name].etag)}</ETag></Contents>"
            if name > after:
                entries[name] = text
        shown = list(entries)[: self.stored.page]
        more = len(entries) > len(shown)
        inner = f"<Name>{escape(self.key)}</Name><KeyCount>{len(shown)}</KeyCount>"
        inner += f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        if more:
            inner += f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>"
        self.answer_xml("ListBucketResult", inner + "".join(entries[name] for name in shown))

    # ---- multipart uploads

    def on_create(self, _: bytes) -> None:
        with self.stored.lock:
            self.stored.made_uploads += 1
            number = f"upload-{self.stored.made_uploads}"
            self.stored.uploads[number] = Upload(self.key)
        bucket, _, path = self.key.partition("/")
        inner = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(path)}</Key>"
        self.answer_xml("InitiateMultipartUploadResult", f"{inner}<UploadId>{number}</UploadId>")

    def on_part(self, body: bytes) -> None:
        with self.stored.lock:
            upload = self.stored.uploads.get(self.query["uploadId"])
            if upload is not None:
                upload.parts[int(self.query["partNumber"])] = body
        return self.refuse(404) if upload is None else self.answer(200, ETag=etag(body))

    def on_complete(self, body: bytes) -> None:
        numbers = [int(held.text or 0) for held in ElementTree.fromstring(body).iter()
                   if held.tag.endswith("PartNumber")]  # fmt: skip
        with self.stored.lock:
            upload = self.stored.uploads.get(self.query["uploadId"])
            status, made = 404 if upload is None else self.condition(), ""
            if upload is not None and not status:
                made = self.stored.put(self.key, b"".join(upload.parts[n] for n in numbers))
                del self.stored.uploads[self.query["uploadId"]]
        if status:
            return self.refuse(status)
        self.answer_xml("CompleteMultipartUploadResult", f"<ETag>{escape(made)}</ETag>")

    def on_abort(self, _: bytes) -> None:
        with self.stored.lock:
            known = self.stored.uploads.pop(self.query["uploadId"], None)
        return self.refuse(404) if known is None else self.answer(204)

    def on_uploads(self, _: bytes) -> None:
        bucket = f"{self.key}/"
        with self.stored.lock:
            held = {n: u.key.removeprefix(bucket) for n, u in self.stored.uploads.items()
                    if u.key.startswith(bucket + self.query.get("prefix", ""))}  # fmt: skip
        inner = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{number}</UploadId></Upload>"
            for number, key in held.items()
        )
        self.answer_xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{inner}")

    def log_message(self, *_: Any) -> None:
        pass


def is_key(element: ElementTree.Element) -> bool:
    return element.tag.rpartition("}")[2] == "Key"


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    refusing = False

    def __init__(self, stored: Store, port: int = 0, handler: Any = Handler) -> None:
        self.stored = stored
        super().__init__(("127.0.0.1", port), handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def handle_error(self, *_: Any) -> None:
        pass  # a client that hung up

    def refuse(self) -> None:
        """Nobody listens any more; open connections end with their next request."""
        self.refusing = True
        self.shutdown()
        self.server_close()


class Control:
    """What a test asks the server's process to do, one method each."""

    def __init__(self) -> None:
        self.stored = Store()
        self.listener = Listener(self.stored)

    def port(self) -> int:
        return self.listener.server_port

    def faults(self, faults: list[dict[str, Any]]) -> None:
        with self.stored.lock:
            self.stored.faults += [Fault(**fault) for fault in faults]

    def heal(self) -> None:
        with self.stored.lock:
            self.stored.faults.clear()

    def requests(self) -> list[dict[str, Any]]:
        with self.stored.lock:
            return [asdict(request) for request in self.stored.requests]

    def forget_requests(self) -> None:
        with self.stored.lock:
            self.stored.requests.clear()

    def empty(self) -> None:
        """As the server began."""
        self.accept()
        with self.stored.lock:
            for held in (self.stored.objects, self.stored.uploads, self.stored.faults):
                held.clear()
            self.stored.requests.clear()
            self.stored.page = 1000

    def page(self, keys: int) -> None:
        """How many names a list has at most, before it is continued."""
        self.stored.page = keys

    def objects(self) -> dict[str, int]:
        with self.stored.lock:
            return {key: len(held.data) for key, held in sorted(self.stored.objects.items())}

    def uploads(self) -> dict[str, str]:
        with self.stored.lock:
            return {number: upload.key for number, upload in self.stored.uploads.items()}

    def copy_in(self, folder: str, prefix: str) -> None:
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                with self.stored.lock:
                    self.stored.put(f"{prefix}/{path.relative_to(folder)}", data)

    def copy_out(self, prefix: str, folder: str) -> None:
        for key, held in sorted(self.stored.objects.items()):
            if key.startswith(f"{prefix}/"):
                path = Path(folder, key.removeprefix(f"{prefix}/"))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(held.data)

    def replace_after(self, key: str, path: str, gets: int) -> None:
        """Another object takes the place of one, once that was read so often."""
        data = Path(path).read_bytes()

        def wait() -> None:
            while sum(one.name == "GET" and one.key == key for one in self.stored.requests) < gets:
                time.sleep(0.0005)
            with self.stored.lock:
                self.stored.put(key, data)

        threading.Thread(target=wait, daemon=True).start()

    def remove(self, prefix: str) -> None:
        with self.stored.lock:
            for key in [key for key in self.stored.objects if key.startswith(f"{prefix}/")]:
                del self.stored.objects[key]

    def refuse(self) -> None:
        if not self.listener.refusing:
            self.listener.refuse()

    def accept(self) -> None:
        if self.listener.refusing:
            self.listener = Listener(self.stored, self.listener.server_port)


def main() -> None:
    """Prints the ports of the store and of its control, and ends with its standard input."""
    control = Control()

    class ControlHandler(Handler):
        def handle_any(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.faults, self.told = {}, Request("CONTROL", "")
            answer = getattr(control, said["do"])(**said["with"])
            self.answer(200, json.dumps(answer).encode())

        do_POST = handle_any

    by_control = Listener(control.stored, handler=ControlHandler)
    print(control.port(), by_control.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


# ---- the side of a test


class Served:
    """A server in a process of its own, which ends with its standard input. `endpoint` is its
    address."""

    def __init__(self, *words: str) -> None:
        root, pipe = Path(__file__).parents[1], subprocess.PIPE
        command = [sys.executable, *words]
        self._process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self._ports = self._process.stdout.readline().split()
        self.endpoint = f"http://127.0.0.1:{self._ports[0]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._process.communicate(timeout=20)

    def environment(self) -> dict[str, str]:
        """What obstore reads, of the server and of credentials for it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }

    def pause(self) -> None:
        """The host hangs: connections are taken, and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)


class MotoServer(Served):
    """moto's S3, which is written by others than this package."""

    def __init__(self) -> None:
        super().__init__("-c", SERVES_MOTO)
        self.empty()

    def empty(self) -> None:
        """No objects, and one bucket, `bucket`."""
        for method, path in (("POST", "moto-api/reset"), ("PUT", "bucket")):
            said = HttpRequest(f"{self.endpoint}/{path}", b"", method=method)
            urlopen(said, timeout=60).close()


SERVES_MOTO = """
import logging, os, sys
from moto.server import ThreadedMotoServer
logging.disable()
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
os._exit(0)
"""


@dataclass
class Remote:
    """The server above, which a test asks and tells; `control` is where. Ranks of a test get it
    too."""

    control: str

    def ask(self, what: str, **said: Any) -> Any:
        """Calls a method of `Control`."""
        data = json.dumps({"do": what, "with": said}).encode()
        with urlopen(HttpRequest(self.control, data), timeout=60) as answer:
            return json.loads(answer.read())

    def fault(self, kind: str, request: str = "*", key: str = "*", **more: Any) -> None:
        """Plants a fault, beside those that are there."""
        assert kind in KINDS, kind
        self.ask("faults", faults=[asdict(Fault(kind, request, key, **more))])

    def requests(self, name: str = "*", key: str = "*") -> list[Request]:
        told = [Request(**request) for request in self.ask("requests")]
        return [r for r in told if fnmatchcase(r.name, name) and fnmatchcase(r.key, key)]

    def count(self, name: str = "*", key: str = "*") -> int:
        return len(self.requests(name, key))

    def depth(self) -> int:
        """How many requests were waited for one after the other: the longest row of which each
        began when the one before it had its answer."""
        depth, ended = 0, 0.0
        for one in sorted(self.requests(), key=lambda one: one.began_s + one.took_s):
            if one.began_s >= ended:
                depth, ended = depth + 1, one.began_s + one.took_s
        return depth

    def counts(self) -> Counter[str]:
        return Counter(request.name for request in self.requests())


class ObjectServer(Served, Remote):
    """The server above, in a process of its own."""

    def __init__(self) -> None:
        Served.__init__(self, "-m", "tests.object_server")
        Remote.__init__(self, f"http://127.0.0.1:{self._ports[1]}")


if __name__ == "__main__":
    main()
