"""A process group for the ranks of the tests that is called gloo and is not: ranks of one machine
send each other bytes over Unix sockets, from their own threads.

gloo hands each operation to a second thread, which hands each message to a third. On a machine
with two cores and four ranks the hand-overs of one all-reduce of a hundred numbers take five
milliseconds of processor time; here they take one, and the tests consist of thousands of them.
`TESTS_COMM=gloo` takes gloo itself, which `tests/run.sh all` does.

What gloo refuses is refused here too (averages, gathers of different shapes), and more: a message
says which operation it belongs to, so ranks whose operations differ fail instead of taking each
other's values. Sums go in the order of the ranks.
"""

import contextlib
import hashlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

FRAME = struct.Struct("<12s12sQ")  # which operation, what it does, bytes of payload
CHUNK = 1 << 20
FLUSH_S = 5.0
Tensors = Sequence[torch.Tensor]
Key = tuple[bytes, bytes]  # which operation it is, the same on all ranks; what it does


def as_bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    content: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(content)


def like(payload: bytearray, tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a rank sent, in the shape and dtype of `tensor`."""
    expected = tensor.numel() * tensor.element_size()
    if len(payload) != expected:
        raise RuntimeError(
            f"a rank sent {len(payload)} bytes for {tuple(tensor.shape)} of {tensor.dtype}, "
            f"which are {expected}"
        )
    if not payload:
        return torch.empty_like(tensor)
    return torch.frombuffer(payload, dtype=tensor.dtype).view(tensor.shape)


REDUCED: dict[Any, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.PRODUCT: torch.Tensor.mul_,
    dist.ReduceOp.MIN: lambda a, b: torch.minimum(a, b, out=a),
    dist.ReduceOp.MAX: lambda a, b: torch.maximum(a, b, out=a),
    dist.ReduceOp.BAND: torch.Tensor.bitwise_and_,
    dist.ReduceOp.BOR: torch.Tensor.bitwise_or_,
    dist.ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


def fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """As gloo does it: behind autograd's back."""
    tensor.data.copy_(values)


def adder(operation: Any) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    for known, function in REDUCED.items():
        if operation == known:
            return function
    raise RuntimeError(f"gloo has no {operation}")


def reduced(parts: Tensors, operation: Any) -> torch.Tensor:
    """In the order of the ranks, so that all get the same bits."""
    add = adder(operation)
    total = parts[0].clone()
    for part in parts[1:]:
        add(total, part)
    return total


def shares(whole: torch.Tensor, part: torch.Tensor, members: int) -> list[torch.Tensor]:
    """One after the other, in the shape of `part`."""
    if whole.numel() != members * part.numel():
        raise RuntimeError(f"{tuple(whole.shape)} is not {members} times {tuple(part.shape)}")
    return [each.view(part.shape) for each in whole.view(-1).tensor_split(members)]


def rows(whole: torch.Tensor, sizes: Any, members: int) -> Tensors:
    """Of each member, `sizes` of them or as many as of the others."""
    if sizes is not None and len(sizes):  # a list or an array of numpy
        return whole.split([int(size) for size in sizes])
    if len(whole) % members:
        raise RuntimeError(f"{len(whole)} rows can't be shared by {members} ranks")
    return whole.tensor_split(members)


def together(works: Sequence["Work"]) -> "Work":
    return Work(lambda: [work.wait() for work in works])


class Mailboxes:
    """This process's connections to all others of a job."""

    def __init__(self, rank: int, world: int, path: str, timeout: timedelta) -> None:
        self.timeout = timeout.total_seconds()
        self.thread = threading.get_ident()
        self.poll = select.poll()
        self.peers: dict[int, socket.socket] = {}
        self.partial: dict[int, bytearray] = {}
        self.unsent: dict[int, deque[memoryview]] = {}
        self.arrived: dict[tuple[int, bytes], deque[tuple[bytes, bytearray]]] = {}
        self.of_handle: dict[int, int] = {}
        self.gone: set[int] = set()
        self._connect(rank, world, path)

    def _connect(self, rank: int, world: int, path: str) -> None:
        """Each rank listens for those above it and calls those below."""
        ours = Path(f"{path}.{rank}")
        with socket.socket(socket.AF_UNIX) as server:
            server.settimeout(self.timeout)
            server.bind(str(ours))
            server.listen(world)
            for other in range(rank):
                self._add(other, self._call(f"{path}.{other}", rank))
            for _ in range(rank + 1, world):
                peer, _ = server.accept()
                self._add(int.from_bytes(peer.recv(1)), peer)
        ours.unlink()

    def _call(self, path: str, rank: int) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        ends = time.monotonic() + self.timeout
        while peer.connect_ex(path):
            if time.monotonic() > ends:
                raise RuntimeError(f"no rank listens at {path}")
            time.sleep(0.001)
        peer.sendall(bytes([rank]))
        return peer

    def _add(self, other: int, peer: socket.socket) -> None:
        self.peers[other] = peer
        self.of_handle[peer.fileno()] = other
        self.partial[other] = bytearray()
        self.unsent[other] = deque()
        self.poll.register(peer, select.POLLIN)

    def close(self) -> None:
        """Send what is unsent. Whoever still waits for this rank hears that it is gone."""
        ends = time.monotonic() + FLUSH_S
        with contextlib.suppress(RuntimeError):
            while any(self.unsent.values()) and self.progress(ends - time.monotonic()):
                pass
        for peer in self.peers.values():
            peer.close()

    def post(self, other: int, key: Key, payload: memoryview) -> None:
        """Send, or keep what the connection doesn't take until somebody waits."""
        if threading.get_ident() != self.thread:
            raise RuntimeError("only the thread that made the process groups may communicate")
        waiting = self.unsent[other]
        frame = [FRAME.pack(*key, len(payload)), payload]
        if waiting:
            waiting.extend((memoryview(frame[0]), memoryview(bytes(payload))))
            return
        sent = self._send(other, frame)
        left = sum(map(len, frame)) - sent
        if left:
            waiting.append(memoryview(b"".join(frame))[sent:])
            self.poll.modify(self.peers[other], select.POLLIN | select.POLLOUT)

    def _send(self, other: int, parts: Sequence[Any]) -> int:
        try:
            return self.peers[other].sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise RuntimeError(f"rank {other} is gone: {error}") from error

    def take(self, other: int, key: Key) -> bytearray:
        """The next message of `other` for an operation, when it is there."""
        number, what = key
        place = other, number
        if place not in self.arrived:
            self._receive(other)
        ends = time.monotonic() + self.timeout
        while place not in self.arrived:
            if other in self.gone:
                raise RuntimeError(f"rank {other} is gone: it has closed its connection")
            if not self.progress(ends - time.monotonic()):
                raise RuntimeError(f"timed out after {self.timeout} s: {what!r} of rank {other}")
        theirs, message = self.arrived[place].popleft()
        if not self.arrived[place]:
            del self.arrived[place]
        if theirs != what:
            raise RuntimeError(f"rank {other} does {theirs!r} where this rank does {what!r}")
        return message

    def progress(self, seconds: float) -> bool:
        """Send and receive what can be; whether anything could within `seconds`."""
        events = self.poll.poll(max(0.0, seconds * 1000))
        for handle, event in events:
            other = self.of_handle[handle]
            if event & select.POLLOUT:
                self._send_rest(other)
            if event & ~select.POLLOUT:
                self._receive(other)
        return bool(events)

    def _send_rest(self, other: int) -> None:
        waiting = self.unsent[other]
        while waiting:
            sent = self._send(other, [waiting[0]])
            if sent < len(waiting[0]):
                waiting[0] = waiting[0][sent:]
                return
            waiting.popleft()
        self.poll.modify(self.peers[other], select.POLLIN)

    def _receive(self, other: int) -> None:
        try:
            data = self.peers[other].recv(CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:  # the others may still be at work
            self.gone.add(other)
            self.poll.unregister(self.peers[other])
            return
        kept = self.partial[other]
        kept += data
        begin = 0
        while len(kept) - begin >= FRAME.size:
            number, what, size = FRAME.unpack_from(kept, begin)
            end = begin + FRAME.size + size
            if end > len(kept):
                break
            message = what.rstrip(b"\0"), kept[begin + FRAME.size : end]
            self.arrived.setdefault((other, number), deque()).append(message)
            begin = end
        del kept[:begin]


class Work(dist.Work):
    """An operation whose own messages are on their way. `wait` takes those of the others."""

    def __init__(self, finish: Callable[[], object]) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish:
            self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        """Waits: there is no thread that would complete it meanwhile."""
        return self.wait()

    def is_success(self) -> bool:
        return self._finish is None

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future


class MailboxGroup(dist.ProcessGroup):
    """What `torch.distributed` calls where it would call gloo. Members are numbered within the
    group, as everywhere in `torch.distributed`."""

    mailboxes: Mailboxes  # of the job that runs

    # `_`: see `connected.gloo_with_one_loop`
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.options = SimpleNamespace(global_ranks_in_group=[], group_name="")
        self.me, self.members = rank, range(size)
        self.others = [member for member in self.members if member != rank]
        self.operations = 0

    def getBackendName(self) -> str:
        return "gloo"

    def _get_backend(self, device: Any) -> "MailboxGroup":
        """What serves a device. From 2.14 on torch asks it whether it merges a batch of messages;
        neither gloo nor this does."""
        return self

    @property
    def group_name(self) -> str:
        return self.options.group_name

    def _set_sequence_number_for_group(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _key(self, what: str) -> Key:
        """Of the group's next operation."""
        self.operations += 1
        return self._digest(self.operations), what.encode()

    def _channel(self, tag: int) -> Key:
        """Of what is sent from rank to rank, one message after the other."""
        return self._digest(f"tag {tag}"), b"send"

    def _digest(self, number: object) -> bytes:
        group = f"{self.options.group_name} {self.options.global_ranks_in_group}"
        return hashlib.blake2b(f"{group} {number}".encode(), digest_size=12).digest()

    def _rank(self, member: int) -> int:
        """Of all ranks; the group of all lists none."""
        ranks = self.options.global_ranks_in_group
        return ranks[member] if ranks else member

    def _post(self, key: Key, member: int, tensor: torch.Tensor) -> None:
        self.mailboxes.post(self._rank(member), key, as_bytes(tensor))

    def _post_each(self, key: Key, inputs: Tensors) -> None:
        for member in self.others:
            self._post(key, member, inputs[member])

    def _fill_each(self, key: Key, outputs: Tensors) -> None:
        for member in self.others:
            fill(outputs[member], self._take(key, member, outputs[member]))

    def _take(self, key: Key, member: int, into: torch.Tensor) -> torch.Tensor:
        return like(self.mailboxes.take(self._rank(member), key), into)

    def _all_to_all(self, operation: str, outputs: Tensors, inputs: Tensors) -> Work:
        """`inputs[member]` goes to that member; `outputs[member]` comes from it."""
        key = self._key(operation)
        self._post_each(key, inputs)
        fill(outputs[self.me], inputs[self.me])
        return Work(lambda: self._fill_each(key, outputs))

    def _sums(self, operation: str, output: torch.Tensor, inputs: Tensors, how: Any) -> Work:
        """`inputs[member]` goes to that member; `output` is the sum of what comes."""
        adder(how)
        key = self._key(operation)
        self._post_each(key, inputs)
        mine = inputs[self.me]

        def finish() -> None:
            parts = [
                mine if member == self.me else self._take(key, member, output)
                for member in self.members
            ]
            fill(output, reduced(parts, how))

        return Work(finish)

    def _from_one(self, operation: str, root: int, output: Any, inputs: Any) -> Work:
        """`inputs[member]` of `root` goes to each member's `output`."""
        key = self._key(operation)
        if self.me == root:
            self._post_each(key, inputs)
            fill(output, inputs[root])
            return Work(lambda: None)
        return Work(lambda: fill(output, self._take(key, root, output)))

    def _to_one(self, operation: str, root: int, tensor: torch.Tensor, outputs: Any) -> Work:
        """Each member's `tensor` goes to `outputs[member]` of `root`."""
        key = self._key(operation)
        if self.me != root:
            self._post(key, root, tensor)
            return Work(lambda: None)
        fill(outputs[root], tensor)
        return Work(lambda: self._fill_each(key, outputs))

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        how = opts.reduceOp if opts else dist.ReduceOp.SUM
        works = [self._sums("allreduce", each, [each] * self.size(), how) for each in tensors]
        return together(works)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        adder(opts.reduceOp)
        [tensor] = tensors
        parts = [torch.empty_like(tensor) for _ in self.members]
        work = self._to_one("reduce", opts.rootRank, tensor, parts)

        def finish() -> None:
            work.wait()
            if self.me == opts.rootRank:
                fill(tensor, reduced(parts, opts.reduceOp))

        return Work(finish)

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        [tensor] = tensors
        return self._from_one("broadcast", opts.rootRank, tensor, [tensor] * self.size())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        [tensors], [tensor] = outputs, inputs
        if any(each.shape != tensor.shape for each in tensors):
            raise RuntimeError("gloo gathers tensors of one shape only")
        return self._all_to_all("allgather", tensors, [tensor] * self.size())

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        return together([self.allgather([list(out)], [tensor]) for out, tensor in pairs])

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        parts = shares(output, tensor, self.size())
        return self._all_to_all("allgather", parts, [tensor] * self.size())

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return together([self.all_gather_single(output, tensor) for output, tensor in pairs])

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return self._to_one("gather", opts.rootRank, inputs[0], outputs[0] if outputs else ())

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        return self._from_one("scatter", opts.rootRank, outputs[0], inputs[0] if inputs else ())

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        [output], [tensors] = outputs, inputs
        return self._sums("scatter sums", output, tensors, opts.reduceOp)

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Work:
        parts = shares(tensor, output, self.size())
        return self._sums("scatter sums", output, parts, opts.reduceOp)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return together([self.reduce_scatter_single(out, tensor, opts) for out, tensor in pairs])

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._all_to_all("alltoall", outputs, inputs)

    def all_to_all_single(
        self, output: Any, tensor: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Work:
        outputs = rows(output, output_sizes, self.size())
        return self._all_to_all("alltoall", outputs, rows(tensor, input_sizes, self.size()))

    def barrier(self, opts: Any = None) -> Work:
        return self.allgather([[torch.empty(0)] * self.size()], [torch.empty(0)])

    def send(self, tensors: Any, member: int, tag: int) -> Work:
        self._post(self._channel(tag), member, tensors[0])
        return Work(lambda: None)

    def recv(self, tensors: Any, member: int, tag: int) -> Work:
        [tensor] = tensors
        return Work(lambda: fill(tensor, self._take(self._channel(tag), member, tensor)))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()
