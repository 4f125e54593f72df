"""Messages between ranks over a tree: what one rank sends and receives grows with the logarithm of
the number of ranks.

The tree is binomial: the parent of a rank is its number without the lowest bit that is set, so that
rank 6 answers to rank 4, and ranks 1, 2 and 4 to rank 0. The ranks below one follow it in number.

A rank that dies breaks its connections. Those who wait for it then tell all others, along the tree,
that it is gone: nobody waits for as long as the process group would let it.
"""

import pickle
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_AT_ONCE_BYTES = 512  # that a message has room for; a longer one takes a second message
_NUMBER_BYTES = 8
# Of our messages, where a group tells messages apart (gloo does): no message of the program's is
# taken for one of ours.
AGREEMENT_TAG, ELEMENTS_TAG = 21843, 21844
_COMPRESSED_FROM_BYTES = 8192
_BREAKS = (RuntimeError, ValueError)  # what a network raises; the latter for a group that is gone
_NO_NUMBER = -(2**63)  # where a rank is gone


class BrokenError(RuntimeError):
    """A message did not arrive: a rank died, or the network failed."""


@dataclass(frozen=True)
class _Broken:
    """In the place of a value: why there is none."""

    why: str


class Ranks(ABC):
    """Ranks that send each other messages. All of them call the same method at once; what breaks
    raises BrokenError on all that are left."""

    rank: int
    world: int
    is_default = False  # whether they are those of torch's default process group

    @abstractmethod
    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        """Sends bytes to ranks, and returns so many from each of others. Raises RuntimeError or
        ValueError where that breaks."""

    # ------------------------------------------------ agreement

    def lowest(self, *numbers: int) -> list[int]:
        """For each number the lowest one that any rank gave; eight bytes each are sent."""
        own, size = [*numbers], _NUMBER_BYTES * len(numbers)

        def take(source: int) -> bytes:
            return self.move({}, {source: size})[source]

        def give(data: bytes, target: int) -> None:
            self.move({target: data}, {})

        why: Exception | None = None
        for child in _children(self.rank, self.world):
            try:
                own = [*map(min, own, _numbers_in(take(child)))]
            except _BREAKS as error:
                own, why = [_NO_NUMBER] * len(numbers), error
        if self.rank:
            with suppress(*_BREAKS):  # no answer comes from there either
                give(_bytes_of(own), _parent(self.rank))
        none = _bytes_of([_NO_NUMBER] * len(numbers))
        found = _numbers_in(
            self._sent_down(None if self.rank else _bytes_of(own), 0, none, take, give)
        )
        if found[0] == _NO_NUMBER:
            raise BrokenError(str(why or "another rank lost its connection to one")) from why
        return found

    def agreed(
        self, value: _T, merge: Callable[[_T, _T], _T], conclude: Callable[[_T], Any]
    ) -> tuple[_T, Any]:
        """The values of all ranks as one, on rank 0 (elsewhere those of the rank and of the ranks
        below it); and on all ranks what rank 0 concludes from it. `merge` takes values of ranks
        that follow each other."""
        broken: _Broken | None = None
        for child in _children(self.rank, self.world):
            try:
                other = unpacked(self.receive(child))
            except _BREAKS as error:
                other = _Broken(str(error))
            if isinstance(other, _Broken):
                broken = other
            elif broken is None:
                value = merge(value, other)
        if self.rank:
            with suppress(*_BREAKS):  # no answer comes from there either
                self.send(packed(broken or value), _parent(self.rank))
            return value, self._of_first(None)
        return value, self._of_first(packed(broken or conclude(value)))

    def _of_first(self, data: bytes | None) -> Any:
        found = unpacked(self.broadcast(data))
        if isinstance(found, _Broken):
            raise BrokenError(found.why)
        return found

    def broadcast(self, data: bytes | None, first: int = 0) -> bytes:
        """The bytes that the rank `first` has."""
        none = packed(_Broken("another rank lost its connection to one"))
        return self._sent_down(data, first, none, self.receive, self.send)

    def _sent_down(
        self,
        data: bytes | None,
        first: int,
        none: bytes,
        take: Callable[[int], bytes],
        give: Callable[[bytes, int], None],
    ) -> bytes:
        """What the rank `first` has, by way of the rank above this one; `none` where that one is
        gone."""
        own, why = (self.rank - first) % self.world, None
        if data is None:
            try:
                data = take((_parent(own) + first) % self.world)
            except _BREAKS as error:
                data, why = none, error
        for child in reversed(_children(own, self.world)):
            with suppress(*_BREAKS):  # the next agreement tells all that it is gone
                give(data, (child + first) % self.world)
        if why is not None:
            raise BrokenError(str(why)) from why
        return data

    def delivered(self, given: Mapping[int, _T]) -> dict[int, _T]:
        """Gives each rank its own value, by its number, where there is one; returns what came to
        this one, by the rank that gave it. No rank knows beforehand who sends: in each step all of
        them pass on what has still to go 1, 2, 4 ... ranks further."""
        held = [(target, self.rank, value) for target, value in given.items()]
        step, why = 1, ""
        while step < self.world:
            going = [one for one in held if (one[0] - self.rank) % self.world & step]
            held = [one for one in held if not (one[0] - self.rank) % self.world & step]
            target, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            try:
                held += unpacked(self._passed_on({target: packed(going)}, [source])[source])
            except _BREAKS as error:
                why = str(error)
            step *= 2
        if self.lowest(int(not why)) == [0]:
            raise BrokenError(why or "another rank lost its connection to one")
        return {source: value for _, source, value in held}

    # ------------------------------------------------ messages of any size

    def send(self, data: bytes, target: int) -> None:
        """Sends bytes to a rank, which calls `receive`."""
        self._passed_on({target: data}, [])

    def receive(self, source: int) -> bytes:
        return self._passed_on({}, [source])[source]

    def _passed_on(self, sent: Mapping[int, bytes], sources: list[int]) -> dict[int, bytes]:
        heads = {rank: _head(data) for rank, data in sent.items()}
        first = self.move(heads, dict.fromkeys(sources, _AT_ONCE_BYTES))
        room = _AT_ONCE_BYTES - _NUMBER_BYTES
        more = {rank: data[room:] for rank, data in sent.items() if len(data) > room}
        sizes = {rank: _numbers_in(head[:_NUMBER_BYTES])[0] for rank, head in first.items()}
        longer = {rank: size - room for rank, size in sizes.items() if size > room}
        rest = self.move(more, longer) if more or longer else {}
        return {
            rank: head[_NUMBER_BYTES : _NUMBER_BYTES + sizes[rank]] + rest.get(rank, b"")
            for rank, head in first.items()
        }


def packed(value: Any) -> bytes:
    """A value of ours as a message, compressed where that is worth its time."""
    data = pickle.dumps(value)
    is_long = len(data) >= _COMPRESSED_FROM_BYTES
    return b"z" + zlib.compress(data, 1) if is_long else b"p" + data


def unpacked(data: bytes) -> Any:
    """The value in a message of one of our own ranks."""
    try:
        return pickle.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data[1:])
    except (pickle.UnpicklingError, EOFError, zlib.error) as error:  # of a rank that died
        raise RuntimeError("a message between ranks did not arrive whole") from error


def _head(data: bytes) -> bytes:
    """The first message for some bytes: how many they are, and the first ones."""
    own = _bytes_of([len(data)]) + data[: _AT_ONCE_BYTES - _NUMBER_BYTES]
    return own.ljust(_AT_ONCE_BYTES, b"\0")


def _bytes_of(numbers: list[int]) -> bytes:
    return b"".join(one.to_bytes(_NUMBER_BYTES, "little", signed=True) for one in numbers)


def _numbers_in(data: bytes) -> list[int]:
    starts = range(0, len(data), _NUMBER_BYTES)
    return [int.from_bytes(data[at : at + _NUMBER_BYTES], "little", signed=True) for at in starts]


def _parent(rank: int) -> int:
    return rank & (rank - 1)


def _children(rank: int, world: int) -> list[int]:
    """The ranks that answer to one: the nearest first."""
    found, step = list[int](), 1
    while not rank & step and rank + step < world:
        found.append(rank + step)
        step *= 2
    return found


class OneRank(Ranks):
    """A process by itself."""

    rank, world = 0, 1

    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        raise NotImplementedError

    def agreed(
        self, value: _T, merge: Callable[[_T, _T], _T], conclude: Callable[[_T], Any]
    ) -> tuple[_T, Any]:
        return value, conclude(value)


def device_of_messages() -> str:
    """Where messages of the default process group lie: on a CPU, if it sends from there."""
    import torch.distributed as dist

    devices = dist.get_backend_config()  # such as "cpu:gloo,cuda:nccl", or "cuda:nccl"
    return "cpu" if "cpu:" in devices else devices.partition(":")[0]


class DefaultRanks(Ranks):
    """The ranks of torch's default process group, on whatever device it sends from."""

    is_default = True

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._device = device_of_messages()

    def _peer(self, rank: int) -> int:
        """A rank by its number in the default group."""
        import torch.distributed as dist

        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        import torch.distributed as dist

        coming = {rank: of_bytes(bytes(size)).to(self._device) for rank, size in sizes.items()}
        going = {rank: of_bytes(data).to(self._device) for rank, data in sent.items()}
        messages = [(dist.irecv, own, self._peer(rank)) for rank, own in coming.items()]
        messages += [(dist.isend, own, self._peer(rank)) for rank, own in going.items()]
        where: dict[str, Any] = {"group": self._group, "tag": AGREEMENT_TAG}
        if self._device == "cpu":  # gloo has no use for a batch, which takes as long as the message
            works: list[Any] = [does(own, peer, **where) for does, own, peer in messages]
        else:
            works = dist.batch_isend_irecv(
                [dist.P2POp(does, own, peer, **where) for does, own, peer in messages]
            )
        for work in works:
            work.wait()
        return {rank: to_bytes(memory) for rank, memory in coming.items()}

    def lowest(self, *numbers: int) -> list[int]:
        """On GPUs one collective, which does not go through their host."""
        import torch
        import torch.distributed as dist

        if self._device == "cpu":
            return super().lowest(*numbers)
        found = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return found.tolist()

    def broadcast(self, data: bytes | None, first: int = 0) -> bytes:
        """On GPUs one collective, and another one for what does not fit into it."""
        if self._device == "cpu":
            return super().broadcast(data, first)
        head = self._broadcast(None if data is None else _head(data), _AT_ONCE_BYTES, first)
        size, room = _numbers_in(head[:_NUMBER_BYTES])[0], _AT_ONCE_BYTES - _NUMBER_BYTES
        if size <= room:
            return head[_NUMBER_BYTES : _NUMBER_BYTES + size]
        rest = self._broadcast(None if data is None else data[room:], size - room, first)
        return head[_NUMBER_BYTES:] + rest

    def _broadcast(self, data: bytes | None, size_bytes: int, first: int) -> bytes:
        import torch.distributed as dist

        memory = of_bytes(bytes(size_bytes) if data is None else data).to(self._device)
        dist.broadcast(memory, self._peer(first), self._group)
        return to_bytes(memory)


class GroupRanks(DefaultRanks):
    """Those of another process group, which this rank is in."""

    is_default = False


def of_bytes(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def to_bytes(memory: Any) -> bytes:
    return memory.cpu().numpy().tobytes()
